"""How many prompts an engine computes at once.

A step with n prompt tokens takes about a + b n seconds. Putting another prompt of m tokens into
the same step saves one a, and makes everyone already in it wait b m longer. So a prompt joins only
if

    b m k <= a          k: prompts already being computed

and otherwise waits for its turn, first come first served: prompts that fill a step by themselves
go one after the other, which halves their mean time to first token against computing them together
and takes no longer in all; tiny ones share steps. a and b are fitted to the engine's own steps by
least squares with exponential forgetting. Pure asyncio.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace_engine.meter import EngineMeter, Step

FORGET = 0.99
"""Weight of a step after one more step."""


class StepFit:
    """a and b of seconds = a + b tokens, from weighted sums of the steps seen."""

    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take one step that computed prompt tokens."""
        keep, n = FORGET, float(tokens)
        self._weight = keep * self._weight + 1.0
        self._n = keep * self._n + n
        self._t = keep * self._t + seconds
        self._nn = keep * self._nn + n * n
        self._nt = keep * self._nt + n * seconds

    def free_tokens(self) -> float:
        """a / b: the tokens that cost as much as a step itself; 0 while the steps do not tell."""
        spread = self._weight * self._nn - self._n * self._n
        if spread <= 1e-9 * self._nn * max(self._weight, 1.0):
            return 0.0
        b = (self._weight * self._nt - self._n * self._t) / spread
        a = (self._t - b * self._n) / self._weight
        return max(0.0, a) / b if b > 0.0 else float("inf")


class ComputeGate:
    """Lets prompts into the engine, in order of arrival. Used from one event loop only."""

    def __init__(self, meter: EngineMeter | None = None) -> None:
        self.fit = StepFit()
        if meter is not None:
            meter.watch(on_step=self._on_step)
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

    def _on_step(self, step: Step) -> None:
        if step.ctx_tokens:
            self.fit.observe(step.ctx_tokens, step.seconds)

    def _may_join(self, tokens: int) -> bool:
        return self._computing == 0 or tokens * self._computing <= self.fit.free_tokens()

    def _leave(self) -> None:
        self._computing -= 1
        while self._waiting and self._may_join(self._waiting[0][0]):
            _, turn = self._waiting.popleft()
            if not turn.done():
                self._computing += 1
                turn.set_result(None)
