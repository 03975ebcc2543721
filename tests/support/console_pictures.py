"""Pictures of the web console.

python -m tests.support.console_pictures FOLDER    # recorded documents: every tab, state and width
python -m tests.support.console_pictures --docs    # docs/img/console-*.png: a real app under load
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
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
    "console-overview": ("overview", "light"),
    "console-request": ("requests/", "light"),
    "console-kv": ("kv", "dark"),
    "console-tenants": ("tenants", "light"),
}
HEADRACE = (sys.executable, "-m", "headrace.cli")
TENANTS = ("shop", "bank")
LOAD_S = 150.0
"""Seconds of load before the pictures, so that charts and rates have something to show."""
PAUSES_S = (1.0, 5.0)
"""Bounds of a client's pause between two questions."""
POLICY = "\n".join(f"Rule {n}: orders above {n * 7} euros need form {n * 3}." for n in range(60))
"""System prompt that all questions of a tenant share: about 1,000 tokens."""


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


@contextmanager
def loaded_app(folder: Path) -> Iterator[tuple[str, str]]:
    """A laptop's app that two tenants use; its address, and an administrator's key."""
    file, name = folder / "keys.yaml", folder.name
    keys = {}
    for who in (*TENANTS, "operator"):
        words = ["keys", "add", who, "--file", str(file), "--json"]
        admin = ["--admin"] if who == "operator" else []
        done = subprocess.run([*HEADRACE, *words, *admin], check=True, capture_output=True)
        keys[who] = str(json.loads(done.stdout)["key"])
    start = ["up", "--detach", "--json", "--name", name, "--set", "gateway.port=0"]
    start += ["--set", f"gateway.api_keys_file={file}"]
    told = subprocess.run([*HEADRACE, *start], check=True, stdout=subprocess.PIPE).stdout
    endpoint = str(json.loads(told)["endpoint"])
    over = threading.Event()
    clients = [
        threading.Thread(target=keep_asking, args=(endpoint, who, keys[who], over), daemon=True)
        for who in TENANTS
    ]
    try:
        for client in clients:
            client.start()
        time.sleep(LOAD_S)
        yield endpoint.removesuffix("/v1"), keys["operator"]
    finally:
        over.set()
        for client in clients:
            client.join(60)
        subprocess.run([*HEADRACE, "down", "--name", name], check=False)


def keep_asking(endpoint: str, who: str, key: str, over: threading.Event) -> None:
    """Ask about one text of the tenant's own, with pauses, until it is over."""
    client = OpenAI(base_url=endpoint, api_key=key, timeout=120, max_retries=0)
    model = client.models.list().data[0].id
    rng = random.Random(who)
    while not over.wait(rng.uniform(*PAUSES_S)):
        with contextlib.suppress(Exception):  # the console shows it
            for _ in client.chat.completions.create(
                model=model,
                messages=[
                    {"role": "system", "content": f"You work for the {who}.\n{POLICY}"},
                    {"role": "user", "content": f"What does rule {rng.randrange(60)} say?"},
                ],
                max_tokens=rng.randrange(16, 48),
                temperature=0,
                stream=True,
            ):
                pass


def take_docs(browser: Browser, url: str, key: str) -> None:
    """Save the pictures of the docs."""
    browser.open(f"{url}/console")
    deadline = time.monotonic() + 30
    while not browser.run("return document.querySelector('#key')") and time.monotonic() < deadline:
        time.sleep(0.2)
    browser.type("#key", key)
    browser.click("#remember")
    browser.click(".key button[type=submit]")
    time.sleep(POINTS_S)
    for name, (place, theme) in DOCS.items():
        if place.endswith("/"):
            place += answered(url, key)
        file = ROOT / "docs" / "img" / f"{name}.png"
        take(browser, url, place, 1280, theme, file)
        shrink(file)


def answered(url: str, key: str) -> str:
    """The id of a finished stream."""
    headers = {"Authorization": f"Bearer {key}"}
    told = httpx.get(f"{url}/headrace/v1/requests", headers=headers).raise_for_status().json()
    finished: list[dict[str, Any]] = told["finished"]
    return next(str(one["id"]) for one in finished if one["streamed"] and one["status"] == 200)


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
                with loaded_app(Path(profile)) as (url, key):
                    take_docs(browser, url, key)
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
