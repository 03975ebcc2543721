"""Measures the stalls of an event loop: the longest time of the last minute in which it was held.

A timer is due every `EVERY_S` while requests are in progress. Without requests there is no timer:
a stall delays no request, and each check would wake the process. The timer fires late by the time
for which other code held the loop, or for which the process got no processor. The processor time
that the process used since then tells the two apart: code that holds the loop uses some, in its own
thread or in one that holds the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

ASGIApp = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]

EVERY_S = 0.025
REMEMBERED_S = 60


class LoopStall:
    """Watch over a loop while it answers requests.

    Args:
        now_s: a monotonic clock.
        used_s: returns the processor time that the process has used.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float] = time.monotonic,
        used_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._now_s, self._used_s = now_s, used_s
        self._slots = [(-1, 0.0, 0.0)] * REMEMBERED_S
        self._timer: asyncio.TimerHandle | None = None
        self._requests = 0
        self._due_s = self._used_before_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the running loop during a request."""
        loop = asyncio.get_running_loop()
        self._requests += 1
        if self._timer is None:
            self._arm(loop)
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests and self._timer is not None:
                self._timer.cancel()
                self._timer = None
                if loop.time() > self._due_s:  # it was held until now
                    self._measure(loop)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return the same application, watched."""

        async def watched(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
            with self.watching():
                await app(scope, receive, send)

        return watched

    def record(self, late_s: float, used_s: float) -> None:
        """Record how late the timer was, and the processor time used since it was armed."""
        second = int(self._now_s())
        slot = second % REMEMBERED_S
        before, stall_s, held_s = self._slots[slot]
        if before != second:
            stall_s = held_s = 0.0
        self._slots[slot] = second, max(late_s, stall_s), max(min(late_s, used_s), held_s)

    @property
    def longest_s(self) -> float:
        """The longest stall of the last minute, in seconds."""
        return self._longest()[0]

    def snapshot(self) -> dict[str, float]:
        """Return, for a status, the last minute's longest stall, and its longest stall that code of
        this process caused."""
        stall_s, held_s = self._longest()
        return {"loop_stall_s": round(stall_s, 4), "loop_held_s": round(held_s, 4)}

    def _longest(self) -> tuple[float, float]:
        oldest = int(self._now_s()) - REMEMBERED_S
        recent = [each[1:] for each in self._slots if each[0] > oldest]
        return (
            max((stall_s for stall_s, _ in recent), default=0.0),
            max((held_s for _, held_s in recent), default=0.0),
        )

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_s, self._used_before_s = loop.time() + EVERY_S, self._used_s()
        self._timer = loop.call_at(self._due_s, self._on_timer, loop)

    def _on_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._measure(loop)
        self._arm(loop)

    def _measure(self, loop: asyncio.AbstractEventLoop) -> None:
        self.record(max(0.0, loop.time() - self._due_s), self._used_s() - self._used_before_s)
