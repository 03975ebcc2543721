"""How many prompts an engine computes at once.

A step with n prompt tokens takes about a + b n seconds. Putting another prompt of m tokens into
the same step saves one a, and makes everyone already in it wait b m longer. So a prompt joins only
if

    b m k <= a          k: prompts already being computed

and otherwise waits for its turn, first come first served: prompts that fill a step by themselves
go one after the other, which halves their mean time to first token against computing them together
and takes no longer in all; tiny ones share steps. a / b is read off the engine's fitted step times
(`StepTime.free_tokens`). Pure asyncio.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace_engine.steptime import StepTime


class ComputeGate:
    """Lets prompts into the engine, in order of arrival. Used from one event loop only."""

    def __init__(self, step_time: StepTime | None = None) -> None:
        """`step_time`: of the engine, fitted by somebody else; the prior if there is none."""
        self._step_time = StepTime() if step_time is None else step_time
        self._computing = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """Prompts that wait for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, tokens: int) -> AsyncIterator[None]:
        """Wait until a prompt of so many tokens may be computed; the block is its turn."""
        if self._waiting or not self._may_join(tokens):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (tokens, turn)
            self._waiting.append(entry)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave()
                elif entry in self._waiting:
                    self._waiting.remove(entry)
                raise
        else:
            self._computing += 1
        try:
            yield
        finally:
            self._leave()

    def _may_join(self, tokens: int) -> bool:
        return self._computing == 0 or tokens * self._computing <= self._step_time.free_tokens()

    def _leave(self) -> None:
        self._computing -= 1
        while self._waiting and self._may_join(self._waiting[0][0]):
            _, turn = self._waiting.popleft()
            if not turn.done():
                self._computing += 1
                turn.set_result(None)
