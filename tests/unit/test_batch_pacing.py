"""How many lines of batches are in flight beside other requests, and which come first."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.gateway.batches.line_gate import MAX_YIELDS, LineGate, LinePlace
from headrace.gateway.batches.line_pacer import (
    MAX_PAUSE_S,
    MAX_SLOWDOWN,
    QUIET_S,
    START_STEPS,
    LineLoad,
    LinePacer,
)
from tests.unit.gateway_fakes import soon

IDLE = LineLoad(replicas=2)
BUSY = replace(IDLE, requests=3, step_s=0.02)


# Pacer


def test_idle_replicas_are_filled() -> None:
    assert LinePacer(16).target(IDLE, 0.0) == 32


def test_without_a_replica_one_line_wakes_it_and_none_is_taken_back() -> None:
    assert LinePacer(16).target(LineLoad(replicas=0), 0.0) == 1
    assert LinePacer(16).target(LineLoad(replicas=0, lines=5), 0.0) == 5


def test_beside_requests_each_replica_has_the_lines_that_lengthen_a_step_little() -> None:
    pacer = LinePacer(16)
    pacer.on_start(0.0)
    assert pacer.target(replace(BUSY, lines=20, slowdown=1.0), 1.0) == 20
    assert pacer.target(replace(BUSY, lines=20, slowdown=1.01), 1.0) == 8, "four each"
    assert pacer.target(replace(BUSY, lines=20, slowdown=1.2), 1.0) == 2, "each keeps one"
    assert pacer.target(replace(BUSY, lines=20, step_s=0.0), 1.0) == 2, "steps are unknown"


def test_beside_requests_a_line_starts_at_each_replica_once_in_many_steps() -> None:
    pacer = LinePacer(16)
    pacer.on_start(0.0)
    spacing_s = START_STEPS * BUSY.step_s / BUSY.replicas
    assert pacer.target(BUSY, spacing_s - 0.01) == 0
    assert pacer.target(BUSY, spacing_s) == 1
    assert pacer.target(BUSY, 2 * spacing_s) == 2
    assert pacer.target(replace(BUSY, lines=31), 9 * spacing_s) == 32
    assert pacer.target(replace(BUSY, lines=32), 9 * spacing_s) == 32


def test_a_line_that_would_slow_streams_down_waits_but_not_for_ever() -> None:
    pacer = LinePacer(16)
    pacer.on_start(0.0)
    slow = replace(BUSY, slowdown=MAX_SLOWDOWN + 0.01)
    assert pacer.target(slow, MAX_PAUSE_S - 0.01) == 0
    assert pacer.target(slow, MAX_PAUSE_S) == 1


def test_a_short_pause_between_requests_is_not_filled() -> None:
    pacer = LinePacer(16)
    pacer.target(BUSY, 10.0)
    assert pacer.target(replace(IDLE, lines=1), 10.0 + QUIET_S - 0.01) == 1
    assert pacer.target(IDLE, 10.0 + QUIET_S) > 1


def test_after_requests_the_lines_double_from_second_to_second() -> None:
    pacer = LinePacer(16)
    pacer.target(BUSY, 10.0)
    quiet = [pacer.target(IDLE, 10.0 + QUIET_S * times) for times in (0.9, 1, 1.9, 2, 3, 100, 1e9)]
    assert quiet == [0, 8, 8, 16, 32, 32, 32]


def test_requests_elsewhere_stop_new_lines_and_take_none_back() -> None:
    pacer = LinePacer(16)
    pacer.on_start(0.0)
    assert pacer.target(replace(IDLE, lines=20, elsewhere=10), 1.0) == 20
    assert pacer.target(replace(IDLE, lines=20, elsewhere=5), 1.0) == 32, "within the uncertainty"


# Gate


class Load:
    """A load that a test sets."""

    def __init__(self, **load: int) -> None:
        self.now = LineLoad(**load)

    def __call__(self, model_id: str, lines: int) -> LineLoad:
        return replace(self.now, lines=lines)


async def entered(gate: LineGate, count: int, tenant: str = "a") -> list[LinePlace]:
    async with asyncio.timeout(5):
        return [await gate.enter("m", tenant) for _ in range(count)]


async def test_lines_wait_at_the_gate_until_one_leaves() -> None:
    gate = LineGate(Load(replicas=1), 2)
    first, _ = await entered(gate, 2)
    waiting = asyncio.create_task(gate.enter("m", "a"))
    await asyncio.sleep(0)
    assert not waiting.done() and len(gate) == 2
    gate.leave(first)
    await waiting
    assert len(gate) == 2
    gate.close()


async def test_the_tenant_with_the_fewest_lines_comes_first() -> None:
    gate = LineGate(Load(replicas=1), 3)
    places = await entered(gate, 3, "a")
    order: list[str] = []

    async def enter(tenant: str) -> None:
        await gate.enter("m", tenant)
        order.append(tenant)

    tasks = [asyncio.create_task(enter(tenant)) for tenant in ("a", "a", "b")]
    await asyncio.sleep(0)
    for place in places:
        gate.leave(place)
    await asyncio.gather(*tasks)
    assert order[0] == "b"
    gate.close()


async def test_a_line_that_gives_up_at_the_gate_leaves_it() -> None:
    gate = LineGate(Load(replicas=1), 1)
    (place,) = await entered(gate, 1)
    waiting = asyncio.create_task(gate.enter("m", "a"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.leave(place)
    assert len(gate) == 0
    await entered(gate, 1)
    gate.close()


async def test_the_youngest_surplus_lines_are_taken_back_when_requests_arrive() -> None:
    load = Load(replicas=1)
    gate = LineGate(load, 4)
    places = await entered(gate, 4)
    taken: list[int] = []
    for number, place in enumerate(places):
        place.on_yield = lambda number=number: taken.append(number)  # type: ignore[misc]
    load.now = LineLoad(replicas=1, requests=1)
    await soon(lambda: len(taken) == 3)
    gate.on_request()
    await asyncio.sleep(0.2)
    assert taken == [3, 2, 1], "each once"
    gate.close()


async def test_a_line_that_was_taken_back_often_stays() -> None:
    load = Load(replicas=1)
    gate = LineGate(load, 4)
    old = await gate.enter("m", "a", MAX_YIELDS)
    older = await gate.enter("m", "a", MAX_YIELDS)
    taken: list[str] = []
    for place in (old, older):
        place.on_yield = lambda: taken.append("x")
    load.now = LineLoad(replicas=1, requests=1)
    await asyncio.sleep(0.2)
    assert not taken
    gate.close()
