"""How many prompts an engine computes at once."""

from __future__ import annotations

import asyncio

import pytest

from headrace_engine.meter import EngineMeter, Step
from headrace_engine.prefill_admission import PrefillAdmission, RequestPrompts


def fitted(a: float, b: float) -> PrefillAdmission:
    meter = EngineMeter()
    for tokens in (10, 100, 1000, 50, 500) * 5:
        meter.step(Step(tokens, 0, 0, 0, 0, a + b * tokens))
    return PrefillAdmission(meter)


async def order(gate: PrefillAdmission, prompts: list[int], seconds: float = 0.01) -> list[int]:
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


async def finished(prompts: dict[str, int], apart_s: float = 0.0) -> list[str]:
    """Names of prompts in the order in which they were done; they come `apart_s` seconds apart, and
    each keeps the engine for 10 ms."""
    gate, done = fitted(0.05, 0.002), list[str]()

    async def one(name: str, tokens: int) -> None:
        async with gate.turn(tokens):
            await asyncio.sleep(0.01)
            done.append(name)

    async with asyncio.TaskGroup() as group:
        for name, tokens in prompts.items():
            group.create_task(one(name, tokens))
            await asyncio.sleep(apart_s)
    assert gate.waiting == 0
    return done


async def test_a_short_prompt_passes_a_long_one_that_waits() -> None:
    assert await finished({"first": 600, "long": 3000, "short": 60}) == ["first", "short", "long"]


async def test_prompts_of_one_length_keep_their_order() -> None:
    names = [f"{number}" for number in range(5)]
    assert await finished(dict.fromkeys(names, 600), apart_s=0.001) == names


async def behind_another(
    prompts: dict[str, int], then: dict[str, int], apart_s: float
) -> list[str]:
    """Names of prompts in the order of their turns. They come while another one is computed, some
    of them `apart_s` seconds later. A prompt of n tokens takes 0.2 n ms."""
    gate, done = fitted(0.005, 0.0002), list[str]()

    async def one(name: str, tokens: int) -> None:
        async with gate.turn(tokens):
            done.append(name)

    async with asyncio.TaskGroup() as group, gate.turn(6000):
        for name, tokens in prompts.items():
            group.create_task(one(name, tokens))
        await asyncio.sleep(apart_s)
        for name, tokens in then.items():
            group.create_task(one(name, tokens))
        await asyncio.sleep(0)
    return done


async def test_a_long_prompt_waits_for_none_that_comes_later_than_many_times_its_own_work() -> None:
    """It is due 1.2 s after its arrival, and the short ones 0.6 s after theirs."""
    done = await behind_another({"long": 60, "soon after": 30}, {"much later": 30}, apart_s=0.8)
    assert done == ["soon after", "long", "much later"]


async def test_a_turn_of_a_conversation_passes_prompts_that_came_before() -> None:
    long = {f"long {n}": 10_000 for n in range(5)}
    assert await behind_another(long, {"next turn": 100}, apart_s=0.5) == ["next turn", *long]


async def test_a_stream_that_another_replica_began_is_next() -> None:
    gate, done = fitted(0.005, 0.0002), list[str]()

    async def one(name: str, tokens: int, resumes: bool) -> None:
        async with gate.turn(tokens, resumes=resumes):
            done.append(name)

    async with asyncio.TaskGroup() as group, gate.turn(6000):
        group.create_task(one("short", 100, False))
        await asyncio.sleep(0.05)
        group.create_task(one("stream", 3000, True))
        await asyncio.sleep(0)
    assert done == ["stream", "short"]


async def test_the_many_prompts_of_a_request_are_not_all_ahead_of_what_comes_meanwhile() -> None:
    gate, done, job = fitted(0.05, 0.002), list[str](), RequestPrompts()

    async def one(name: str, job: RequestPrompts | None) -> None:
        async with gate.turn(600, job):
            await asyncio.sleep(0.01)
            done.append(name)

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(one(f"of many {number}", job))
        await asyncio.sleep(0.025)
        group.create_task(one("alone", None))
    assert done.index("alone") <= 5
    assert [name for name in done if name != "alone"] == [f"of many {n}" for n in range(20)]


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


async def test_the_next_prompt_is_let_in_when_the_step_of_the_one_before_it_begins() -> None:
    meter = EngineMeter()
    gate = PrefillAdmission(meter, step_tokens=1000)
    async with gate.turn(600):
        following = asyncio.create_task(order(gate, [600]))
        await asyncio.sleep(0.005)
        assert gate.waiting == 1
        meter.step(Step(0, 3, 0, 0, 0, 0.02))  # it ends as the first prompt's step begins
        assert gate.waiting == 0
        assert await following == [1]


async def test_a_prompt_of_several_steps_keeps_its_turn_until_its_first_token() -> None:
    meter = EngineMeter()
    gate = PrefillAdmission(meter, step_tokens=500)
    async with gate.turn(600):
        following = asyncio.create_task(order(gate, [100]))
        await asyncio.sleep(0.005)
        meter.step(Step(500, 3, 0, 0, 0, 0.5))
        assert gate.waiting == 1
    assert await following == [1]


async def test_a_step_ends_no_turn_twice() -> None:
    meter = EngineMeter()
    gate = PrefillAdmission(meter, step_tokens=1000)
    async with gate.turn(600):
        meter.step(Step(0, 1, 0, 0, 0, 0.02))
        async with gate.turn(600):
            pass
        assert await order(gate, [600, 600]) == [1, 1]


def with_room() -> tuple[EngineMeter, PrefillAdmission]:
    """Steps of 1,000 tokens of one prompt, and 100 of others'."""
    meter = EngineMeter()
    return meter, PrefillAdmission(meter, step_tokens=1000, spare_tokens=100)


STEP = Step(1000, 3, 0, 0, 0, 0.5)


async def test_what_fits_into_the_rest_of_a_step_is_not_stuck_behind_a_long_prompt() -> None:
    _, gate = with_room()
    async with gate.turn(5000), asyncio.timeout(1):
        assert await order(gate, [60]) == [1]


async def test_no_more_is_let_in_beside_a_long_prompt_than_a_step_has_room_for() -> None:
    meter, gate = with_room()
    async with gate.turn(5000):
        shorts = asyncio.create_task(order(gate, [60, 60, 40, 60], seconds=0.05))
        await asyncio.sleep(0.005)
        assert gate.waiting == 2
        meter.step(STEP)
        assert gate.waiting == 1
        meter.step(STEP)
        assert gate.waiting == 0
        await shorts


async def test_a_prompt_that_does_not_fit_beside_a_long_one_waits_for_its_end() -> None:
    meter, gate = with_room()
    async with gate.turn(5000):
        following = asyncio.create_task(order(gate, [101]))
        await asyncio.sleep(0.005)
        meter.step(STEP)
        assert gate.waiting == 1
    assert await following == [1]


async def test_beside_a_prompt_of_one_step_nothing_is_let_in_for_its_room() -> None:
    _, gate = with_room()
    async with gate.turn(900):
        following = asyncio.create_task(order(gate, [90]))
        await asyncio.sleep(0.005)
        assert gate.waiting == 1
    await following


async def test_a_prompt_that_waits_in_the_engine_does_not_leave_it_idle() -> None:
    """Its grammar is being compiled: the engine makes no step, and so tells nothing."""
    gate = fitted(0.001, 0.00005)
    compiled = asyncio.Event()

    async def waits_for_its_grammar() -> None:
        async with gate.turn(600):
            await compiled.wait()

    first = asyncio.create_task(waits_for_its_grammar())
    await asyncio.sleep(0)
    async with asyncio.timeout(5), gate.turn(600):
        assert not first.done()
    compiled.set()
    await first
    assert not gate._computing and gate.waiting == 0


async def test_a_turn_that_is_used_in_time_is_no_shorter() -> None:
    assert await order(fitted(0.05, 0.002), [600] * 3, seconds=0.1) == [1, 1, 1]
