"""Pictures of the web console over recorded documents, to look at, and those of the documentation.

python -m tests.support.console_pictures FOLDER    # every tab and state, at three widths
python -m tests.support.console_pictures --docs    # docs/img/console-*.png
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from PIL import Image

from tests.support.browser import Browser
from tests.support.console_page import RECORDED, STATES, console_page

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (390, 1280, 1920)
TABS = ("overview", "requests", "kv", "advice", "tenants", "settings", "playground")
REQUEST = "requests/req-007307"
POINTS_S = 7.0
"""Seconds for a few documents, so that rates are known."""
DOCS_HEIGHT = 1330
DOCS = {
    "console-overview": ("overview", 1280, "light"),
    "console-request": (REQUEST, 1280, "light"),
    "console-kv": ("kv", 1280, "dark"),
}


def take(browser: Browser, url: str, place: str, width: int, theme: str, file: Path) -> None:
    """Save a picture of one tab."""
    browser.open("about:blank")
    browser.open(f"{url}/console#{place}")
    browser.run(
        "localStorage.setItem('headrace-console-colours', arguments[0]);"
        "document.documentElement.dataset.theme = arguments[0]",
        theme,
    )
    browser.driver.refresh()
    time.sleep(POINTS_S if place in ("overview", "kv") else 1.5)
    browser.screenshot(file, width)


def shrink(file: Path) -> None:
    """Cut a picture for the docs at a height, and leave it 128 colours."""
    with Image.open(file) as picture:
        small = picture.crop((0, 0, picture.width, min(picture.height, DOCS_HEIGHT)))
        small.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--docs", action="store_true", help="write the pictures of the docs")
    parser.add_argument("--state", choices=STATES, help="this state only")
    parser.add_argument("--tab", help="this tab only")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    arguments = parser.parse_args()
    if not arguments.docs and arguments.folder is None:
        parser.error("name a folder, or --docs")
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        try:
            if arguments.docs:
                with console_page("loaded") as page:
                    for name, (place, width, theme) in DOCS.items():
                        file = ROOT / "docs" / "img" / f"{name}.png"
                        take(browser, page.url, place, width, theme, file)
                        shrink(file)
                return
            arguments.folder.mkdir(parents=True, exist_ok=True)
            for state in (arguments.state,) if arguments.state else STATES:
                places = (*TABS, REQUEST) if state in RECORDED else TABS[:1]
                with console_page(state) as page:
                    for place in (arguments.tab,) if arguments.tab else places:
                        for width in WIDTHS:
                            name = f"{state}-{place.replace('/', '-')}-{width}.png"
                            file = arguments.folder / name
                            take(browser, page.url, place, width, arguments.theme, file)
        finally:
            browser.close()


if __name__ == "__main__":
    main()
