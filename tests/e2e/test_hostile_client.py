"""A hostile client at the public port: it is refused or answered, and a neighbour's stream goes on.

Each attack runs while the neighbour streams. The attacks are those of `benchmarks.hostile`, which
measures what these tests only bound.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPException
from urllib.parse import urlsplit

import psutil
import pytest

from benchmarks.hostile.attacks import (
    ANSWER_LIMIT_S,
    Request,
    SlowHeads,
    Unread,
    Wire,
    requests,
    send,
    too_long,
    wires,
    wrong_answer,
)
from benchmarks.hostile.neighbour import Neighbour
from tests.support.app import MODEL, App
from tests.support.prompts import noise

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("same_replicas"),
    pytest.mark.timeout(400),
]

AT_ONCE = 4
HANG_S = 5.0
"""No event loop may be held for longer on the slowest machine; `benchmarks.hostile` measures it."""
GROWTH_BYTES = 200_000_000


def connect(app: App) -> socket.socket:
    url = urlsplit(app.url)
    return socket.create_connection((url.hostname, url.port), timeout=ANSWER_LIMIT_S)


@pytest.fixture
def neighbour(app: App) -> Iterator[Neighbour]:
    """Streams during the test; each of its answers came whole, and is the same."""
    with Neighbour(app.url, MODEL, {}, tokens=12, pause_s=2.0) as streaming:
        yield streaming
    assert streaming.failures == []
    assert len(streaming.answers) >= 1
    assert len(set(streaming.answers)) == 1


def wrong(app: App, request: Request) -> str | None:
    """What is wrong with the answer to a request; None if nothing is."""
    try:
        found = send(app.url, request, {})
    except (OSError, HTTPException) as error:
        return f"{request.name}: {error!r}"
    if found is None or (found[0] in request.statuses and too_long(*found) is None):
        return None
    return f"{request.name}: {found[0]} {found[1][:200]}"


def resident(app: App) -> dict[str, int]:
    """Bytes of memory of the gateway and the decode replica."""
    pids = {"gateway": app.status()["gateway"]["pid"], "decode": app.replica("decode")["pid"]}
    return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}


@pytest.mark.skipif("HEADRACE_TEST_URL" in os.environ, reason="needs the app's processes")
def test_requests_of_every_hostile_kind_are_answered_and_hold_nothing(
    app: App, neighbour: Neighbour
) -> None:
    before = resident(app)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda request: wrong(app, request), requests(MODEL)))
    assert [each for each in found if each] == []
    after = resident(app)
    assert sum(after.values()) - sum(before.values()) < GROWTH_BYTES, (before, after)
    assert app.status()["gateway"]["loop_stall_s"] < HANG_S
    assert app.replica("decode")["loop_stall_s"] < HANG_S


def test_misused_connections_are_answered_or_ended(app: App, neighbour: Neighbour) -> None:
    """All at once, beside 200 that never finish their head."""

    def act(wire: Wire) -> str | None:
        with closing(connect(app)) as sock:
            wrong = wrong_answer(wire.act(sock))
        return None if wrong is None else f"{wire.name}: {wrong}"

    slow = SlowHeads(lambda: connect(app), 200)
    with closing(slow), ThreadPoolExecutor(len(wires(MODEL))) as pool:
        acting = [pool.submit(act, wire) for wire in wires(MODEL)]
        deadline = time.monotonic() + 40.0
        while slow.drip() and time.monotonic() < deadline:
            time.sleep(1.0)
        assert slow.drip() == 0
        assert [wrong for each in acting if (wrong := each.result())] == []


def test_sixty_clients_that_do_not_read_hold_nothing_once_they_left(
    app: App, neighbour: Neighbour
) -> None:
    unread = Unread(lambda: connect(app), 60, MODEL, "none")
    time.sleep(5.0)
    unread.close()
    deadline = time.monotonic() + 10.0
    while (state := app.status()["gateway"])["relaying"] > 1 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert state["relaying"] <= 1, "the neighbour's"
    assert state["body_bytes"] < 100_000


def test_salts_of_other_tenants_are_not_found_by_trying(app: App) -> None:
    """The time of an answer tells whether its KV was there, so nobody may hit another's."""
    prompt = noise(128 + 1, 901)
    secret = "the secret of one"

    def computed(salt: str) -> int:
        app.wait_idle()
        before = app.replica("decode")["prompt_tokens_computed"]
        app.complete(prompt, max_tokens=1, **({"cache_salt": salt} if salt else {}))
        app.wait_idle()
        return int(app.replica("decode")["prompt_tokens_computed"]) - before

    with app.policy("local"):
        assert computed(secret) == len(prompt)
        for salt in ("", "the secret of", secret.upper(), f"tenant:{secret}"):
            assert computed(salt) == len(prompt), salt
        assert computed(secret) == 1


def test_afterwards_nothing_is_held(app: App) -> None:
    app.wait_idle(limit_s=60)
    state = app.status()["gateway"]
    assert (state["relaying"], state["body_bytes"]) == (0, 0)
