"""Drives an engine in real time: waits for each step's end on the loop's clock, computes nothing.

A step begins where the one before it ended, not where this process noticed it, so that a late loop
delays what it tells but never slows the engine. One timer an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from benchmarks.routers.engine import Engine, Request

MAX_BEHIND_S = 0.05
"""Maximum seconds by which a step may begin in the past. An engine that is later stood still, since
this process had no core; its clock is then reset, and `lost_s` counts the delay."""


class Pacer:
    """The clock of one engine. Used from one event loop.

    Args:
        told: called after each step and each arrival.

    Attributes:
        lost_s: seconds by which the engine stood still for want of a core.
        late_s: of all steps, the seconds by which their ends were noticed late.
    """

    def __init__(self, engine: Engine, told: Callable[[], None] = lambda: None) -> None:
        self.engine, self._told = engine, told
        self._timer: asyncio.TimerHandle | None = None
        self._until_s = 0.0
        self.lost_s = self.late_s = 0.0

    def submit(self, request: Request) -> None:
        """A request comes.

        Raises:
            ValueError: it can never enter.
        """
        self.engine.submit(request)
        if self._timer is None:
            self._begin(asyncio.get_running_loop().time())
        self._told()

    def close(self) -> None:
        """Stop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, at_s: float) -> None:
        seconds = self.engine.begin()
        if seconds is None:
            self._timer = None
            return
        self._until_s = at_s + seconds
        self._timer = asyncio.get_running_loop().call_at(self._until_s, self._end)

    def _end(self) -> None:
        now_s = asyncio.get_running_loop().time()
        late_s = max(0.0, now_s - self._until_s)
        self.late_s += late_s
        self.engine.end()
        begin_s = self._until_s
        if late_s > MAX_BEHIND_S:
            self.lost_s += late_s
            begin_s = now_s
        self._begin(begin_s)
        self._told()
