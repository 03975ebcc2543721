"""A headless Chromium, driven through chromedriver."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from tests.support.tools import missing

AXE = Path(__file__).resolve().parents[2] / "build" / "node" / "node_modules" / "axe-core"
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--window-size=1200,2000"),
    "--ignore-certificate-errors",  # of an authority that tests made
)


class Browser:
    """One window; `close` it."""

    def __init__(self, profile: Path) -> None:
        """
        Args:
            profile: an empty folder.
        """
        driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
        if driver is None or chromium is None or not AXE.exists():
            missing("Chromium or axe-core", "apt-get install chromium chromium-driver; make test")
        options = Options()
        options.binary_location = str(chromium)
        for option in (*OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(driver)))

    def open(self, url: str) -> None:
        self.driver.get(url)

    def text(self, selector: str) -> str:
        """Of the first element; empty if there is none."""
        return str(
            self.run("return document.querySelector(arguments[0])?.textContent", selector) or ""
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def type(self, selector: str, text: str) -> None:
        self.driver.find_element("css selector", selector).send_keys(text)

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def errors(self) -> list[str]:
        """What the console of the browser has said since it was asked last, from warnings up."""
        entries = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [e["message"] for e in entries if e["level"] in ("SEVERE", "WARNING")]

    def violations(self) -> list[str]:
        """What axe finds that is serious or critical."""
        self.run((AXE / "axe.min.js").read_text("utf-8"))
        found = self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            "axe.run().then((told) => done(told.violations)).catch((e) => done([String(e)]))"
        )
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
            for one in found
            if isinstance(one, str) or one["impact"] in ("serious", "critical")
        ]

    def resize(self, width: int, height: int = 900) -> None:
        """Give the page this size in CSS pixels, also one narrower than a window can be."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )

    def screenshot(self, file: Path, width: int = 1200) -> None:
        """The whole page at a width, as PNG."""
        self.resize(width)
        time.sleep(0.3)  # for the charts, which follow
        high = int(self.run("return document.documentElement.scrollHeight"))
        self.resize(width, min(4000, high))
        time.sleep(0.3)
        file.write_bytes(self.driver.get_screenshot_as_png())

    def close(self) -> None:
        self.driver.quit()
