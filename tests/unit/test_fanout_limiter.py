"""A request of many prompts lets others in between them."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from headrace_decode.planning.fanout_limiter import (
    FANOUT,
    IDLE_S,
    MAX_STEP_SLOWDOWN,
    Fanout,
    FanoutLimiter,
)
from headrace_engine.step_time import StepTime


class Room(StepTime):
    """Steps of an engine with room for so many prompts beside one other request."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._rows = 1 + room

    def rows_within(self, seconds: float) -> int:
        return self._rows


def limiter_with(room: int) -> FanoutLimiter:
    """A limiter of an engine that serves others, with room for so many prompts of one request."""
    limiter = FanoutLimiter(Room(room))
    limiter._answered = 1
    return limiter


async def begin(limiter: FanoutLimiter, begun: list[str], name: str) -> None:
    async with limiter.admit():
        begun.append(name)


def request(
    limiter: FanoutLimiter, begun: list[str], name: str, prompts: int
) -> list[asyncio.Task[None]]:
    """The tasks of a request's prompts."""

    def start() -> list[asyncio.Task[None]]:
        FANOUT.set(Fanout())
        return [asyncio.create_task(begin(limiter, begun, name)) for _ in range(prompts)]

    return contextvars.copy_context().run(start)


async def test_each_prompt_has_a_turn_of_the_loop_and_a_neighbour_waits_for_one() -> None:
    begun: list[str] = []
    limiter = FanoutLimiter(Room(1000))
    many = request(limiter, begun, "many", 100)
    most = before = 0
    neighbour: list[asyncio.Task[None]] = []
    while not all(task.done() for task in many):
        await asyncio.sleep(0)
        most, before = max(most, begun.count("many") - before), begun.count("many")
        if before == 10 and not neighbour:
            neighbour = request(limiter, begun, "neighbour", 1)
    assert most == 1
    assert begun.index("neighbour") < 20
    assert len(begun) == 101


async def test_what_is_no_request_does_not_wait() -> None:
    begun: list[str] = []
    await begin(FanoutLimiter(Room(1)), begun, "own")
    assert begun == ["own"]


@pytest.mark.parametrize(("room", "most"), [(3, 3), (1, 1), (0, 1), (-5, 1)])
async def test_no_more_prompts_of_a_request_are_answered_at_once_than_there_is_room_for(
    room: int, most: int
) -> None:
    answered: list[int] = []
    seen, limiter = 0, limiter_with(room)

    async def answer() -> None:
        nonlocal seen
        async with limiter.admit():
            answered.append(1)
            seen = max(seen, len(answered))
            await asyncio.sleep(0.001)
            answered.pop()

    FANOUT.set(Fanout())
    await asyncio.gather(*(answer() for _ in range(20)))
    assert seen == most


async def test_a_prompt_whose_client_has_gone_makes_room() -> None:
    begun: list[str] = []
    limiter = limiter_with(1)

    async def answer(name: str, seconds: float) -> None:
        async with limiter.admit():
            begun.append(name)
            await asyncio.sleep(seconds)

    FANOUT.set(Fanout())
    stays, waits, last = (
        asyncio.create_task(answer(*each)) for each in (("stays", 60), ("waits", 0), ("last", 0))
    )
    await asyncio.sleep(0.01)
    waits.cancel()
    stays.cancel()
    await last
    assert begun == ["stays", "last"]


async def test_a_request_that_is_alone_may_fill_the_engine() -> None:
    now = [100.0]
    limiter = FanoutLimiter(Room(2), lambda: now[0])
    async with limiter.admit():
        FANOUT.set(Fanout())
        async with limiter.admit(), limiter.admit():
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(limiter.admit().__aenter__(), 0.01)
    async with limiter.admit(), limiter.admit():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(limiter.admit().__aenter__(), 0.01)
        now[0] += IDLE_S + 0.01
        async with limiter.admit():
            pass


BASE_S, ROW_S = 0.016, 0.002


def fitted() -> StepTime:
    """The fit of a machine whose steps take `BASE_S`, and `ROW_S` a row."""
    steps = StepTime()
    for _ in range(40):
        for rows in (1, 2, 4, 8, 16, 32, 64):
            steps.observe(0, rows, 0, 0, 0, BASE_S + rows * ROW_S)
    return steps


@pytest.mark.parametrize("others", [1, 8, 40])
def test_beside_others_the_steps_get_longer_by_the_stated_share(others: int) -> None:
    added_s = Fanout(others=others).max_prompts_beside(fitted()) * ROW_S
    assert added_s == pytest.approx(
        MAX_STEP_SLOWDOWN * (BASE_S + ROW_S * others), abs=1.5 * ROW_S, rel=0.3
    )


def test_steps_that_the_prompts_made_long_make_no_room_for_more() -> None:
    """Of a new request's row the fit knows nothing. Steps with eight of them take three times as
    long, which it takes for a machine that is slow, also without them."""
    steps, prompts = fitted(), Fanout(others=1)
    alone_s = steps.seconds(rows=1)
    assert prompts.max_prompts_beside(steps) >= 1
    for _ in range(200):
        steps.observe(0, 9, 0, 0, 0, 3.0 * (BASE_S + 9 * ROW_S))
    assert steps.seconds(rows=1) > 1.5 * alone_s
    assert prompts.max_prompts_beside(steps) < 1
    assert Fanout(others=1).max_prompts_beside(steps) >= 1


def test_with_more_others_a_step_may_take_as_much_longer_as_theirs_does() -> None:
    steps, prompts = fitted(), Fanout(others=1)
    prompts.max_prompts_beside(steps)
    prompts.others = 40
    assert prompts.max_prompts_beside(steps) == Fanout(others=40).max_prompts_beside(steps)
