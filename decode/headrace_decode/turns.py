"""How many prompts of one request are answered at once.

vLLM starts all prompts of a completion at once. Each is checked, planned and handed to the engine
in a millisecond, so a thousand of them would hold the loop, and everybody's streams, for a second;
then they would fill the engine's steps, and everybody's next token would wait for them.

So they begin one after the other, each in a turn of the event loop. While the engine serves other
requests as well, only as many are answered at once as make its steps longer by a share (`LONGER`),
one at least. The request takes longer, its neighbours go on.

Longer than what: while a request's prompts are in each step, nobody sees how long a step takes
without them. The fit then takes long steps for a slow machine, and a share of that lets in more. So
a step of the others is priced when the request begins, and afterwards only ever for less.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from headrace_engine.gate import Job
from headrace_engine.steptime import StepTime

LONGER = 0.15
"""Share by which the prompts of one request may lengthen the steps of others. What it costs and
saves: docs/benchmarks.md, "One hostile tenant"."""

ALONE_S = 1.0
"""Somebody who streams one answer after the other is still there between two of them."""


@dataclass
class Prompts:
    """What the prompts of one request share.

    Attributes:
        turn: held by the one that begins.
        job: their place in the queue for the engine.
        answered: how many are being answered.
        left: set when one of them ends.
        others, others_s: how many of others were being answered when there last were any; when.
        priced, alone_s: a step of so many others takes so long without these prompts.
    """

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    job: Job = field(default_factory=Job)
    answered: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    others: int = 0
    others_s: float = -math.inf
    priced: int = 0
    alone_s: float = math.inf

    def rows_beside(self, steps: StepTime) -> int:
        """How many prompts make the steps of the others longer by `LONGER`."""
        alone_s = steps.seconds(rows=self.others)
        before_s = self.alone_s * alone_s / steps.seconds(rows=self.priced)
        self.priced, self.alone_s = self.others, min(alone_s, before_s)
        return steps.rows_within((1.0 + LONGER) * self.alone_s) - self.others


PROMPTS: ContextVar[Prompts | None] = ContextVar("headrace_prompts", default=None)
"""Of the request that this task answers; None for what is no request of a client's."""


class Turns:
    """The turns of all prompts of one engine.

    Args:
        steps: the fit of the engine's steps, which goes on learning.
        clock: seconds.
    """

    def __init__(self, steps: StepTime, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._answered = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Held while a prompt is answered; begins in a turn of the loop that no other prompt of
        the same request has, and when there is room."""
        prompts = PROMPTS.get() or Prompts()
        async with prompts.turn:
            await asyncio.sleep(0)
            while prompts.answered >= self._room(prompts):
                prompts.left.clear()
                await prompts.left.wait()
            prompts.answered += 1
            self._answered += 1
        try:
            yield
        finally:
            prompts.answered -= 1
            self._answered -= 1
            prompts.left.set()

    def _room(self, prompts: Prompts) -> float:
        """How many prompts of a request may be answered at once."""
        others, now_s = self._answered - prompts.answered, self._clock()
        if others > 0:
            prompts.others, prompts.others_s = others, now_s
        elif now_s - prompts.others_s > ALONE_S:
            return math.inf
        return max(1, prompts.rows_beside(self._steps))
