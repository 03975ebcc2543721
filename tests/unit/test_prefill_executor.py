"""How a decode replica carries a plan out: what the client gets, what is closed, what is learnt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from headrace_decode.planning.prefill_executor import LATE_STEPS, Plan, PrefillExecutor
from headrace_engine.kv_transfer.handoff import PrefillResult
from headrace_engine.meter import Unproven
from tests.support.prefill_executor import (
    LATE_S,
    PULL,
    RESULT,
    Engine,
    Planner,
    Prefill,
    answer,
    assert_forgotten,
    assert_no_task_left,
    broken,
    gate_for_one,
    ready,
    until,
    work,
)


@pytest.fixture(autouse=True)
async def _leaves_no_task() -> AsyncIterator[None]:
    yield
    await assert_no_task_left()


# A local plan


async def test_a_local_plan_is_one_plain_submission() -> None:
    planner, engine, prefill = Planner(None), Engine({"local": ready(7, 8, 9)}), Prefill()
    executor = PrefillExecutor(planner)

    assert await answer(executor, work(engine, prefill)) == [7, 8, 9]

    assert planner.planned == [("r", [1, 2, 3], "tenant", None)]
    assert (engine.kinds, engine.submissions[0].engine_id) == (["local"], "r")
    assert prefill.calls == 0
    assert [(name, cached) for name, _, cached in planner.first] == [("r", 0)]
    assert planner.over == [("r", [7, 8, 9])]
    assert_forgotten(executor)


async def test_the_planner_gets_the_plan_that_came_with_the_request() -> None:
    planner, engine = Planner(None), Engine({"local": ready(7)})
    for given in (b"a plan", None):
        await answer(PrefillExecutor(planner), replace(work(engine, Prefill()), plan=given))
    assert planner.given == [b"a plan", None]


async def test_the_planner_learns_what_is_computed_of_a_prompt_that_reuses_kv() -> None:
    planner, engine = Planner(None), Engine({"local": ready(7)})
    for computed in (2, None):
        await answer(PrefillExecutor(planner), replace(work(engine, Prefill()), computed=computed))
    assert planner.computed == [2, None]


async def test_prompts_that_the_own_engine_computes_take_turns() -> None:
    engine, gate = Engine({"local": ready(7, 8)}), gate_for_one()
    executor = PrefillExecutor(Planner(None))
    async with gate.turn(100):
        request = replace(work(engine, Prefill()), turn=gate.turn)
        answering = asyncio.create_task(answer(executor, request))
        await asyncio.sleep(0.01)
        assert (engine.kinds, gate.waiting) == ([], 1)
    assert await answering == [7, 8]


async def test_a_turn_is_for_what_a_resumed_answer_has_said_as_well() -> None:
    engine, turns = Engine({"local": ready(7)}), list[int]()

    def turn(tokens: int) -> AbstractAsyncContextManager[None]:
        turns.append(tokens)
        return nullcontext()

    planner = Planner(None)
    request = replace(work(engine, Prefill()), resumed_tokens=[5, 6], turn=turn)
    assert await answer(PrefillExecutor(planner), request) == [7]
    assert turns == [planner.answer.compute_tokens + 2]
    assert planner.over == [("r", [5, 6, 7])]


async def test_a_turn_ends_with_the_first_output_not_with_the_answer() -> None:
    engine, gate = Engine({"local": ready(7, 8)}), gate_for_one()
    outputs = PrefillExecutor(Planner(None)).run(replace(work(engine, Prefill()), turn=gate.turn))
    await anext(outputs)
    async with asyncio.timeout(1), gate.turn(100):
        assert gate.waiting == 0
    await outputs.aclose()


async def test_a_remote_prefill_needs_no_turn_here() -> None:
    planner, engine, prefill = Planner("prefill"), Engine({"pull": ready(7)}), Prefill()
    prefill.answer.set_result(RESULT)
    gate = gate_for_one()
    async with gate.turn(100):
        request = replace(work(engine, prefill), turn=gate.turn)
        assert await answer(PrefillExecutor(planner), request) == [7]


async def test_why_a_request_must_stay_is_passed_to_the_planner() -> None:
    planner, engine, prefill = Planner(None), Engine({"local": ready(1)}), Prefill()
    await answer(PrefillExecutor(planner), work(engine, prefill, local_only="n > 1"))
    assert planner.planned[0][3] == "n > 1"


async def test_an_engine_error_under_a_local_plan_is_the_clients() -> None:
    planner, engine = Planner(None), Engine({"local": broken(ValueError("bad prompt"))})
    executor = PrefillExecutor(planner)
    with pytest.raises(ValueError, match="bad prompt"):
        await answer(executor, work(engine, Prefill()))
    assert planner.over == [("r", [])]
    assert not planner.first
    assert_forgotten(executor)


async def test_an_engine_that_ends_without_output_is_an_empty_answer() -> None:
    planner, engine = Planner(None), Engine({"local": ready()})
    assert await answer(PrefillExecutor(planner), work(engine, Prefill())) == []
    assert not planner.first
    assert planner.over == [("r", [])]


async def test_a_planner_that_fails_leaves_nothing_behind() -> None:
    planner, engine = Planner(None), Engine({"local": ready(1)})
    planner.refuse = RuntimeError("no plan")
    executor = PrefillExecutor(planner)
    with pytest.raises(RuntimeError, match="no plan"):
        await answer(executor, work(engine, Prefill()))
    assert not engine.submissions
    assert planner.over == [("r", [])]
    assert_forgotten(executor)


async def test_the_time_spent_planning_is_counted() -> None:
    planner, engine = Planner(None), Engine({"local": ready(1)})
    executor = PrefillExecutor(planner)
    await answer(executor, work(engine, Prefill(), "a"))
    await answer(executor, work(engine, Prefill(), "b"))
    assert executor.requests_total == 2
    assert 0 < executor.own_seconds_total < 1


# Remote prefill that works


async def test_a_remote_plan_pulls_the_kv_that_the_prefill_side_made() -> None:
    planner, engine, prefill = Planner("prefill"), Engine({"pull": ready(7, 8)}), Prefill()
    prefill.answer.set_result(RESULT)
    executor = PrefillExecutor(planner)

    assert await answer(executor, work(engine, prefill)) == [7, 8]

    assert engine.kinds == ["pull"]
    assert engine.submissions[0].engine_id == "r"
    assert engine.submissions[0].kv_params == PULL
    [(name, result, call_s)] = planner.done
    assert (name, result) == ("r", RESULT)
    assert 0 <= call_s < 1
    assert not planner.failures
    assert not prefill.released
    assert planner.over == [("r", [7, 8])]
    assert_forgotten(executor)


async def test_the_planner_learns_when_the_first_token_came_and_what_was_cached() -> None:
    planner, prefill = Planner("prefill"), Prefill()
    engine = Engine({"pull": lambda s: s.put(7, cached_tokens=64).put(8).end()})
    asyncio.get_running_loop().call_later(LATE_S, prefill.answer.set_result, RESULT)
    await answer(PrefillExecutor(planner), work(engine, prefill))
    [(name, seconds, cached)] = planner.first
    assert (name, cached) == ("r", 64)
    assert LATE_S * 0.9 < seconds < 1


# Remote prefill that fails


async def test_a_failed_call_is_prefilled_locally() -> None:
    planner, engine, prefill = Planner("prefill"), Engine({"local": ready(7)}), Prefill()
    prefill.answer.set_exception(ConnectionError("replica gone\nwith a traceback"))
    executor = PrefillExecutor(planner)

    assert await answer(executor, work(engine, prefill)) == [7]

    assert engine.kinds == ["local"]
    assert planner.failures == [("r", "ConnectionError: replica gone")]
    assert not planner.done
    assert planner.over == [("r", [7])]
    assert_forgotten(executor)


async def test_a_call_that_raises_at_once_is_prefilled_locally() -> None:
    planner, engine, prefill = Planner("prefill"), Engine({"local": ready(7)}), Prefill()

    async def refuse(plan: Plan) -> PrefillResult:
        raise RuntimeError("no replica")

    request = replace(work(engine, prefill), prefill=refuse)
    assert await answer(PrefillExecutor(planner), request) == [7]
    assert planner.failures == [("r", "RuntimeError: no replica")]


async def test_an_error_without_words_is_named_by_its_class() -> None:
    planner, engine, prefill = Planner("prefill"), Engine({"local": ready(7)}), Prefill()
    prefill.answer.set_exception(TimeoutError())
    assert await answer(PrefillExecutor(planner), work(engine, prefill)) == [7]
    assert planner.failures == [("r", "TimeoutError: ")]


async def test_work_that_plans_do_not_predict_gets_more_time() -> None:
    planner, prefill = Planner("prefill", LATE_S), Prefill()
    engine = Engine({"pull": ready(7, 8)})
    asyncio.get_running_loop().call_later(3 * LATE_S, prefill.answer.set_result, RESULT)
    patient = replace(work(engine, prefill), min_timeout_s=100 * LATE_S)
    assert await answer(PrefillExecutor(planner), patient) == [7, 8]
    assert not planner.failures


async def test_a_call_that_is_late_is_called_off_and_prefilled_locally() -> None:
    planner, engine = Planner("prefill", LATE_S), Engine({"local": ready(7, 8)})
    prefill = Prefill()
    executor = PrefillExecutor(planner)

    assert await answer(executor, work(engine, prefill)) == [7, 8]

    [(name, why)] = planner.failures
    assert (name, why) == ("r", f"no answer in {LATE_S:.2f} s")
    assert engine.kinds == ["local"]
    await until(lambda: prefill.aborted == 1)
    await until(lambda: not executor.cleanups)
    assert not planner.done, "a late prefill must not pass for a good one"
    assert not prefill.released
    assert planner.over == [("r", [7, 8])]


@pytest.mark.parametrize("heeds_cancel", [True, False])
async def test_a_call_to_a_replica_that_has_gone_is_not_waited_for(heeds_cancel: bool) -> None:
    planner, engine = Planner("prefill"), Engine({"local": ready(7, 8)})
    prefill = Prefill(heeds_cancel=heeds_cancel)
    planner.answer = replace(planner.answer, replica="p-1")
    executor = PrefillExecutor(planner)
    answering = asyncio.create_task(answer(executor, work(engine, prefill)))
    await until(lambda: executor.calls)
    executor.prefill_members(frozenset({"p-1", "p-2"}))
    await asyncio.sleep(0.01)
    assert not answering.done(), "it runs"
    executor.prefill_members(frozenset({"p-2"}))
    assert await answering == [7, 8]
    assert planner.failures == [("r", "p-1 has stopped")]
    assert not executor.calls
    await until(lambda: prefill.aborted == 1)
    if not heeds_cancel:
        prefill.answer.set_exception(ConnectionError("gone"))
    await until(lambda: not executor.cleanups)


async def test_kv_of_a_late_call_that_could_not_be_called_off_is_released() -> None:
    planner, engine = Planner("prefill", LATE_S), Engine({"local": ready(7, 8)})
    prefill = Prefill(heeds_cancel=False)
    executor = PrefillExecutor(planner)
    assert await answer(executor, work(engine, prefill)) == [7, 8]
    assert not prefill.released, "there is nothing to release yet"
    prefill.answer.set_result(RESULT)
    await until(lambda: prefill.released == [PULL])
    await until(lambda: not executor.cleanups)
    assert not planner.done


async def test_a_late_call_that_fails_after_all_needs_no_release() -> None:
    planner, engine = Planner("prefill", LATE_S), Engine({"local": ready(7)})
    prefill = Prefill(heeds_cancel=False)
    executor = PrefillExecutor(planner)
    assert await answer(executor, work(engine, prefill)) == [7]
    prefill.answer.set_exception(ConnectionError("gone"))
    await until(lambda: not executor.cleanups)
    assert not prefill.released


async def test_a_failed_release_disturbs_nobody() -> None:
    planner, engine = Planner("prefill", LATE_S), Engine({"local": ready(7)})
    prefill = Prefill(heeds_cancel=False)

    async def release(kv_params: dict[str, Any]) -> None:
        raise ConnectionError("gone")

    executor = PrefillExecutor(planner)
    assert await answer(executor, replace(work(engine, prefill), release=release)) == [7]
    prefill.answer.set_result(RESULT)
    await until(lambda: not executor.cleanups)


async def test_when_prefilling_locally_fails_too_the_client_gets_that_error() -> None:
    planner, prefill = Planner("prefill"), Prefill()
    engine = Engine({"local": broken(ValueError("engine dead"))})
    prefill.answer.set_exception(ConnectionError("gone"))
    with pytest.raises(ValueError, match="engine dead"):
        await answer(PrefillExecutor(planner), work(engine, prefill))
    assert planner.over == [("r", [])]


# KV that does not arrive


async def test_a_pull_that_fails_is_prefilled_locally() -> None:
    planner, prefill = Planner("prefill"), Prefill()
    engine = Engine({"pull": broken(RuntimeError("transfer failed")), "local": ready(7, 8)})
    prefill.answer.set_result(RESULT)
    executor = PrefillExecutor(planner)

    assert await answer(executor, work(engine, prefill)) == [7, 8]

    assert engine.kinds == ["pull", "local"]
    assert [s.engine_id for s in engine.submissions] == ["r", "r-local"]
    assert planner.failures == [("r", "transfer failed")]
    assert planner.over == [("r", [7, 8])]
    assert_forgotten(executor)


async def test_late_kv_races_a_local_copy_that_wins() -> None:
    planner, prefill = Planner("prefill", LATE_S), Prefill()
    engine = Engine({"local": ready(7, 8)})
    prefill.answer.set_result(RESULT)
    executor = PrefillExecutor(planner)

    assert await answer(executor, work(engine, prefill)) == [7, 8]

    assert engine.kinds == ["pull", "local"]
    assert engine.ends == ["abort", "itself"], "the loser must be aborted"
    [(_, why)] = planner.failures
    assert "no KV" in why
    assert planner.over == [("r", [7, 8])]
    assert_forgotten(executor)


async def test_kv_is_not_late_while_the_engine_is_busy_with_one_long_step() -> None:
    planner, prefill = Planner("prefill", LATE_S), Prefill()
    engine = Engine({"local": ready(7, 8)})
    prefill.answer.set_result(RESULT)
    steps = 5
    running = replace(work(engine, prefill), engine_steps=lambda: steps, engine_busy=lambda: True)
    answering = asyncio.create_task(answer(PrefillExecutor(planner), running))
    await asyncio.sleep(4 * LATE_S)
    assert engine.kinds == ["pull"], "no step has ended, so no KV can have been taken in"
    steps += LATE_STEPS
    assert await answering == [7, 8]
    assert engine.kinds == ["pull", "local"]


async def test_late_kv_races_a_local_copy_and_wins() -> None:
    planner, prefill, engine = Planner("prefill", LATE_S), Prefill(), Engine()
    prefill.answer.set_result(RESULT)
    executor = PrefillExecutor(planner)
    task = asyncio.create_task(answer(executor, work(engine, prefill)))
    await until(lambda: engine.kinds == ["pull", "local"] and engine.submissions[1].started)
    engine.submissions[0].put(7).put(8).end()

    assert await task == [7, 8]

    assert engine.ends == ["itself", "abort"]
    assert len(planner.failures) == 1, "it was late all the same"
    assert planner.over == [("r", [7, 8])]
    assert_forgotten(executor)


async def test_both_answers_at_once_yield_one_stream() -> None:
    planner, prefill, engine = Planner("prefill", LATE_S), Prefill(), Engine()
    prefill.answer.set_result(RESULT)
    task = asyncio.create_task(answer(PrefillExecutor(planner), work(engine, prefill)))
    await until(lambda: engine.kinds == ["pull", "local"] and engine.submissions[1].started)
    for submission in engine.submissions:
        submission.put(7).put(8).end()
    assert await task == [7, 8]
    assert sorted(map(str, engine.ends)) == ["abort", "itself"]


async def test_the_race_goes_on_when_one_racer_fails() -> None:
    for failing, winning in ((0, 1), (1, 0)):
        planner, prefill, engine = Planner("prefill", LATE_S), Prefill(), Engine()
        prefill.answer.set_result(RESULT)
        task = asyncio.create_task(answer(PrefillExecutor(planner), work(engine, prefill)))
        await until(lambda e=engine: len(e.submissions) == 2 and e.submissions[1].started)
        engine.submissions[failing].fail(RuntimeError("lost"))
        await asyncio.sleep(0.01)
        assert not task.done()
        engine.submissions[winning].put(7).end()
        assert await task == [7]


async def test_when_both_racers_fail_the_client_gets_the_local_error() -> None:
    planner, prefill, engine = Planner("prefill", LATE_S), Prefill(), Engine()
    prefill.answer.set_result(RESULT)
    task = asyncio.create_task(answer(PrefillExecutor(planner), work(engine, prefill)))
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
    assert await answer(PrefillExecutor(planner), work(engine, prefill)) == [7]
    assert limit_s * 0.9 < time.perf_counter() - started < 2 * limit_s + 1
    assert engine.kinds == ["pull", "local"]


async def test_a_failed_pull_is_seen_at_once_however_busy_the_engine_is() -> None:
    planner, prefill = Planner("prefill"), Prefill()
    engine = Engine({"pull": broken(RuntimeError("transfer failed")), "local": ready(8)})
    prefill.answer.set_result(RESULT)
    request = replace(work(engine, prefill), engine_steps=lambda: 0, engine_busy=lambda: True)
    assert await answer(PrefillExecutor(planner), request) == [8]


# The stream


async def test_after_the_first_token_nothing_is_repeated() -> None:
    planner, prefill = Planner("prefill"), Prefill()
    engine = Engine({"pull": lambda s: s.put(7).fail(RuntimeError("mid-stream"))})
    prefill.answer.set_result(RESULT)
    tokens: list[int] = []
    with pytest.raises(RuntimeError, match="mid-stream"):
        async for output in PrefillExecutor(planner).run(work(engine, prefill)):
            tokens += output.tokens
    assert tokens == [7]
    assert engine.kinds == ["pull"]
    assert planner.over == [("r", [7])]


# Request ids


async def test_two_requests_with_one_id_are_kept_apart() -> None:
    planner, engine, prefill = Planner(None), Engine(), Prefill()
    executor = PrefillExecutor(planner)
    tasks = [asyncio.create_task(answer(executor, work(engine, prefill))) for _ in range(3)]
    await until(lambda: len(engine.submissions) == 3)
    names = [name for name, *_ in planner.planned]
    assert names[0] == "r"
    assert len(set(names)) == 3
    assert [s.engine_id for s in engine.submissions] == names
    for submission, token in zip(engine.submissions, (7, 8, 9), strict=True):
        submission.put(token).end()
    assert [await task for task in tasks] == [[7], [8], [9]]
    assert dict(planner.over) == dict(zip(names, [[7], [8], [9]], strict=True))
    assert_forgotten(executor)


async def test_an_id_may_come_again_once_its_request_is_over() -> None:
    planner, engine = Planner(None), Engine({"local": ready(7)})
    executor = PrefillExecutor(planner)
    await answer(executor, work(engine, Prefill()))
    await answer(executor, work(engine, Prefill()))
    assert [name for name, *_ in planner.planned] == ["r", "r"]


# KV that came and is not the prompt's


async def test_kv_that_is_not_proved_is_computed_by_the_engine_and_the_planner_is_told() -> None:
    """No local copy races it: the engine is at it already, however long that takes."""
    planner, engine, prefill = Planner("prefill", timeout_s=LATE_S), Engine({}), Prefill()
    prefill.answer.set_result(RESULT)
    executor = PrefillExecutor(planner)
    answering = asyncio.create_task(answer(executor, work(engine, prefill)))
    await until(lambda: engine.kinds == ["pull"])
    executor.unproved(Unproven("r", "peer", "content", "2 of 3 blocks differ"))
    executor.unproved(Unproven("r", "peer", "content", "told twice"))
    executor.unproved(Unproven("another", "peer", "gone", "a request that has ended"))
    await asyncio.sleep(3 * LATE_S)
    assert engine.kinds == ["pull"]
    engine.submissions[0].put(7, 8).end()
    assert await answering == [7, 8]
    assert [why for _, why in planner.failures] == ["KV not used (content): 2 of 3 blocks differ"]
    assert planner.answer.replica in executor.verification
    assert_forgotten(executor)
