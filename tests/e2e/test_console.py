"""The web console in a real browser, before the running app."""

from __future__ import annotations

import uuid

import pytest

from tests.support.app import MODEL, App, until
from tests.support.browser import Browser

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("same_replicas")]


@pytest.fixture
def page(app: App, browser: Browser) -> Browser:
    """The console, loaded and told of the app."""
    browser.open("about:blank")
    browser.open(f"{app.url}/console")
    until(lambda: "Updated" in browser.text("#updated"), 30, "the console shows the app")
    return browser


def show(page: Browser, tab: str) -> None:
    page.click(f"#tab-{tab}")
    until(lambda: page.text(f"#tab-{tab}[aria-selected=true]"), 20, "the tab is shown")


def test_it_shows_the_app_and_continues_to_update(app: App, page: Browser) -> None:
    assert MODEL in page.text("h1")
    assert "Healthy" in page.text("#health")
    assert "prefill/" in page.text("#topology svg") and "decode/" in page.text("#topology svg")
    assert "Running" in page.text("table[aria-label='Replicas']")
    before = page.text("table[aria-label='Replicas']")
    app.complete("Hello " + uuid.uuid4().hex, max_tokens=4)

    def changed() -> bool:
        return page.text("table[aria-label='Replicas']") != before

    until(changed, 20, "the numbers move without a reload", lambda: before)
    assert page.errors() == []


def test_each_tab_shows_the_app(page: Browser) -> None:
    for tab in ("overview", "requests", "kv", "advice", "tenants", "settings", "playground"):
        show(page, tab)
        assert page.text("#panel h2")
    assert page.errors() == []


def test_it_explains_a_request(app: App, page: Browser) -> None:
    name = f"console-{uuid.uuid4().hex}"
    app.complete("Hello", headers={"X-Request-Id": name}, max_tokens=2)
    show(page, "requests")
    page.type("#request", name)
    page.click("#requests form:last-of-type button[type=submit]")
    until(lambda: page.text("#plan-told"), 20, "the plan is shown")
    assert name in page.text("#plan-id")
    told = page.text("#plan-told")
    for part in ("answered", "Reason:", "Total", "to the first token"):
        assert part in told, told
    page.run("location.hash = 'requests/not-a-request'")
    until(lambda: "not-a-request" in page.text("[role=alert]"), 20, "there is no such plan")


def test_it_changes_a_setting_after_a_question(app: App, page: Browser) -> None:
    show(page, "settings")
    for policy in ("local", "cost"):
        button = f"#policy button[data-value={policy}]"
        page.click(button)
        until(lambda: page.text("dialog"), 20, "it asks")
        page.click("#dialog-confirm")
        until(lambda: "Done" in page.text("#policy .result"), 20, "the setting is changed")
        assert app.replica("decode")["router"]["policy"] == policy
        current = f"#policy button[data-value={policy}]:disabled"
        until(lambda c=current: page.text(c), 20, "the page shows the setting")


def test_axe_finds_nothing_serious(page: Browser) -> None:
    assert page.violations() == []


def test_it_asks_no_other_host(page: Browser, app: App) -> None:
    asked = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert asked and all(str(url).startswith((app.url, "data:")) for url in asked), asked
