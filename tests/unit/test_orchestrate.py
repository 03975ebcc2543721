"""How a decode replica carries a plan out: what the client gets, what is closed, what is learnt.

The engine, the prefill side and the planner are fakes; time-outs are real but short.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headrace_decode.orchestrate import LATE_STEPS, Orchestrator, Work
from headrace_kvstore.gate import ComputeGate
from headrace_kvstore.handoff import PrefillResult

PULL = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}
RESULT = PrefillResult(PULL, queue_s=0.0, compute_s=0.1, cached_tokens=0, computed_tokens=5)
LATE_S = 0.03
"""A time-out that passes within a test."""
NEVER_S = 30.0
"""A time-out that no test reaches."""


@dataclass(frozen=True)
class Output:
    tokens: tuple[int, ...]
    cached_tokens: int = 0


class Submission:
    """One request on the fake engine: yields what the test puts, until `end` or `fail`."""

    def __init__(self, engine_id: str, kv_params: dict[str, Any] | None) -> None:
        self.engine_id = engine_id
        self.kv_params = kv_params
        self.started = False
        self.ended_by: str | None = None
        self._queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue()
        self.stream = self._run()

    def put(self, *tokens: int, cached_tokens: int = 0) -> Submission:
        self._queue.put_nowait(Output(tokens, cached_tokens))
        return self

    def end(self) -> Submission:
        self._queue.put_nowait(None)
        return self

    def fail(self, error: BaseException) -> Submission:
        self._queue.put_nowait(error)
        return self

    async def _run(self) -> AsyncGenerator[Output, None]:
        self.started = True
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
            self.ended_by = "itself"
        except (asyncio.CancelledError, GeneratorExit):
            self.ended_by = "abort"
            raise
        except Exception:
            self.ended_by = "error"
            raise


@dataclass
class Engine:
    """Hands out submissions; `script` prepares each as it is made."""

    script: dict[str, Any] = field(default_factory=dict)
    submissions: list[Submission] = field(default_factory=list)

    def submit(
        self, engine_id: str, kv_params: dict[str, Any] | None
    ) -> AsyncGenerator[Output, None]:
        submission = Submission(engine_id, kv_params)
        self.submissions.append(submission)
        kind = "local" if kv_params is None else "pull"
        if kind in self.script:
            self.script[kind](submission)
        return submission.stream

    @property
    def kinds(self) -> list[str]:
        return ["local" if s.kv_params is None else "pull" for s in self.submissions]

    @property
    def ends(self) -> list[str | None]:
        return [s.ended_by for s in self.submissions]


@dataclass(frozen=True)
class FakePlan:
    prefill: str | None
    timeout_s: float = NEVER_S
    prompt_tokens: int = 3
    cached_decode_tokens: int = 0


class Planner:
    """Plans as told and records what it hears."""

    def __init__(self, prefill: str | None, timeout_s: float = NEVER_S) -> None:
        self.answer = FakePlan(prefill, timeout_s)
        self.planned: list[tuple[str, Sequence[int], str, str | None]] = []
        self.failures: list[tuple[str, str]] = []
        self.done: list[tuple[str, PrefillResult, float]] = []
        self.first: list[tuple[str, float, int]] = []
        self.over: list[tuple[str, list[int]]] = []
        self.refuse: Exception | None = None

    async def plan(
        self, request_id: str, token_ids: Sequence[int], salt: str, local_only: str | None
    ) -> FakePlan:
        if self.refuse is not None:
            raise self.refuse
        self.planned.append((request_id, token_ids, salt, local_only))
        return self.answer

    def remote_failed(self, request_id: str, why: str) -> FakePlan:
        self.failures.append((request_id, why))
        return FakePlan(None)

    def prefill_done(self, request_id: str, result: PrefillResult, call_s: float) -> None:
        self.done.append((request_id, result, call_s))

    def first_token(self, request_id: str, seconds_from_plan: float, cached_tokens: int) -> None:
        self.first.append((request_id, seconds_from_plan, cached_tokens))

    def finished(self, request_id: str, output_token_ids: Sequence[int] = ()) -> None:
        self.over.append((request_id, list(output_token_ids)))


class Prefill:
    """The remote side: answers when told, can be called off, and hears which KV nobody wants."""

    def __init__(self, *, heeds_cancel: bool = True) -> None:
        self.calls = 0
        self.called_off = 0
        self.heeds_cancel = heeds_cancel
        self.answer: asyncio.Future[PrefillResult] = asyncio.get_running_loop().create_future()
        self.released: list[dict[str, Any]] = []

    async def call(self) -> PrefillResult:
        self.calls += 1
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.called_off += 1
            if self.heeds_cancel:
                raise
        return await self.answer

    async def release(self, kv_params: dict[str, Any]) -> None:
        self.released.append(kv_params)


def work(
    engine: Engine, prefill: Prefill, request_id: str = "r", local_only: str | None = None
) -> Work[Output]:
    return Work(
        request_id=request_id,
        token_ids=[1, 2, 3],
        salt="tenant",
        local_only=local_only,
        submit=engine.submit,
        prefill=prefill.call,
        release=prefill.release,
        cached_tokens=lambda output: output.cached_tokens,
        new_tokens=lambda output: output.tokens,
    )


async def answer(orchestrator: Orchestrator, request: Work[Output]) -> list[int]:
    """All tokens of a request that is read to its end."""
    tokens: list[int] = []
    async with aclosing(orchestrator.run(request)) as outputs:
        async for output in outputs:
            tokens += output.tokens
    return tokens


async def until(true: Any, limit_s: float = 2.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.001)


def ready(*tokens: int) -> Any:
    """Script: a submission that yields these tokens one by one, then ends."""

    def script(submission: Submission) -> None:
        for token in tokens:
            submission.put(token)
        submission.end()

    return script


def broken(error: Exception) -> Any:
    """Script: a submission that fails."""
    return lambda submission: submission.fail(error)


@pytest.fixture(autouse=True)
async def _leaves_no_task() -> AsyncIterator[None]:
    yield
    for _ in range(5):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left behind: {left}"


def assert_forgotten(orchestrator: Orchestrator) -> None:
    """Nothing of finished requests is kept."""
    assert not orchestrator._active
    assert not orchestrator._cleanups


# A local plan


async def test_a_local_plan_is_one_plain_submission() -> None:
    planner, engine, prefill = Planner(None), Engine({"local": ready(7, 8, 9)}), Prefill()
    orchestrator = Orchestrator(planner)

    assert await answer(orchestrator, work(engine, prefill)) == [7, 8, 9]

    assert planner.planned == [("r", [1, 2, 3], "tenant", None)]
    assert (engine.kinds, engine.submissions[0].engine_id) == (["local"], "r")
    assert prefill.calls == 0
    assert [(name, cached) for name, _, cached in planner.first] == [("r", 0)]
    assert planner.over == [("r", [7, 8, 9])]
    assert_forgotten(orchestrator)


async def test_prompts_that_the_own_engine_computes_take_turns() -> None:
    engine, gate = Engine({"local": ready(7, 8)}), ComputeGate()
    orchestrator = Orchestrator(Planner(None))
    async with gate.turn(100):
        request = replace(work(engine, Prefill()), turn=gate.turn)
        answering = asyncio.create_task(answer(orchestrator, request))
        await asyncio.sleep(0.01)
        assert (engine.kinds, gate.waiting) == ([], 1)
    assert await answering == [7, 8]


async def test_a_turn_ends_with_the_first_output_not_with_the_answer() -> None:
    engine, gate = Engine({"local": ready(7, 8)}), ComputeGate()
    outputs = Orchestrator(Planner(None)).run(replace(work(engine, Prefill()), turn=gate.turn))
    await anext(outputs)
    async with asyncio.timeout(1), gate.turn(100):
        pass
    await outputs.aclose()


async def test_why_a_request_must_stay_is_passed_to_the_planner() -> None:
    planner, engine, prefill = Planner(None), Engine({"local": ready(1)}), Prefill()
    await answer(Orchestrator(planner), work(engine, prefill, local_only="n > 1"))
    assert planner.planned[0][3] == "n > 1"


async def test_an_engine_error_under_a_local_plan_is_the_clients() -> None:
    planner, engine = Planner(None), Engine({"local": broken(ValueError("bad prompt"))})
    orchestrator = Orchestrator(planner)
    with pytest.raises(ValueError, match="bad prompt"):
        await answer(orchestrator, work(engine, Prefill()))
    assert planner.over == [("r", [])]
    assert not planner.first
    assert_forgotten(orchestrator)


async def test_an_engine_that_ends_without_output_is_an_empty_answer() -> None:
    planner, engine = Planner(None), Engine({"local": ready()})
    assert await answer(Orchestrator(planner), work(engine, Prefill())) == []
    assert not planner.first
    assert planner.over == [("r", [])]


async def test_a_planner_that_fails_leaves_nothing_behind() -> None:
    planner, engine = Planner(None), Engine({"local": ready(1)})
    planner.refuse = RuntimeError("no plan")
    orchestrator = Orchestrator(planner)
    with pytest.raises(RuntimeError, match="no plan"):
        await answer(orchestrator, work(engine, Prefill()))
    assert not engine.submissions
    assert planner.over == [("r", [])]
    assert_forgotten(orchestrator)


async def test_the_time_spent_planning_is_counted() -> None:
    planner, engine = Planner(None), Engine({"local": ready(1)})
    orchestrator = Orchestrator(planner)
    await answer(orchestrator, work(engine, Prefill(), "a"))
    await answer(orchestrator, work(engine, Prefill(), "b"))
    assert orchestrator.requests_total == 2
    assert 0 < orchestrator.own_seconds_total < 1


# Remote prefill that works


async def test_a_remote_plan_pulls_the_kv_that_the_prefill_side_made() -> None:
    planner, engine, prefill = Planner("prefill"), Engine({"pull": ready(7, 8)}), Prefill()
    prefill.answer.set_result(RESULT)
    orchestrator = Orchestrator(planner)

    assert await answer(orchestrator, work(engine, prefill)) == [7, 8]

    assert engine.kinds == ["pull"]
    assert engine.submissions[0].engine_id == "r"
    assert engine.submissions[0].kv_params == PULL
    [(name, result, call_s)] = planner.done
    assert (name, result) == ("r", RESULT)
    assert 0 <= call_s < 1
    assert not planner.failures
    assert not prefill.released
    assert planner.over == [("r", [7, 8])]
    assert_forgotten(orchestrator)


async def test_the_planner_learns_when_the_first_token_came_and_what_was_cached() -> None:
    planner, prefill = Planner("prefill"), Prefill()
    engine = Engine({"pull": lambda s: s.put(7, cached_tokens=64).put(8).end()})
    asyncio.get_running_loop().call_later(LATE_S, prefill.answer.set_result, RESULT)
    await answer(Orchestrator(planner), work(engine, prefill))
    [(name, seconds, cached)] = planner.first
    assert (name, cached) == ("r", 64)
    assert LATE_S * 0.9 < seconds < 1


# Remote prefill that fails


async def test_a_failed_call_is_prefilled_locally() -> None:
    planner, engine, prefill = Planner("prefill"), Engine({"local": ready(7)}), Prefill()
    prefill.answer.set_exception(ConnectionError("replica gone\nwith a traceback"))
    orchestrator = Orchestrator(planner)

    assert await answer(orchestrator, work(engine, prefill)) == [7]

    assert engine.kinds == ["local"]
    assert planner.failures == [("r", "ConnectionError: replica gone")]
    assert not planner.done
    assert planner.over == [("r", [7])]
    assert_forgotten(orchestrator)


async def test_a_call_that_raises_at_once_is_prefilled_locally() -> None:
    planner, engine, prefill = Planner("prefill"), Engine({"local": ready(7)}), Prefill()

    async def refuse() -> PrefillResult:
        raise RuntimeError("no replica")

    request = Work(**{**fields_of(work(engine, prefill)), "prefill": refuse})
    assert await answer(Orchestrator(planner), request) == [7]
    assert planner.failures == [("r", "RuntimeError: no replica")]


async def test_an_error_without_words_is_named_by_its_class() -> None:
    planner, engine, prefill = Planner("prefill"), Engine({"local": ready(7)}), Prefill()
    prefill.answer.set_exception(TimeoutError())
    assert await answer(Orchestrator(planner), work(engine, prefill)) == [7]
    assert planner.failures == [("r", "TimeoutError: ")]


async def test_a_call_that_is_late_is_called_off_and_prefilled_locally() -> None:
    planner, engine = Planner("prefill", LATE_S), Engine({"local": ready(7, 8)})
    prefill = Prefill()
    orchestrator = Orchestrator(planner)

    assert await answer(orchestrator, work(engine, prefill)) == [7, 8]

    [(name, why)] = planner.failures
    assert (name, why) == ("r", f"no answer in {LATE_S:.2f} s")
    assert engine.kinds == ["local"]
    await until(lambda: prefill.called_off == 1)
    await until(lambda: not orchestrator._cleanups)
    assert not planner.done, "a late prefill must not pass for a good one"
    assert not prefill.released
    assert planner.over == [("r", [7, 8])]


async def test_kv_of_a_late_call_that_could_not_be_called_off_is_released() -> None:
    planner, engine = Planner("prefill", LATE_S), Engine({"local": ready(7, 8)})
    prefill = Prefill(heeds_cancel=False)
    orchestrator = Orchestrator(planner)
    assert await answer(orchestrator, work(engine, prefill)) == [7, 8]
    assert not prefill.released, "there is nothing to release yet"
    prefill.answer.set_result(RESULT)
    await until(lambda: prefill.released == [PULL])
    await until(lambda: not orchestrator._cleanups)
    assert not planner.done


async def test_a_late_call_that_fails_after_all_needs_no_release() -> None:
    planner, engine = Planner("prefill", LATE_S), Engine({"local": ready(7)})
    prefill = Prefill(heeds_cancel=False)
    orchestrator = Orchestrator(planner)
    assert await answer(orchestrator, work(engine, prefill)) == [7]
    prefill.answer.set_exception(ConnectionError("gone"))
    await until(lambda: not orchestrator._cleanups)
    assert not prefill.released


async def test_a_failed_release_disturbs_nobody() -> None:
    planner, engine = Planner("prefill", LATE_S), Engine({"local": ready(7)})
    prefill = Prefill(heeds_cancel=False)

    async def release(kv_params: dict[str, Any]) -> None:
        raise ConnectionError("gone")

    orchestrator = Orchestrator(planner)
    assert await answer(orchestrator, replace(work(engine, prefill), release=release)) == [7]
    prefill.answer.set_result(RESULT)
    await until(lambda: not orchestrator._cleanups)


async def test_when_prefilling_locally_fails_too_the_client_gets_that_error() -> None:
    planner, prefill = Planner("prefill"), Prefill()
    engine = Engine({"local": broken(ValueError("engine dead"))})
    prefill.answer.set_exception(ConnectionError("gone"))
    with pytest.raises(ValueError, match="engine dead"):
        await answer(Orchestrator(planner), work(engine, prefill))
    assert planner.over == [("r", [])]


# KV that does not arrive


async def test_a_pull_that_fails_is_prefilled_locally() -> None:
    planner, prefill = Planner("prefill"), Prefill()
    engine = Engine({"pull": broken(RuntimeError("transfer failed")), "local": ready(7, 8)})
    prefill.answer.set_result(RESULT)
    orchestrator = Orchestrator(planner)

    assert await answer(orchestrator, work(engine, prefill)) == [7, 8]

    assert engine.kinds == ["pull", "local"]
    assert [s.engine_id for s in engine.submissions] == ["r", "r-local"]
    assert planner.failures == [("r", "transfer failed")]
    assert planner.over == [("r", [7, 8])]
    assert_forgotten(orchestrator)


async def test_late_kv_races_a_local_copy_that_wins() -> None:
    planner, prefill = Planner("prefill", LATE_S), Prefill()
    engine = Engine({"local": ready(7, 8)})
    prefill.answer.set_result(RESULT)
    orchestrator = Orchestrator(planner)

    assert await answer(orchestrator, work(engine, prefill)) == [7, 8]

    assert engine.kinds == ["pull", "local"]
    assert engine.ends == ["abort", "itself"], "the loser must be aborted"
    [(_, why)] = planner.failures
    assert "no KV" in why
    assert planner.over == [("r", [7, 8])]
    assert_forgotten(orchestrator)


async def test_kv_is_not_late_while_the_engine_is_busy_with_one_long_step() -> None:
    planner, prefill = Planner("prefill", LATE_S), Prefill()
    engine = Engine({"local": ready(7, 8)})
    prefill.answer.set_result(RESULT)
    steps = 5
    running = replace(work(engine, prefill), engine_steps=lambda: steps, engine_busy=lambda: True)
    answering = asyncio.create_task(answer(Orchestrator(planner), running))
    await asyncio.sleep(4 * LATE_S)
    assert engine.kinds == ["pull"], "no step has ended, so no KV can have been taken in"
    steps += LATE_STEPS
    assert await answering == [7, 8]
    assert engine.kinds == ["pull", "local"]


async def test_late_kv_races_a_local_copy_and_wins() -> None:
    planner, prefill, engine = Planner("prefill", LATE_S), Prefill(), Engine()
    prefill.answer.set_result(RESULT)
    orchestrator = Orchestrator(planner)
    task = asyncio.create_task(answer(orchestrator, work(engine, prefill)))
    await until(lambda: engine.kinds == ["pull", "local"] and engine.submissions[1].started)
    engine.submissions[0].put(7).put(8).end()

    assert await task == [7, 8]

    assert engine.ends == ["itself", "abort"]
    assert len(planner.failures) == 1, "it was late all the same"
    assert planner.over == [("r", [7, 8])]
    assert_forgotten(orchestrator)


async def test_both_answers_at_once_yield_one_stream() -> None:
    planner, prefill, engine = Planner("prefill", LATE_S), Prefill(), Engine()
    prefill.answer.set_result(RESULT)
    task = asyncio.create_task(answer(Orchestrator(planner), work(engine, prefill)))
    await until(lambda: engine.kinds == ["pull", "local"] and engine.submissions[1].started)
    for submission in engine.submissions:
        submission.put(7).put(8).end()
    assert await task == [7, 8]
    assert sorted(map(str, engine.ends)) == ["abort", "itself"]


async def test_the_race_goes_on_when_one_racer_fails() -> None:
    for failing, winning in ((0, 1), (1, 0)):
        planner, prefill, engine = Planner("prefill", LATE_S), Prefill(), Engine()
        prefill.answer.set_result(RESULT)
        task = asyncio.create_task(answer(Orchestrator(planner), work(engine, prefill)))
        await until(lambda e=engine: len(e.submissions) == 2 and e.submissions[1].started)
        engine.submissions[failing].fail(RuntimeError("lost"))
        await asyncio.sleep(0.01)
        assert not task.done()
        engine.submissions[winning].put(7).end()
        assert await task == [7]


async def test_when_both_racers_fail_the_client_gets_the_local_error() -> None:
    planner, prefill, engine = Planner("prefill", LATE_S), Prefill(), Engine()
    prefill.answer.set_result(RESULT)
    task = asyncio.create_task(answer(Orchestrator(planner), work(engine, prefill)))
    await until(lambda: len(engine.submissions) == 2 and engine.submissions[1].started)
    engine.submissions[1].fail(ValueError("local"))
    engine.submissions[0].fail(RuntimeError("pull"))
    with pytest.raises(ValueError, match="local"):
        await task
    assert planner.over == [("r", [])]


async def test_the_call_and_the_kv_share_one_time_out() -> None:
    limit_s = 0.2
    planner, prefill = Planner("prefill", limit_s), Prefill()
    engine = Engine({"local": ready(7)})
    asyncio.get_running_loop().call_later(0.75 * limit_s, prefill.answer.set_result, RESULT)
    started = time.perf_counter()
    assert await answer(Orchestrator(planner), work(engine, prefill)) == [7]
    assert limit_s * 0.9 < time.perf_counter() - started < 2 * limit_s + 1
    assert engine.kinds == ["pull", "local"]


async def test_a_failed_pull_is_seen_at_once_however_busy_the_engine_is() -> None:
    planner, prefill = Planner("prefill"), Prefill()
    engine = Engine({"pull": broken(RuntimeError("transfer failed")), "local": ready(8)})
    prefill.answer.set_result(RESULT)
    request = replace(work(engine, prefill), engine_steps=lambda: 0, engine_busy=lambda: True)
    assert await answer(Orchestrator(planner), request) == [8]


# Turns


async def test_waiting_for_a_turn_can_be_given_up() -> None:
    planner, engine, gate = Planner(None), Engine(), ComputeGate()
    orchestrator = Orchestrator(planner)
    async with gate.turn(100):
        request = replace(work(engine, Prefill()), turn=gate.turn)
        task = asyncio.create_task(answer(orchestrator, request))
        await until(lambda: planner.planned)
        await hang_up(task)
    assert not engine.submissions
    assert planner.over == [("r", [])]
    assert_forgotten(orchestrator)


async def test_hanging_up_within_a_turn_ends_it() -> None:
    planner, engine, gate = Planner(None), Engine(), ComputeGate()
    request = replace(work(engine, Prefill()), turn=gate.turn)
    task = asyncio.create_task(answer(Orchestrator(planner), request))
    await until(lambda: engine.submissions and engine.submissions[0].started)
    await hang_up(task)
    assert engine.ends == ["abort"]
    async with asyncio.timeout(1), gate.turn(100):
        pass


async def test_a_remote_prefill_needs_no_turn_here() -> None:
    planner, engine, prefill = Planner("prefill"), Engine({"pull": ready(7)}), Prefill()
    prefill.answer.set_result(RESULT)
    gate = ComputeGate()
    async with gate.turn(100):
        request = replace(work(engine, prefill), turn=gate.turn)
        assert await answer(Orchestrator(planner), request) == [7]


# The stream


async def test_after_the_first_token_nothing_is_repeated() -> None:
    planner, prefill = Planner("prefill"), Prefill()
    engine = Engine({"pull": lambda s: s.put(7).fail(RuntimeError("mid-stream"))})
    prefill.answer.set_result(RESULT)
    tokens: list[int] = []
    with pytest.raises(RuntimeError, match="mid-stream"):
        async for output in Orchestrator(planner).run(work(engine, prefill)):
            tokens += output.tokens
    assert tokens == [7]
    assert engine.kinds == ["pull"]
    assert planner.over == [("r", [7])]


# The client hangs up


async def hang_up(task: asyncio.Task[Any]) -> None:
    """What the HTTP server does: cancel the request's task."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_hanging_up_during_local_prefill_aborts_it() -> None:
    planner, engine, prefill = Planner(None), Engine(), Prefill()
    orchestrator = Orchestrator(planner)
    task = asyncio.create_task(answer(orchestrator, work(engine, prefill)))
    await until(lambda: engine.submissions and engine.submissions[0].started)
    await hang_up(task)
    assert engine.ends == ["abort"]
    assert planner.over == [("r", [])]
    assert_forgotten(orchestrator)


async def test_hanging_up_during_the_call_calls_it_off() -> None:
    planner, engine, prefill = Planner("prefill"), Engine(), Prefill()
    orchestrator = Orchestrator(planner)
    task = asyncio.create_task(answer(orchestrator, work(engine, prefill)))
    await until(lambda: prefill.calls == 1)
    await hang_up(task)
    assert planner.over == [("r", [])]
    assert not engine.submissions
    assert not planner.failures, "that the client left is not the prefill side's fault"
    await until(lambda: prefill.called_off == 1)
    await until(lambda: not orchestrator._cleanups)
    assert_forgotten(orchestrator)


async def test_kv_that_is_made_after_hanging_up_all_the_same_is_released() -> None:
    planner, engine, prefill = Planner("prefill"), Engine(), Prefill(heeds_cancel=False)
    orchestrator = Orchestrator(planner)
    task = asyncio.create_task(answer(orchestrator, work(engine, prefill)))
    await until(lambda: prefill.calls == 1)
    await hang_up(task)
    prefill.answer.set_result(RESULT)
    await until(lambda: prefill.released == [PULL])
    await until(lambda: not orchestrator._cleanups)
    assert planner.over == [("r", [])]


@pytest.mark.parametrize("turns_of_the_loop", range(4))
async def test_hanging_up_as_the_call_returns_strands_no_kv(turns_of_the_loop: int) -> None:
    planner, engine, prefill = Planner("prefill"), Engine(), Prefill()
    orchestrator = Orchestrator(planner)
    task = asyncio.create_task(answer(orchestrator, work(engine, prefill)))
    await until(lambda: prefill.calls == 1)
    prefill.answer.set_result(RESULT)
    for _ in range(turns_of_the_loop):
        await asyncio.sleep(0)
    await hang_up(task)
    await until(lambda: not orchestrator._cleanups)
    assert [bool(prefill.called_off), bool(prefill.released), engine.kinds == ["pull"]].count(
        True
    ) == 1


async def test_hanging_up_while_the_kv_is_pulled_aborts_the_pull() -> None:
    planner, engine, prefill = Planner("prefill"), Engine(), Prefill()
    prefill.answer.set_result(RESULT)
    orchestrator = Orchestrator(planner)
    task = asyncio.create_task(answer(orchestrator, work(engine, prefill)))
    await until(lambda: engine.submissions and engine.submissions[0].started)
    await hang_up(task)
    assert engine.ends == ["abort"]
    assert not prefill.released, "the engine that was to pull tells the other side itself"
    assert planner.over == [("r", [])]
    assert_forgotten(orchestrator)


async def test_hanging_up_during_the_race_aborts_both() -> None:
    planner, engine, prefill = Planner("prefill", LATE_S), Engine(), Prefill()
    prefill.answer.set_result(RESULT)
    orchestrator = Orchestrator(planner)
    task = asyncio.create_task(answer(orchestrator, work(engine, prefill)))
    await until(lambda: len(engine.submissions) == 2 and engine.submissions[1].started)
    await hang_up(task)
    assert engine.ends == ["abort", "abort"]
    assert planner.over == [("r", [])]
    assert_forgotten(orchestrator)


@pytest.mark.parametrize("remote", [False, True])
async def test_hanging_up_in_the_stream_aborts_the_engines_request(remote: bool) -> None:
    planner, engine, prefill = Planner("prefill" if remote else None), Engine(), Prefill()
    prefill.answer.set_result(RESULT)
    orchestrator = Orchestrator(planner)
    task = asyncio.create_task(answer(orchestrator, work(engine, prefill)))
    await until(lambda: engine.submissions and engine.submissions[0].started)
    engine.submissions[0].put(7)
    await until(lambda: planner.first)
    await hang_up(task)
    assert engine.ends == ["abort"]
    assert planner.over == [("r", [7])]
    assert_forgotten(orchestrator)


async def test_closing_the_stream_between_two_outputs_aborts_the_engines_request() -> None:
    planner, engine = Planner(None), Engine({"local": lambda s: s.put(7).put(8)})
    orchestrator = Orchestrator(planner)
    async with aclosing(orchestrator.run(work(engine, Prefill()))) as outputs:
        assert (await anext(outputs)).tokens == (7,)
    assert engine.ends == ["abort"]
    assert planner.over == [("r", [7])]
    assert_forgotten(orchestrator)


# Request ids


async def test_two_requests_with_one_id_are_kept_apart() -> None:
    planner, engine, prefill = Planner(None), Engine(), Prefill()
    orchestrator = Orchestrator(planner)
    tasks = [asyncio.create_task(answer(orchestrator, work(engine, prefill))) for _ in range(3)]
    await until(lambda: len(engine.submissions) == 3)
    names = [name for name, *_ in planner.planned]
    assert names[0] == "r"
    assert len(set(names)) == 3
    assert [s.engine_id for s in engine.submissions] == names
    for submission, token in zip(engine.submissions, (7, 8, 9), strict=True):
        submission.put(token).end()
    assert [await task for task in tasks] == [[7], [8], [9]]
    assert dict(planner.over) == dict(zip(names, [[7], [8], [9]], strict=True))
    assert_forgotten(orchestrator)


async def test_an_id_may_come_again_once_its_request_is_over() -> None:
    planner, engine = Planner(None), Engine({"local": ready(7)})
    orchestrator = Orchestrator(planner)
    await answer(orchestrator, work(engine, Prefill()))
    await answer(orchestrator, work(engine, Prefill()))
    assert [name for name, *_ in planner.planned] == ["r", "r"]


def fields_of(request: Work[Output]) -> dict[str, Any]:
    return {name: getattr(request, name) for name in Work.__dataclass_fields__}
