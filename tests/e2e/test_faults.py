"""Processes are killed under load: what clients see, how plans change, and that all comes back.

Runs near the end of the session, since it leaves young replicas behind.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.support.app import MODEL, App, until
from tests.support.load import Answer, Load, ask
from tests.support.prompts import TEXT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

CLIENTS = 8
ANSWER_TOKENS = 12
BACK_S = 150.0
# Under load a step has other shapes, and float32 sums in another order: the same prompt's
# log-probabilities move in their sixth digit. Two tokens closer than this may change places.
TIE_NATS = 1e-3
PROMPTS = [f"Chapter {n}, page {7 * n}. {TEXT}{TEXT}" for n in range(1, CLIENTS + 1)]


def children(pid: int) -> list[psutil.Process]:
    """All that descends from a process: vLLM's engine core and workers."""
    return list(psutil.Process(pid).children(recursive=True))


def kill(pid: int) -> list[psutil.Process]:
    """SIGKILL; the orphans that it leaves."""
    orphans = children(pid)
    assert orphans, "a replica without engine processes"
    os.kill(pid, signal.SIGKILL)
    return orphans


def assert_end(orphans: list[psutil.Process], limit_s: float = 30.0) -> None:
    """The killed replica's engine processes end too."""

    def left() -> list[str]:
        alive = []
        for process in orphans:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(f"{process.pid} {process.name()}")
        return alive

    until(lambda: not left(), limit_s, "the engine processes of a killed replica end", left)


def wait_for_new(app: App, role: str, old_pid: int) -> int:
    """The pid of the replica that took the killed one's place."""
    until(
        lambda: app.replica(role)["pid"] != old_pid,
        BACK_S,
        f"another {role} replica",
        lambda: app.status()["replicas"],
        every_s=1.0,
    )
    return int(app.replica(role)["pid"])


def wait_for_remote(app: App, limit_s: float = BACK_S) -> float:
    """Until a new request is prefilled remotely, and that works; the seconds it took."""

    def remote() -> bool:
        answer = ask(app.url, PROMPTS, 0, 2, 60)
        assert answer.whole, answer
        return bool(app.plan(answer.request_id)["kind"] == "remote")

    return until(remote, limit_s, "remote prefill again", lambda: app.status(), every_s=1.0)


@pytest.fixture
def remote(app: App) -> Iterator[App]:
    """The app with all prefill remote, and proof that it is."""
    with app.policy("remote"):
        wait_for_remote(app, 30)
        yield app


def failures(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if not answer.whole]


def wrong_tokens(app: App, answers: list[Answer]) -> list[str]:
    """The answers that greedy decoding does not give, ties aside, each with where and by how much.

    The app must be quiet: every prompt is asked once more, alone, with log-probabilities.
    """
    truth = [_alone(app, prompt) for prompt in PROMPTS]
    wrong = []
    for answer in answers:
        for place, (token, best) in enumerate(
            zip(answer.tokens, truth[answer.prompt], strict=True)
        ):
            if token == max(best, key=best.__getitem__):
                continue
            behind = max(best.values()) - best.get(token, -math.inf)
            if behind > TIE_NATS:
                wrong.append(f"{answer}: token {place} is {behind:.2g} nats from the best")
            break
    return wrong


def _alone(app: App, prompt: str) -> list[dict[int, float]]:
    """The likeliest tokens at each place of the greedy answer, with their log-probabilities."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }
    reply = httpx.post(f"{app.url}/v1/completions", json=body, timeout=60).raise_for_status()
    tops = reply.json()["choices"][0]["logprobs"]["top_logprobs"]
    return [{int(t.removeprefix("token_id:")): p for t, p in top.items()} for top in tops]


@pytest.mark.parametrize("victim", ["replica", "engine core"])
def test_prefill_dies_under_load(remote: App, victim: str) -> None:
    app = remote
    pid = int(app.replica("prefill")["pid"])
    with Load(app.url, PROMPTS, clients=CLIENTS, max_tokens=ANSWER_TOKENS) as load:
        until(lambda: len(load.answers) >= CLIENTS, 60, "the load runs", app.status)
        before = app.plans()
        if victim == "replica":
            orphans = kill(pid)
        else:
            orphans = children(pid)
            [core] = [p for p in orphans if "EngineCore" in " ".join(p.cmdline() or [p.name()])]
            core.kill()
        killed_at = time.monotonic()

        def asked_after() -> list[Answer]:
            return [a for a in load.answers if a.began_s > killed_at]

        until(lambda: len(asked_after()) >= CLIENTS, 60, "new requests are answered", app.status)
        during = app.plans()
    answers = load.stop()

    assert not failures(answers), "a request failed"
    assert during["local"] - before["local"] >= CLIENTS, "new requests do not go local"
    slowest = max(a.ttft_s or 0 for a in asked_after())
    typical = max(a.ttft_s or 0 for a in answers if a.began_s < killed_at)
    assert slowest < 4 * typical + 2, "new requests wait for the dead replica"

    assert_end(orphans)
    wait_for_new(app, "prefill", pid)
    wait_for_remote(app)
    app.wait_idle(limit_s=45)
    assert not wrong_tokens(app, answers)


def assert_only_streams_were_lost(answers: list[Answer], killed_at: float) -> None:
    """Streams that had begun end with a clear error; everything else is answered."""
    lost = failures(answers)
    assert lost, "nothing was streaming when the replica died"
    for answer in lost:
        assert answer.began_s < killed_at, f"sent after the kill, and failed: {answer}"
        assert answer.began_to_answer, f"a request that had not begun failed: {answer}"
        assert answer.status == 200
        assert answer.broken is None, f"the stream broke off without a word: {answer}"
        assert answer.error is not None, f"the stream ended as if it were whole: {answer}"
        assert answer.error["message"]
        assert not answer.error["message"].startswith("Traceback")
    later = [a for a in answers if a.began_s > killed_at]
    assert later, "no request was sent while the replica was gone"


def test_decode_dies_under_load(app: App) -> None:
    for prompt in PROMPTS:  # once computed, they soon begin to answer
        app.complete(prompt, max_tokens=1)
    pid = int(app.replica("decode")["pid"])
    with (
        Load(app.url, PROMPTS, clients=4, max_tokens=400) as long,
        Load(app.url, PROMPTS, clients=4, max_tokens=2) as short,
    ):
        time.sleep(4)
        orphans = kill(pid)
        killed_at = time.monotonic()
        long.pause()
        assert_end(orphans)
        wait_for_new(app, "decode", pid)
        until(
            lambda: any(answer.began_s > killed_at for answer in short.answers),
            60,
            "requests that are sent after the kill are answered",
        )
    answers = [*long.stop(), *short.stop()]
    assert_only_streams_were_lost(answers, killed_at)
    for answer in failures(answers):
        assert answer.error is not None and answer.error["code"] == "replica_lost"
        assert "again" in answer.error["message"]
        assert not answer.done, "a stream that was cut must not end like a whole one"
    with app.policy("remote"):
        wait_for_remote(app)
    app.wait_idle(limit_s=45)


def test_the_engine_of_decode_dies_under_load(app: App) -> None:
    """The replica lives and its engine is dead: streams end with an error, others wait."""
    pid = int(app.replica("decode")["pid"])
    with Load(app.url, PROMPTS, clients=4, max_tokens=200) as load:
        time.sleep(4)
        orphans = children(pid)
        [core] = [p for p in orphans if "EngineCore" in " ".join(p.cmdline() or [p.name()])]
        core.kill()
        killed_at = time.monotonic()
        wait_for_new(app, "decode", pid)
        time.sleep(2)
    assert_only_streams_were_lost(load.stop(), killed_at)
    assert_end(orphans)
    app.wait_idle(limit_s=45)
