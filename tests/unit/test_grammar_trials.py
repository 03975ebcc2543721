"""A grammar is tried in a confined process, and reaches the engine only if it passes."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace_decode.grammars.limits import FREE_S
from headrace_decode.grammars.trials import GrammarRefused, GrammarTrials, TrialUnfinished
from headrace_decode.grammars.worker import (
    NICEST,
    TOKEN_CHOOSERS,
    Answer,
    TrialLimits,
    run_confined,
    serve,
    walk,
)

CLOSE = TrialLimits(cpu_s=1, wall_s=20.0, added_bytes=2**28, max_answer_bytes=1_000_000)
PATIENT = replace(CLOSE, wall_s=300.0)
"""A trial on a busy machine gets hardly any processor time."""


def test_what_the_work_answers_is_the_answer() -> None:
    assert run_confined(lambda: {"spec": {"regex": "é\ud800"}}, CLOSE) == {
        "spec": {"regex": "é\ud800"}
    }


def passes_its_time() -> Answer:
    """A trial gets only what other processes leave, so the kernel's signal is sent right away."""
    os.kill(os.getpid(), signal.SIGXCPU)
    return {}


def test_the_kernel_bounds_a_trials_processor_time() -> None:
    answer = run_confined(lambda: {"spec": resource.getrlimit(resource.RLIMIT_CPU)}, CLOSE)
    assert answer["spec"][0] == CLOSE.cpu_s


def greedy() -> Answer:
    return {"spec": len(bytearray(2**30))}


def crash() -> Answer:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def deep() -> Answer:
    sys.setrecursionlimit(10**9)

    def down() -> None:
        down()

    down()
    return {}


def chatty() -> Answer:
    return {"spec": "x" * 2_000_000}


@pytest.mark.parametrize("work", [passes_its_time, greedy, crash, deep, chatty])
def test_work_that_passes_a_limit_or_crashes_is_refused_and_gone(work: Any) -> None:
    before = set(psutil.Process().children())
    answer = run_confined(work, PATIENT)
    assert "refused" in answer
    assert set(psutil.Process().children()) <= before


def test_work_that_sleeps_is_ended_by_the_clock() -> None:
    patient = TrialLimits(cpu_s=1, wall_s=0.2)
    before = set(psutil.Process().children())
    assert "unfinished" in run_confined(lambda: time.sleep(600) or {}, patient)
    assert set(psutil.Process().children()) <= before


def killed() -> Answer:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def test_a_trial_that_the_machine_kills_says_nothing_about_its_grammar() -> None:
    assert "unfinished" in run_confined(killed, PATIENT)


def test_trials_at_the_same_time_rest_for_each_other() -> None:
    """Alone each would compute for 0.8 s of 3 s."""
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda _: run_confined(busy, TrialLimits(cpu_s=4)), range(3)))
    assert sum(answer["spec"] for answer in answers) < 2.0


class Compiled:
    """A compiler of grammars; a slow one takes until the quick one is answered, or a minute."""

    def __init__(self, answered: Path) -> None:
        self._answered = answered

    def __call__(self, spec: Mapping[str, Any]) -> Answer:
        until_s = time.monotonic() + 60.0
        while spec["slow"] and not self._answered.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        return {"spec": spec}


def test_the_worker_answers_a_quick_grammar_before_a_slow_one_that_came_first(
    tmp_path: Path,
) -> None:
    jobs = [b'{"id": 1, "spec": {"slow": true}}', b'{"id": 2, "spec": {"slow": false}}']
    answers, told = os.pipe()
    answered = tmp_path / "answered"
    with open(answers, "rb") as lines, open(told, "wb") as writer:
        serve(Compiled(answered), PATIENT, jobs, writer)
        assert json.loads(lines.readline())["id"] == 2
        answered.touch()
        assert json.loads(lines.readline())["id"] == 1


def scheduled_after(cpu_s: float) -> Answer:
    while time.process_time() < cpu_s:
        pass
    return {"spec": [os.sched_getscheduler(0), os.nice(0)]}


@pytest.mark.parametrize(
    ("cpu_s", "policy"),
    [(0.0, os.SCHED_OTHER), (FREE_S + 0.1, os.SCHED_IDLE)],
    ids=["short", "long"],
)
def test_a_long_trial_takes_only_the_processor_time_that_the_engines_leave(
    cpu_s: float, policy: int
) -> None:
    answer = run_confined(lambda: scheduled_after(cpu_s), TrialLimits(cpu_s=4))
    assert answer == {"spec": [policy, NICEST]}


def busy() -> Answer:
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        pass
    return {"spec": time.process_time()}


def test_a_trial_that_takes_long_rests_three_quarters_of_the_time() -> None:
    """Of 3 s: 0.2 s, and a quarter of the rest."""
    before_s = time.thread_time()
    used_s = run_confined(busy, TrialLimits(cpu_s=4))["spec"]
    assert used_s < 1.5
    assert time.thread_time() - before_s < 0.5, "whoever watches it computes little"


class Chain:
    """A grammar of `length` tokens, one of which takes a while."""

    def __init__(self, length: int, slow_at: int = -1):
        self.length, self.slow_at, self.at = length, slow_at, 0

    def allowed(self) -> list[int]:
        until = time.thread_time() + (0.05 if self.at == self.slow_at else 0.0)
        while time.thread_time() < until:
            pass
        return [1, 2] if self.at < self.length else []

    def accept(self, token: int) -> bool:
        self.at += 1
        return True


def test_a_walk_ends_with_the_grammar_or_after_enough_tokens() -> None:
    short, long = Chain(3), Chain(1000)
    assert walk(short, TOKEN_CHOOSERS[0], 10, 1.0) is None
    assert walk(long, TOKEN_CHOOSERS[1], 10, 1.0) is None
    assert (short.at, long.at) == (3, 10)


def test_a_grammar_that_is_slow_to_follow_is_refused_wherever_it_is_slow() -> None:
    why = walk(Chain(100, slow_at=7), TOKEN_CHOOSERS[2], 50, 0.04)
    assert why is not None and "after 7 tokens" in why


WORKER = """
import json, sys, threading, time
sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8)))
print("ready", flush=True)
late = 0
def answer(number, spec):
    global late
    time.sleep(float(spec.get("wait", 0)))
    said = {"spec": spec}
    if spec.get("regex") == "bad":
        said = {"refused": "it is bad"}
    if spec.get("regex") == "late once":
        late += 1
        said = {"unfinished": "its trial did not end"} if late == 1 else said
    said = {**said, "at": time.monotonic(), "bytes": 100, "id": number}
    sys.stdout.write(json.dumps(said) + chr(10))
    sys.stdout.flush()
for line in sys.stdin:
    job = json.loads(line)
    if job["spec"].get("regex") == "die":
        raise SystemExit
    threading.Thread(target=answer, args=(job["id"], job["spec"]), daemon=True).start()
"""


@asynccontextmanager
async def trials() -> AsyncIterator[GrammarTrials]:
    made = GrammarTrials(b"config", (sys.executable, "-c", WORKER))
    made.start()
    try:
        yield made
    finally:
        await made.aclose()
        await asyncio.sleep(0.05)  # the loop closes the worker's pipes


async def test_a_grammar_that_passes_is_tried_once() -> None:
    async with trials() as tried:
        answers = await asyncio.gather(*(tried.passed({"regex": "a"}, "t") for _ in range(5)))
        assert [answer["spec"] for answer in answers] == [{"regex": "a"}] * 5
        assert tried.trials_total == 1


async def test_a_grammar_that_is_refused_is_tried_once() -> None:
    async with trials() as tried:
        for _ in range(3):
            with pytest.raises(GrammarRefused, match="it is bad"):
                await tried.passed({"regex": "bad"}, "t")
        assert tried.trials_total == 1


async def test_a_trial_that_did_not_finish_is_no_refusal_and_is_tried_again() -> None:
    async with trials() as tried:
        with pytest.raises(TrialUnfinished, match="did not end"):
            await tried.passed({"regex": "late once"}, "t")
        assert (await tried.passed({"regex": "late once"}, "t"))["spec"]
        assert tried.trials_total == 2


async def test_a_slow_grammar_delays_neither_its_own_tenant_nor_another() -> None:
    async with trials() as tried:
        slow = asyncio.create_task(tried.passed({"regex": "slow", "wait": 30}, "a"))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            for tenant in "ab":
                await tried.passed({"regex": tenant}, tenant)
        assert not slow.done()


async def test_slow_grammars_of_one_tenant_leave_a_place_for_another() -> None:
    async with trials() as tried:
        slow = [
            asyncio.create_task(tried.passed({"regex": f"{n}", "wait": 30}, "a")) for n in range(9)
        ]
        await asyncio.sleep(0.05)
        async with asyncio.timeout(10):
            await tried.passed({"regex": "quick"}, "b")
        assert not any(task.done() for task in slow)


async def test_a_worker_that_dies_fails_one_request_and_is_replaced() -> None:
    async with trials() as tried:
        with pytest.raises(RuntimeError):
            await tried.passed({"regex": "die"}, "t")
        assert (await tried.passed({"regex": "a"}, "t"))["spec"] == {"regex": "a"}


async def test_one_tenants_many_grammars_delay_anothers_by_one_trial() -> None:
    async with trials() as tried:
        many = [
            asyncio.create_task(tried.passed({"regex": f"{n}", "wait": 0.02}, "many"))
            for n in range(10)
        ]
        await asyncio.sleep(0.01)
        one = (await tried.passed({"regex": "one"}, "one"))["at"]
        before = [answer for answer in await asyncio.gather(*many) if answer["at"] < one]
        assert len(before) <= 2


async def test_a_client_that_hangs_up_leaves_the_next_its_own_answer() -> None:
    async with trials() as tried:
        gone = asyncio.create_task(tried.passed({"regex": "gone", "wait": 0.2}, "t"))
        await asyncio.sleep(0.1)
        gone.cancel()
        assert (await tried.passed({"regex": "a"}, "t"))["spec"] == {"regex": "a"}


async def test_a_grammar_that_waits_leaves_the_queue_with_its_last_client() -> None:
    async with trials() as tried:
        slow = [
            asyncio.create_task(tried.passed({"regex": f"{n}", "wait": 30}, "t")) for n in range(2)
        ]
        both = [asyncio.create_task(tried.passed({"regex": "a"}, "t")) for _ in range(2)]
        await asyncio.sleep(0.05)
        for number, client in enumerate(both):
            assert len(tried._trials) == 3, f"{number} clients have left"
            client.cancel()
            await asyncio.sleep(0.05)
        assert len(tried._trials) == tried.trials_total == 2
        assert not any(task.done() for task in slow)


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_decode.grammars.trials.MAX_CACHED_BYTES", 3 * 612)
    async with trials() as tried:
        for name in "abcdabcd":
            await tried.passed({"regex": name}, "t")
        assert tried.trials_total == 8
        await tried.passed({"regex": "d"}, "t")
        assert tried.trials_total == 8
