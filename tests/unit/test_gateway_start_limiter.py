"""Few requests begin in one turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.gateway.ingress.start_limiter import AT_ONCE, StartLimiter


class App:
    """Notes in which turn of the loop each request begins, and in what order."""

    def __init__(self) -> None:
        self.turn = 0
        self.began: list[tuple[int, int]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.began.append((self.turn, scope["number"]))

    async def count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1


async def played(*numbers: int, cancelled: range = range(0)) -> App:
    app = App()
    limiter = StartLimiter(app)
    counting = asyncio.create_task(app.count())
    tasks = [
        asyncio.create_task(limiter({"type": "http", "number": n}, None, None))  # type: ignore[arg-type]
        for n in numbers
    ]
    await asyncio.sleep(0)
    for n in cancelled:
        tasks[n].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    counting.cancel()
    return app


@pytest.mark.parametrize("count", [1, AT_ONCE, AT_ONCE + 1, 60])
async def test_all_begin_in_their_order_and_few_in_one_turn(count: int) -> None:
    app = await played(*range(count))
    assert [number for _, number in app.began] == list(range(count))
    turns = [turn for turn, _ in app.began]
    assert max(turns.count(turn) for turn in turns) <= AT_ONCE
    assert turns[-1] - turns[0] <= 2 * count / AT_ONCE


async def test_those_that_are_cancelled_take_no_turn() -> None:
    app = await played(*range(60), cancelled=range(AT_ONCE, 50))
    assert [number for _, number in app.began] == [*range(AT_ONCE), *range(50, 60)]


async def test_other_kinds_do_not_wait_and_nothing_runs_when_nobody_begins() -> None:
    app = App()
    limiter = StartLimiter(app)
    for n in range(3 * AT_ONCE):
        await limiter({"type": "lifespan", "number": n}, None, None)  # type: ignore[arg-type]
    assert len(app.began) == 3 * AT_ONCE
    await limiter({"type": "http", "number": 0}, None, None)  # type: ignore[arg-type]
    for _ in range(3):
        await asyncio.sleep(0)
    assert not limiter._follows
