"""The web console in a real browser, before the running app."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest

from tests.support.app import MODEL, App, until
from tests.support.browser import Browser

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("same_replicas")]
SCREENSHOT = "HEADRACE_CONSOLE_PNG"
"""Environment variable: the file for a picture of the page."""


@pytest.fixture
def page(app: App, browser: Browser) -> Browser:
    """The console, loaded and told of the app."""
    browser.open(f"{app.url}/console")
    until(lambda: "Updated" in browser.text("#updated"), 30, "the console shows the app")
    return browser


def test_it_shows_the_app_and_goes_on_to_update(app: App, page: Browser) -> None:
    assert MODEL in page.text("h1")
    assert "prefill/" in page.text("svg") and "decode/" in page.text("svg")
    assert "Running" in page.text("table[aria-label='Replicas']")
    before = page.text("table[aria-label='Replicas']")
    app.complete("Hello " + uuid.uuid4().hex, max_tokens=4)

    def changed() -> bool:
        return page.text("table[aria-label='Replicas']") != before

    until(changed, 20, "the numbers move without a reload", lambda: before)
    assert page.run("return document.querySelectorAll('.chart canvas').length") == 1
    assert page.errors() == []


def test_it_explains_a_request(app: App, page: Browser) -> None:
    name = f"console-{uuid.uuid4().hex}"
    app.complete("Hello", headers={"X-Request-Id": name}, max_tokens=2)
    page.type("#request", name)
    page.click("section[aria-labelledby='plan'] button[type=submit]")
    until(lambda: name in page.text("#plan-told"), 20, "the plan is shown")
    told = page.text("#plan-told")
    for part in ("answered by", "because", "total", "First token after"):
        assert part in told, told
    if (file := os.environ.get(SCREENSHOT)) is not None:
        time.sleep(20)  # for a few points of the chart
        page.screenshot(Path(file))
    page.run("document.querySelector('#request').value = ''")
    page.type("#request", "nobody-asked-this")
    page.click("section[aria-labelledby='plan'] button[type=submit]")
    until(lambda: "nobody-asked-this" in page.text("[role=alert]"), 20, "there is no such plan")


def test_it_gives_orders_that_an_administrator_may_give(app: App, page: Browser) -> None:
    for policy in ("local", "cost"):
        page.run(
            "[...document.querySelectorAll('section[aria-labelledby=actions] button')]"
            ".find((one) => one.innerText === arguments[0]).click()",
            policy,
        )
        until(lambda p=policy: f'"{p}"' in page.text("#done"), 20, "the order is done")
        assert app.replica("decode")["router"]["policy"] == policy


def test_axe_finds_nothing_serious(page: Browser) -> None:
    assert page.violations() == []


def test_it_asks_no_other_host(page: Browser, app: App) -> None:
    asked = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert asked and all(str(url).startswith((app.url, "data:")) for url in asked), asked
