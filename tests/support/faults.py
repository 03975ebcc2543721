"""What tests that kill processes under load look at: who died and came back, what clients saw."""

from __future__ import annotations

import contextlib
import math
import os
import signal

import psutil

from tests.support import run
from tests.support.app import MODEL, App, until
from tests.support.load import Answer, ask
from tests.support.prompts import TEXT

CLIENTS = 8
ANSWER_TOKENS = 12
BACK_S = 300.0
"""A replica starts in 170 to 250 s where two apps do so on two cores."""
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


def engine_core(pid: int) -> psutil.Process:
    """A replica's engine core."""
    [core] = [p for p in children(pid) if "EngineCore" in " ".join(p.cmdline() or [p.name()])]
    return core


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
    run.engine_started()
    return int(app.replica(role)["pid"])


def wait_for_remote(app: App, limit_s: float = BACK_S) -> float:
    """Until a new request is prefilled remotely, and that works; the seconds it took."""

    def remote() -> bool:
        answer = ask(app.client, ["Are both there?"], 0, 2)
        assert answer.whole, answer
        return bool(app.plan(answer.request_id)["kind"] == "remote")

    return until(remote, limit_s, "remote prefill again", lambda: app.status(), every_s=1.0)


def failures(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if not answer.whole]


def wrong_tokens(app: App, answers: list[Answer]) -> list[str]:
    """The answers that greedy decoding does not give, ties aside, each with where and by how much.

    The app must be quiet: every prompt is asked once more, alone, with log-probabilities.
    """
    tokens = max((len(answer.tokens) for answer in answers), default=0)
    asked = sorted({answer.prompt for answer in answers})
    truth = {which: _alone(app, PROMPTS[which], tokens) for which in asked}
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


def _alone(app: App, prompt: str, tokens: int) -> list[dict[int, float]]:
    """The likeliest tokens at each place of the greedy answer, with their log-probabilities."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_tokens_as_token_ids": True,
    }
    reply = app.client.post("/v1/completions", json=body).raise_for_status()
    tops = reply.json()["choices"][0]["logprobs"]["top_logprobs"]
    return [{int(t.removeprefix("token_id:")): p for t, p in top.items()} for top in tops]


def assert_nothing_was_lost(answers: list[Answer], killed_at: float) -> list[Answer]:
    """Every request is answered whole; the streams that lost their replica."""
    assert not failures(answers), failures(answers)
    cut = [
        answer
        for answer in answers
        if answer.ttft_s is not None
        and answer.began_s + answer.ttft_s < killed_at < answer.began_s + answer.seconds
    ]
    assert cut, "nothing was streaming when the replica died"
    return cut
