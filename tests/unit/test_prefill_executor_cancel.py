"""Clients that hang up while a decode replica carries their plan out: what is then aborted, called
off and released, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from headrace_decode.planning.prefill_executor import PrefillExecutor
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
    gate_for_one,
    hang_up,
    until,
    work,
)


@pytest.fixture(autouse=True)
async def _leaves_no_task() -> AsyncIterator[None]:
    yield
    await assert_no_task_left()


async def test_hanging_up_during_local_prefill_aborts_it() -> None:
    planner, engine, prefill = Planner(None), Engine(), Prefill()
    executor = PrefillExecutor(planner)
    task = asyncio.create_task(answer(executor, work(engine, prefill)))
    await until(lambda: engine.submissions and engine.submissions[0].started)
    await hang_up(task)
    assert engine.ends == ["abort"]
    assert planner.over == [("r", [])]
    assert_forgotten(executor)


async def test_hanging_up_during_the_call_calls_it_off() -> None:
    planner, engine, prefill = Planner("prefill"), Engine(), Prefill()
    executor = PrefillExecutor(planner)
    task = asyncio.create_task(answer(executor, work(engine, prefill)))
    await until(lambda: prefill.calls == 1)
    await hang_up(task)
    assert planner.over == [("r", [])]
    assert not engine.submissions
    assert not planner.failures, "that the client left is not the prefill side's fault"
    await until(lambda: prefill.aborted == 1)
    await until(lambda: not executor.cleanups)
    assert_forgotten(executor)


async def test_kv_that_is_made_after_hanging_up_all_the_same_is_released() -> None:
    planner, engine, prefill = Planner("prefill"), Engine(), Prefill(heeds_cancel=False)
    executor = PrefillExecutor(planner)
    task = asyncio.create_task(answer(executor, work(engine, prefill)))
    await until(lambda: prefill.calls == 1)
    await hang_up(task)
    prefill.answer.set_result(RESULT)
    await until(lambda: prefill.released == [PULL])
    await until(lambda: not executor.cleanups)
    assert planner.over == [("r", [])]


@pytest.mark.parametrize("turns_of_the_loop", range(4))
async def test_hanging_up_as_the_call_returns_strands_no_kv(turns_of_the_loop: int) -> None:
    planner, engine, prefill = Planner("prefill"), Engine(), Prefill()
    executor = PrefillExecutor(planner)
    task = asyncio.create_task(answer(executor, work(engine, prefill)))
    await until(lambda: prefill.calls == 1)
    prefill.answer.set_result(RESULT)
    for _ in range(turns_of_the_loop):
        await asyncio.sleep(0)
    await hang_up(task)
    await until(lambda: not executor.cleanups)
    assert [bool(prefill.aborted), bool(prefill.released), engine.kinds == ["pull"]].count(
        True
    ) == 1


async def test_hanging_up_while_the_kv_is_pulled_aborts_the_pull() -> None:
    planner, engine, prefill = Planner("prefill"), Engine(), Prefill()
    prefill.answer.set_result(RESULT)
    executor = PrefillExecutor(planner)
    task = asyncio.create_task(answer(executor, work(engine, prefill)))
    await until(lambda: engine.submissions and engine.submissions[0].started)
    await hang_up(task)
    assert engine.ends == ["abort"]
    assert not prefill.released, "the engine that was to pull tells the other side itself"
    assert planner.over == [("r", [])]
    assert_forgotten(executor)


async def test_hanging_up_during_the_race_aborts_both() -> None:
    planner, engine, prefill = Planner("prefill", LATE_S), Engine(), Prefill()
    prefill.answer.set_result(RESULT)
    executor = PrefillExecutor(planner)
    task = asyncio.create_task(answer(executor, work(engine, prefill)))
    await until(lambda: len(engine.submissions) == 2 and engine.submissions[1].started)
    await hang_up(task)
    assert engine.ends == ["abort", "abort"]
    assert planner.over == [("r", [])]
    assert_forgotten(executor)


@pytest.mark.parametrize("remote", [False, True])
async def test_hanging_up_in_the_stream_aborts_the_engines_request(remote: bool) -> None:
    planner, engine, prefill = Planner("prefill" if remote else None), Engine(), Prefill()
    prefill.answer.set_result(RESULT)
    executor = PrefillExecutor(planner)
    task = asyncio.create_task(answer(executor, work(engine, prefill)))
    await until(lambda: engine.submissions and engine.submissions[0].started)
    engine.submissions[0].put(7)
    await until(lambda: planner.first)
    await hang_up(task)
    assert engine.ends == ["abort"]
    assert planner.over == [("r", [7])]
    assert_forgotten(executor)


async def test_closing_the_stream_between_two_outputs_aborts_the_engines_request() -> None:
    planner, engine = Planner(None), Engine({"local": lambda s: s.put(7).put(8)})
    executor = PrefillExecutor(planner)
    async with aclosing(executor.run(work(engine, Prefill()))) as outputs:
        assert (await anext(outputs)).tokens == (7,)
    assert engine.ends == ["abort"]
    assert planner.over == [("r", [7])]
    assert_forgotten(executor)


# Within a turn


async def test_waiting_for_a_turn_can_be_given_up() -> None:
    planner, engine, gate = Planner(None), Engine(), gate_for_one()
    executor = PrefillExecutor(planner)
    async with gate.turn(100):
        request = replace(work(engine, Prefill()), turn=gate.turn)
        task = asyncio.create_task(answer(executor, request))
        await until(lambda: planner.planned)
        await hang_up(task)
    assert not engine.submissions
    assert planner.over == [("r", [])]
    assert_forgotten(executor)


async def test_hanging_up_within_a_turn_ends_it() -> None:
    planner, engine, gate = Planner(None), Engine(), gate_for_one()
    request = replace(work(engine, Prefill()), turn=gate.turn)
    task = asyncio.create_task(answer(PrefillExecutor(planner), request))
    await until(lambda: engine.submissions and engine.submissions[0].started)
    await hang_up(task)
    assert engine.ends == ["abort"]
    async with asyncio.timeout(1), gate.turn(100):
        pass
