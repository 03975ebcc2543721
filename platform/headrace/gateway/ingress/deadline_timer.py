"""A timer whose time is set again with every request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class DeadlineTimer:
    """One deadline. A later one than that of the running timer needs no new timer.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._until_s: float | None = None
        self._on_late: Callable[[], None] = lambda: None

    def set(self, seconds: float, on_late: Callable[[], None]) -> None:
        """Call `on_late` in `seconds`, in place of the earlier deadline."""
        self._until_s, self._on_late = self._loop.time() + seconds, on_late
        if self._timer is None or self._timer_s > self._until_s:
            if self._timer is not None:
                self._timer.cancel()
            self._start(self._until_s)

    def clear(self) -> None:
        """Remove the deadline. The timer continues, for the next deadline."""
        self._until_s = None

    def close(self) -> None:
        """Stop the timer."""
        self._until_s = None
        if self._timer is not None:
            self._timer.cancel()

    def _start(self, at_s: float) -> None:
        self._timer_s = at_s
        self._timer = self._loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._until_s is None:
            return
        if self._until_s > self._timer_s:
            self._start(self._until_s)
        else:
            self._until_s = None
            self._on_late()
