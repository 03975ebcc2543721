"""How many prompts an engine computes at once."""

from __future__ import annotations

import asyncio

import pytest

from headrace_engine.gate import ComputeGate
from headrace_engine.steptime import StepTime


def fitted(a: float, b: float) -> ComputeGate:
    step_time = StepTime()
    for tokens in (10, 100, 1000, 50, 500) * 5:
        step_time.observe(tokens, 0, 0, 0, 0, a + b * tokens)
    return ComputeGate(step_time)


async def order(gate: ComputeGate, prompts: list[int], seconds: float = 0.01) -> list[int]:
    """How many prompts were being computed when each came in, in order of coming in."""
    together: list[int] = []
    inside = 0

    async def one(tokens: int) -> None:
        nonlocal inside
        async with gate.turn(tokens):
            inside += 1
            together.append(inside)
            await asyncio.sleep(seconds)
            inside -= 1

    await asyncio.gather(*(one(tokens) for tokens in prompts))
    return together


async def test_prompts_that_fill_a_step_go_one_after_the_other() -> None:
    assert await order(fitted(0.05, 0.002), [600] * 4) == [1, 1, 1, 1]


async def test_tiny_prompts_share_steps_as_far_as_it_pays() -> None:
    assert (await order(fitted(0.05, 0.002), [10] * 4))[:3] == [1, 2, 3]
    assert max(await order(fitted(0.05, 0.002), [10] * 4)) == 3


async def test_nothing_overtakes_a_prompt_that_waits() -> None:
    gate, done = fitted(0.05, 0.002), []

    async def one(name: str, tokens: int) -> None:
        async with gate.turn(tokens):
            await asyncio.sleep(0.01)
            done.append(name)

    await asyncio.gather(one("first", 600), one("second", 600), one("tiny", 1))
    assert done[0] == "first"
    assert set(done) == {"first", "second", "tiny"}
    assert gate.waiting == 0


async def test_a_prompt_that_gives_up_leaves_its_place_to_the_next() -> None:
    gate = fitted(0.05, 0.002)
    async with gate.turn(600):
        gives_up = asyncio.create_task(order(gate, [600]))
        stays = asyncio.create_task(order(gate, [600]))
        await asyncio.sleep(0.01)
        assert gate.waiting == 2
        gives_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gives_up
        assert gate.waiting == 1
    assert await stays == [1]
    assert await order(gate, [600]) == [1]


async def test_a_turn_granted_in_the_moment_of_giving_up_is_passed_on() -> None:
    gate = fitted(0.05, 0.002)
    async with gate.turn(600):
        gives_up = asyncio.create_task(order(gate, [600]))
        await asyncio.sleep(0.01)
    gives_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gives_up
    assert await order(gate, [600]) == [1]
