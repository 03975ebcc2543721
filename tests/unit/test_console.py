"""The web console's files, and the document that it shows."""

from __future__ import annotations

import asyncio
import posixpath
import re
from pathlib import Path
from typing import Any

import pytest

import headrace.console
from headrace.console.files import CONSOLE, find
from tests.unit.gateway_fakes import answer, asked_from_elsewhere, gateway_over

STATIC = Path(headrace.console.__file__).parent / "static"
NAMES = sorted(str(file.relative_to(STATIC)) for file in STATIC.rglob("*.*"))
FILES = [CONSOLE, *(f"{CONSOLE}/{name}" for name in NAMES)]
MAX_BYTES = 250_000
STATE = "/headrace/v1/console"
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", FILES)
async def test_a_file_needs_no_key_and_says_what_it_may_load(path: str) -> None:
    async with (
        gateway_over(answer, api_keys=("k" * 8,)) as bench,
        bench.client.get(path) as response,
    ):
        assert response.status == 200
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["etag"]
        assert len(await response.read()) > 100


def test_the_page_is_small() -> None:
    assert sum((STATIC / name).stat().st_size for name in NAMES) < MAX_BYTES


async def test_a_browser_that_has_a_file_is_not_sent_it_again() -> None:
    async with gateway_over(answer) as bench:
        async with bench.client.get(CONSOLE) as response:
            etag = response.headers["etag"]
        async with bench.client.get(CONSOLE, headers={"if-none-match": etag}) as response:
            assert (response.status, await response.read()) == (304, b"")
        async with bench.client.get(CONSOLE, headers={"if-none-match": '"old"'}) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    "path",
    ["/console/x.js", "/console/../own.py", "/console/vendor"],
)
async def test_only_the_listed_files_exist(path: str) -> None:
    async with gateway_over(answer) as bench, bench.client.get(path) as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("path", "accept"), [("/console/", "*/*"), ("/", "text/html,application/xhtml+xml,*/*;q=0.8")]
)
async def test_a_browser_finds_the_console_without_a_key(path: str, accept: str) -> None:
    headers = {"accept": accept}
    async with gateway_over(answer, api_keys=("k" * 8,)) as bench:
        async with bench.client.get(path, headers=headers, allow_redirects=False) as response:
            assert (response.status, response.headers["location"]) == (307, CONSOLE)
        async with bench.client.get(path, headers=headers) as response:
            assert response.headers["content-type"].startswith("text/html")


async def test_docs_say_where_the_routes_are_described() -> None:
    async with gateway_over(answer) as bench, bench.client.get("/docs") as response:
        assert response.status == 404
        assert "/openapi.json" in (await response.json())["error"]["message"]


async def test_files_are_only_read() -> None:
    async with gateway_over(answer) as bench, bench.client.post(CONSOLE, json={}) as response:
        assert (response.status, response.headers["allow"]) == (405, "GET, HEAD")


def test_the_pages_name_no_other_host_and_hold_no_inline_script() -> None:
    for path in FILES:
        file = find(path)
        assert file is not None
        if "/vendor/" in path:
            continue
        text = file.body.decode()
        assert not re.search(r"https?://(?![$]|\${)|//[a-z]+\.[a-z]", text), path
        assert not re.search(r"<script>|\son[a-z]+=\"|style=\"|innerHTML", text), path


def test_what_a_file_loads_exists() -> None:
    for name in NAMES:
        if name.startswith("vendor/"):
            continue
        text = (STATIC / name).read_text()
        folder = f"{CONSOLE}/{posixpath.dirname(name)}"
        loaded = [
            *re.findall(r'"(/console/[^"]+)"', text),
            *(
                posixpath.normpath(f"{folder}/{target}")
                for target in re.findall(r'from "(\.[^"]+)"', text)
            ),
        ]
        for target in loaded:
            assert find(target) is not None, (name, target)


def test_the_pages_of_the_documentation_that_it_names_exist() -> None:
    docs = Path(__file__).parents[2] / "docs"
    named = [
        *re.findall(r'page="([^"]+)"', "".join((STATIC / name).read_text() for name in NAMES)),
        *re.findall(r'docs: \["([^"]+)"', (STATIC / "tabs" / "settings.js").read_text()),
    ]
    assert named
    for page, _, anchor in (name.partition("#") for name in named):
        text = (docs / page).read_text()
        headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        assert not anchor or anchor in [line.lower().replace(" ", "-") for line in headings], page


async def test_the_state_needs_an_administrators_key() -> None:
    async with gateway_over(answer, api_keys=("k" * 8,)) as bench:
        async with bench.client.get(STATE) as response:
            assert response.status == 401
        key = {"authorization": f"Bearer {'k' * 8}"}
        async with bench.client.get(STATE, headers=key) as response:
            assert response.status == 403


async def test_the_state_is_not_told_to_other_machines_without_keys() -> None:
    from tests.unit.gateway_fakes import FakeCluster

    assert (await asked_from_elsewhere(FakeCluster(), "GET", STATE, b""))["status"] == 403


async def test_however_many_pages_look_the_cluster_is_asked_once_a_second() -> None:
    async with gateway_over(answer) as bench:
        asked = 0
        told = bench.cluster.status

        async def counted() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.05)
            return await told()

        bench.cluster.status = counted  # type: ignore[method-assign]

        async def look() -> dict[str, Any]:
            async with bench.client.get(STATE) as response:
                return dict(await response.json())

        states = await asyncio.gather(*(look() for _ in range(20)))
        assert asked == 1
        assert all(state == states[0] for state in states)
