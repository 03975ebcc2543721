"""Limits the number of prompts of one request that are answered at the same time.

vLLM starts all prompts of a completion at once. Each takes a millisecond to check, plan and hand to
the engine. A thousand prompts would thus block the event loop, and all other streams, for a second.
They would then fill the engine's steps, and delay the next token of all other requests.

Here, the prompts of one request begin one after the other, each in its own turn of the event loop.
While the engine serves other requests, the number of prompts answered at the same time is limited:
together they may lengthen the engine's steps by the share `MAX_STEP_SLOWDOWN`. At least one prompt
is always answered. The request takes longer, and other requests continue.

The baseline step time cannot be observed while the request's prompts are in every step. The fitted
step time would then mistake long steps for a slow machine, and the share would admit more prompts.
Therefore the baseline is estimated when the request begins, and later estimates can only lower it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from headrace_engine.prefill_admission import RequestPrompts
from headrace_engine.step_time import StepTime

MAX_STEP_SLOWDOWN = 0.15
"""Share by which the prompts of one request may lengthen the steps of other requests. Its costs and
gains are in docs/benchmarks.md, "One hostile tenant"."""

IDLE_S = 1.0
"""Seconds without other prompts after which the limit no longer applies. It is long enough that the
limit holds while another client pauses between two answers."""


@dataclass
class Fanout:
    """The prompts of one request, in progress and admitted one by one.

    Attributes:
        lock: held by the prompt that begins.
        job: the prompts' place in the queue for the engine.
        answered: number of prompts that are being answered.
        ended: event that is set when one of the prompts ends.
        others, others_s: number of other requests' prompts being answered when there last were any;
            the time of that.
        priced, alone_s: number of other prompts, and the seconds of a step with only these.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    job: RequestPrompts = field(default_factory=RequestPrompts)
    answered: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    others: int = 0
    others_s: float = -math.inf
    priced: int = 0
    alone_s: float = math.inf

    def max_prompts_beside(self, steps: StepTime) -> int:
        """Return the number of prompts that lengthen the steps of other requests by
        `MAX_STEP_SLOWDOWN`."""
        alone_s = steps.seconds(rows=self.others)
        before_s = self.alone_s * alone_s / steps.seconds(rows=self.priced)
        self.priced, self.alone_s = self.others, min(alone_s, before_s)
        return steps.rows_within((1.0 + MAX_STEP_SLOWDOWN) * self.alone_s) - self.others


FANOUT: ContextVar[Fanout | None] = ContextVar("headrace_prompts", default=None)
"""Fan-out of the client's request that this task answers; None without such a request."""


class FanoutLimiter:
    """The limiter of how many prompts of one request an engine answers at the same time.

    Args:
        steps: the fitted step time of the engine, which is updated elsewhere.
        clock: returns the time in seconds.
    """

    def __init__(self, steps: StepTime, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._answered = 0

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Wait until a prompt may begin, and count it while it is answered.

        A prompt begins when the request's limit permits, in a turn of the event loop in which no
        other prompt of the same request begins.
        """
        fanout = FANOUT.get() or Fanout()
        async with fanout.lock:
            await asyncio.sleep(0)
            while fanout.answered >= self._max_prompts(fanout):
                fanout.ended.clear()
                await fanout.ended.wait()
            fanout.answered += 1
            self._answered += 1
        try:
            yield
        finally:
            fanout.answered -= 1
            self._answered -= 1
            fanout.ended.set()

    def _max_prompts(self, fanout: Fanout) -> float:
        """Return the number of prompts of a request that may be answered at the same time."""
        others, now_s = self._answered - fanout.answered, self._clock()
        if others > 0:
            fanout.others, fanout.others_s = others, now_s
        elif now_s - fanout.others_s > IDLE_S:
            return math.inf
        return max(1, fanout.max_prompts_beside(self._steps))
