"""The web console in a real browser, over recorded documents: what each tab shows in each state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.browser import Browser
from tests.support.console_page import KEY, ConsolePage, console_page
from tests.support.console_pictures import REQUEST, TABS

pytestmark = pytest.mark.slow
WAIT_S = 30.0
REQUEST_ID = REQUEST.partition("/")[2]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ConsolePage]:
    with console_page("loaded") as page:
        yield page


@pytest.fixture
def opened(browser: Browser, server: ConsolePage) -> Iterator[Callable[..., Browser]]:
    """Opens a tab in a state, and waits until it is shown."""

    def open_tab(place: str, state: str = "loaded", width: int = 1280) -> Browser:
        server.state = state
        browser.resize(width)
        browser.open("about:blank")
        browser.open(f"{server.url}/console#{place}")
        shown = f"[role=tab][aria-selected=true]#tab-{place.partition('/')[0]}"
        if state in ("loaded", "empty", "degraded"):
            wait(lambda: browser.text(shown) and "Updated" in browser.text("#updated"))
        return browser

    yield open_tab
    server.state = "loaded"
    if browser.run("return location.protocol") != "about:":
        browser.run("sessionStorage.clear(); localStorage.clear()")
    browser.errors()


def wait(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, "the page does not show it"
        time.sleep(0.05)


def module(browser: Browser, file: str, expression: str, *arguments: Any) -> Any:
    """Evaluate an expression over `m`, one of the console's modules, and the arguments `a`."""
    return browser.driver.execute_async_script(
        "const [file, a] = arguments; const done = arguments[arguments.length - 1];"
        f"import(`/console/${{file}}`).then((m) => done({expression}), (e) => done(String(e)))",
        file,
        arguments,
    )


@pytest.mark.parametrize("state", ["loaded", "empty", "degraded"])
@pytest.mark.parametrize("tab", TABS)
def test_each_tab_shows_each_state_without_an_error(
    opened: Callable[..., Browser], tab: str, state: str
) -> None:
    page = opened(tab, state)
    assert page.text("#panel h2")
    for wrong in ("undefined", "NaN", "null", "[object"):
        assert wrong not in page.text("body")
    assert page.errors() == []


@pytest.mark.parametrize("place", [*TABS, REQUEST])
def test_a_tab_does_not_scroll_sideways_and_axe_finds_nothing_serious(
    opened: Callable[..., Browser], place: str
) -> None:
    """In a narrow window and in a wide one, and in both themes, of one page: a page costs a second
    of a core."""
    page = opened(place, "loaded", 390)
    wait(lambda: page.run("return document.querySelectorAll('#panel section').length") > 0)
    for width in (390, 1920):
        page.resize(width)
        wide = "return document.documentElement.scrollWidth - window.innerWidth"
        wait(lambda: page.run(wide) <= 0)  # noqa: B023
    page.resize(1280)
    if "/" in place:
        wait(lambda: page.text("#plan-told"))
    for theme in ("light", "dark"):
        page.run("document.documentElement.dataset.theme = arguments[0]", theme)
        assert page.violations() == [], theme


def test_the_health_names_what_is_wrong(opened: Callable[..., Browser]) -> None:
    assert "Healthy" in opened("overview").text("#health")
    page = opened("overview", "degraded")
    assert "Degraded: 12% of the last minute's requests failed" in page.text("#health")
    problems = page.text(".problems ul")
    for problem in (
        "1 of 2 decode replicas does not answer",
        "decode q3k7d1mz is suspect",
        "prefill replica p0t5w9ye",
        "machine 77aa01be",
    ):
        assert problem in problems


def test_what_engines_run_without_stands_once_under_the_replicas(
    opened: Callable[..., Browser],
) -> None:
    assert "no prefix cache" not in opened("overview").text("#replicas")
    told = opened("overview", "degraded").text("#replicas")
    assert told.count("no prefix cache") == 1
    assert "prefill/p0t5w9ye, decode/q3k7d1mz: vLLM switches it off for MLA" in told


def test_a_gateway_that_stops_answering_leaves_the_last_state_on_the_page(
    opened: Callable[..., Browser], server: ConsolePage
) -> None:
    page = opened("overview")
    server.state = "no-answer"
    wait(lambda: "No answer from the gateway" in page.text("#health"))
    assert "last state" in page.text("[role=alert]")
    assert "decode/q3k7d1mz" in page.text("#topology")
    server.state = "loaded"
    wait(lambda: "Healthy" in page.text("#health"))


def test_a_page_without_an_answer_says_so(opened: Callable[..., Browser]) -> None:
    page = opened("overview", "no-answer")
    wait(lambda: "does not answer" in page.text("[role=alert]"))
    page = opened("overview", "loading")
    wait(lambda: "Asking the gateway" in page.text("main [role=status]"))


def test_a_key_is_kept_in_the_tab_only_on_request(opened: Callable[..., Browser]) -> None:
    def show(*, remember: bool) -> Browser:
        page = opened("overview", "key")
        wait(lambda: "API key" in page.text("[role=alert]"))
        page.type("#key", KEY)
        if remember:
            page.click("#remember")
        page.click("button[type=submit]")
        wait(lambda: "Updated" in page.text("#updated"))
        assert KEY not in page.run("return location.href + JSON.stringify(localStorage)")
        page.driver.refresh()
        return page

    page = show(remember=False)
    wait(lambda: "API key" in page.text("[role=alert]"))
    page = show(remember=True)
    wait(lambda: "Updated" in page.text("#updated"))


def test_arrow_keys_move_between_tabs_and_the_url_names_the_tab(
    opened: Callable[..., Browser],
) -> None:
    page = opened("overview")
    for key, tab in (
        ("\ue014", "requests"),  # right
        ("\ue010", "playground"),  # End
        ("\ue014", "overview"),
        ("\ue012", "playground"),  # left
        ("\ue011", "overview"),  # Home
    ):
        page.type("[role=tab][aria-selected=true]", key)
        wait(lambda tab=tab: page.text("[role=tab][aria-selected=true]").lower() == tab)
        assert page.run("return location.hash") == f"#{tab}"
        assert page.run("return document.activeElement.id") == f"tab-{tab}"
    assert page.run("return document.querySelectorAll('[role=tab][tabindex=\"0\"]').length") == 1


def test_requests_are_listed_newest_first_and_filtered(opened: Callable[..., Browser]) -> None:
    page = opened("requests")
    rows = "#requests tbody tr"
    wait(lambda: page.text(rows))
    assert page.text(f"{rows} button") == "req-007315"
    page.type("#filter-text", "no_replica")
    wait(lambda: "1 of 66 requests" in page.text("#requests [role=status]"))
    assert "503" in page.text(rows)


def test_a_request_that_does_not_stream_runs(opened: Callable[..., Browser]) -> None:
    page = opened("requests")
    page.type("#filter-text", "req-007312")
    wait(lambda: "1 of 66 requests" in page.text("#requests [role=status]"))
    assert "running" in page.text("#requests tbody")
    assert "first token" not in page.text("#requests tbody")


def test_failures_are_counted_by_their_code(opened: Callable[..., Browser]) -> None:
    page = opened("requests")
    wait(lambda: page.text("#failures"))
    told = page.text("#failures")
    assert "503 no_replica (" in told and "429 queue_full (" in told and "client left (" in told
    assert not opened("requests", "empty").text("#failures")


def test_a_click_explains_a_request(opened: Callable[..., Browser]) -> None:
    page = opened("requests")
    wait(lambda: page.text("#requests tbody tr"))
    page.type("#filter-text", REQUEST_ID)
    wait(lambda: "1 of 66 requests" in page.text("#requests [role=status]"))
    page.click("#requests tbody button")
    wait(lambda: page.text("#plan-told"))
    assert page.run("return location.hash") == f"#{REQUEST}"
    told = page.text("#plan-told")
    for text in ("Reason: remote saves 0.685 s", "Gateway queue 41 ms", "Compute the prompt"):
        assert text in told
    assert "Bring cached KV into DRAM" not in told, "a part that is 0 for each choice"


def test_an_unknown_request_is_an_error_in_words(opened: Callable[..., Browser]) -> None:
    page = opened("requests/nothing-like-it")
    wait(lambda: "nothing-like-it" in page.text("#plan [role=alert]"))


def test_a_change_of_a_setting_says_its_effect_and_asks(
    opened: Callable[..., Browser], server: ConsolePage
) -> None:
    page = opened("settings")
    assert "By cost" in page.text("#policy .in-force")
    server.puts.clear()
    page.click("#policy [data-value=local]")
    wait(lambda: "Prefill replicas get no more prompts" in page.text("dialog"))
    page.click("#dialog-cancel")
    wait(lambda: not page.text("dialog"))
    assert server.puts == []
    assert page.run("return document.activeElement.dataset.value") == "local"
    page.click("#policy [data-value=local]")
    wait(lambda: page.text("dialog"))
    page.click("#dialog-confirm")
    wait(lambda: "Done: decode replicas compute all prompts" in page.text("#policy .result"))
    assert server.puts == [("/headrace/v1/router", {"policy": "local"})]


def test_the_playground_streams_an_answer_and_shows_how_it_came(
    opened: Callable[..., Browser],
) -> None:
    page = opened("playground")
    page.type("#prompt", "What is KV?")
    page.click("#send")
    wait(lambda: "begins alike" in page.text(".message.assistant"))
    wait(lambda: "Reason" in page.text("#answer"))
    facts = page.text("#chat-facts")
    assert "16 tokens" in facts and "31 tokens" in facts and "chat-000001" in facts


def test_the_advice_is_in_words(opened: Callable[..., Browser]) -> None:
    assert "Yes: disaggregation pays" in opened("advice").text("#advice")
    assert "No: disaggregation does not pay" in opened("advice", "degraded").text("#advice")
    assert "Too little traffic yet" in opened("advice", "empty").text("#advice")


def test_tiers_that_are_off_are_grey_and_say_off(opened: Callable[..., Browser]) -> None:
    page = opened("overview")
    assert "Object store: off" in page.text("#topology g.off title")
    page = opened("overview", "empty")
    assert "KV store (off)" in page.text("#topology .group.off")


def test_it_asks_no_other_host(opened: Callable[..., Browser], server: ConsolePage) -> None:
    page = opened("overview")
    asked = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert asked and all(str(url).startswith((server.url, "data:")) for url in asked), asked


@pytest.mark.parametrize(
    ("address", "host", "shown"),
    [
        ("127.0.0.1:8265", "localhost", "http://localhost:8265/#/serve/applications/default"),
        ("10.0.0.7:8265", "10.0.0.7", "http://10.0.0.7:8265/#/serve/applications/default"),
        ("https://ray.example/", "x", "https://ray.example/#/serve/applications/default"),
        ("10.0.0.7:8265", "localhost", "kubectl port-forward service/RAY_HEAD_SERVICE 8265:8265"),
        ("127.0.0.1:8265", "node7", "ssh -L 8265:127.0.0.1:8265 node7"),
        ("", "localhost", None),
    ],
)
def test_rays_dashboard_is_a_link_only_where_this_browser_reaches_it(
    opened: Callable[..., Browser], address: str, host: str, shown: str | None
) -> None:
    page = opened("overview")
    ray = {"dashboard": address, "app": "default"}
    found = module(page, "lib/links.js", "m.rayDashboard(...a)", ray, {"hostname": host})
    if shown is None:
        assert found is None
    elif shown.startswith("http"):
        assert found == {"href": shown}
    else:
        assert shown in found["note"]


def test_a_counter_that_fell_begins_the_rates_again(opened: Callable[..., Browser]) -> None:
    page = opened("overview")
    points = [
        {"at": at, "promptTokens": tokens, "reachedTokens": tokens / 2, "nixlBytes": 0}
        for at, tokens in ((0, 100), (2, 300), (4, 10), (6, 30))
    ]
    kept = module(page, "lib/counters.js", "a[0].reduce(m.withPoint, [])", points)
    assert [point["at"] for point in kept] == [4, 6]
    rate = module(page, "lib/counters.js", "m.rateOf(a[0], (p) => p.promptTokens)", kept)
    assert rate == 10
    assert module(page, "lib/counters.js", "m.hitRates(a[0])", kept) == [None, 0.5]


def test_counts_of_a_step_that_has_not_ended_are_divided_by_the_time_that_passed(
    opened: Callable[..., Browser],
) -> None:
    page = opened("overview")
    columns = ("errors", "tokens", "ttft_p50_s", "ttft_p99_s", "tpot_p99_s")
    series = {"step_s": 10, "at": [100, 110, 120], "requests": [20, 8, 1]}
    series |= {name: [0, 0, 0] for name in columns}
    rates = module(page, "lib/history.js", "m.ratesOf(...a)", series, 114)
    assert (rates["at"], rates["requests"]) == ([100, 110], [2, 2])


def test_the_usage_of_the_last_day_is_shown_by_tenant(opened: Callable[..., Browser]) -> None:
    page = opened("tenants")
    wait(lambda: page.text("#usage tbody tr:last-child"))
    row = page.text("#usage tbody tr:last-child")
    for part in ("shop", "2,950", "3,120,455", "80 %", "140,312"):
        assert part in row, row


def test_the_rest_of_an_answer_has_its_time_per_token(opened: Callable[..., Browser]) -> None:
    page = opened("overview")
    request = {"queue_s": 0.1, "ttft_s": 0.6, "total_s": 5.1, "tokens": 46, "streamed": True}
    parts = module(page, "lib/plans.js", "m.measuredParts(a[0], {})", request)
    assert [each["name"] for each in parts] == [
        "Gateway queue",
        "First token",
        "Rest of the answer, 45 tokens of 100 ms each:",
    ]


def test_a_tenants_errors_are_the_servers_not_its_own(opened: Callable[..., Browser]) -> None:
    page = opened("overview")
    finished = [
        {"tenant": "a", "status": 200, "error": None, "tokens": 3, "ttft_s": 0.2},
        {"tenant": "a", "status": 503, "error": "no_replica", "tokens": None, "ttft_s": None},
        {"tenant": "a", "status": 200, "error": "replica_lost", "tokens": 4, "ttft_s": 0.4},
        {"tenant": "a", "status": 429, "error": "queue_full", "tokens": None, "ttft_s": None},
        {"tenant": "a", "status": 499, "error": None, "tokens": 1, "ttft_s": 0.1},
    ]
    (row,) = module(page, "lib/tenants.js", "m.byTenant(a[0], [])", finished)
    assert (row["requests"], row["errors"], row["refused"], row["tokens"]) == (5, 2, 1, 8)
