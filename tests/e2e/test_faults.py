"""Processes are killed under load: what clients see, how plans change, and that all comes back.

Runs near the end of the session, since it leaves young replicas behind.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.test_blending import FIRST, SECOND, answer, ask, reused, store_documents
from tests.support.app import App, until
from tests.support.faults import (
    ANSWER_TOKENS,
    PROMPTS,
    assert_end,
    assert_nothing_was_lost,
    children,
    engine_core,
    failures,
    kill,
    wait_for_new,
    wait_for_remote,
    wrong_tokens,
)
from tests.support.load import Answer, Load
from tests.support.load import ask as stream

CLIENTS, STREAM_TOKENS = 4, 100
PAUSE_S = 2.0
"""Between two requests of a client while a replica starts, which takes all that the cores give."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def remote(app: App) -> Iterator[App]:
    """The app with all prefill remote, and proof that it is."""
    with app.policy("remote"):
        wait_for_remote(app)
        yield app


@pytest.mark.parametrize("victim", ["replica", pytest.param("engine core", marks=pytest.mark.soak)])
def test_prefill_dies_under_load(remote: App, victim: str) -> None:
    app, salt = remote, uuid.uuid4().hex
    store_documents(app, salt)
    pid = int(app.replica("prefill")["pid"])
    with (
        Load(app.url, PROMPTS, clients=CLIENTS, max_tokens=ANSWER_TOKENS) as load,
        ThreadPoolExecutor(2 + CLIENTS) as pool,
    ):
        until(lambda: len(load.answers) >= CLIENTS, 120, "the load runs", app.status)
        reused_before = reused(app)
        prompts = [[f"Reader {n}.", SECOND, FIRST] for n in range(2)]
        reusing = [pool.submit(ask, app, texts, salt, blending="auto") for texts in prompts]
        until(lambda: reused(app) > reused_before, 120, "requests reuse KV", app.status)
        if victim == "replica":
            orphans = kill(pid)
        else:
            orphans = children(pid)
            engine_core(pid).kill()
        load.pause()
        asked = [pool.submit(stream, app.client, PROMPTS, n, ANSWER_TOKENS) for n in range(CLIENTS)]
        after = [one.result() for one in asked]
        assert all(answer(one.result()) for one in reusing)
    answers = [*load.stop(), *after]

    assert not failures(answers), "a request failed"
    for one in after:
        plan = app.plan(one.request_id)
        assert plan["kind"] == "local", plan
        assert "no answer in" not in plan["reasons"][0], "it waited for the dead replica"

    assert_end(orphans)
    wait_for_new(app, "prefill", pid)
    wait_for_remote(app)
    app.wait_idle(limit_s=45)
    assert not wrong_tokens(app, answers)


def test_decode_dies_under_load_and_no_stream_ends(app: App) -> None:
    for prompt in PROMPTS:  # once computed, they soon begin to answer
        app.complete(prompt, max_tokens=1)
    pid = int(app.replica("decode")["pid"])
    with (
        Load(app.url, PROMPTS, clients=4, max_tokens=STREAM_TOKENS) as long,
        Load(app.url, PROMPTS, clients=2, max_tokens=2) as short,
    ):
        until(lambda: long.streaming() >= 2, 240, "two answers are being written", app.status)
        orphans = kill(pid)
        killed_at = time.monotonic()
        long.pause()
        assert_end(orphans)
        with short.eased(PAUSE_S):
            wait_for_new(app, "decode", pid)
        until(
            lambda: any(one.began_s > killed_at for one in short.answers),
            60,
            "requests that are sent after the kill are answered",
        )
    streams = long.stop()
    cut = assert_nothing_was_lost([*streams, *short.stop()], killed_at)
    assert_went_on(app, [one for one in cut if one in streams])
    with app.policy("remote"):
        wait_for_remote(app)
    app.wait_idle(limit_s=45)


@pytest.mark.soak
def test_the_engine_of_decode_dies_under_load_and_no_stream_ends(app: App) -> None:
    """The replica lives and its engine is dead: streams go on in the next one."""
    pid = int(app.replica("decode")["pid"])
    with Load(app.url, PROMPTS, clients=4, max_tokens=STREAM_TOKENS) as load:
        until(lambda: load.streaming() >= 2, 240, "two answers are being written", app.status)
        orphans = children(pid)
        engine_core(pid).kill()
        killed_at = time.monotonic()
        wait_for_new(app, "decode", pid)
        time.sleep(2)
    cut = assert_nothing_was_lost(load.stop(), killed_at)
    assert_end(orphans)
    app.wait_idle(limit_s=45)
    assert_went_on(app, cut)


def assert_went_on(app: App, cut: list[Answer]) -> None:
    """Streams that lost their replica have all tokens, once each, and no other."""
    app.wait_idle(limit_s=45)
    assert cut
    assert [len(one.tokens) for one in cut] == [STREAM_TOKENS] * len(cut)
    assert not wrong_tokens(app, cut[:2])
