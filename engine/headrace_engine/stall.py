"""How long an event loop was held: the longest time in the last minute that nothing else could run.

A timer is due every `EVERY_S`. How late it fires is how long something else held the loop, or how
long the process got no processor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

EVERY_S = 0.025
REMEMBERED_S = 60


class LoopStall:
    """Watches the loop that it is started in.

    Args:
        now_s: a monotonic clock.
    """

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._slots = [(-1, 0.0)] * REMEMBERED_S
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Watch the running loop from now on. Idempotent."""
        if self._timer is None:
            self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def saw(self, late_s: float) -> None:
        """Note that the timer was this late."""
        second = int(self._now_s())
        slot = second % REMEMBERED_S
        before, longest_s = self._slots[slot]
        self._slots[slot] = second, max(late_s, longest_s if before == second else 0.0)

    @property
    def longest_s(self) -> float:
        """The longest stall of the last minute, in seconds."""
        oldest = int(self._now_s()) - REMEMBERED_S
        return max(late_s for second, late_s in self._slots if second > oldest or second < 0)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(EVERY_S, self._fired, loop, loop.time() + EVERY_S)

    def _fired(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self.saw(max(0.0, loop.time() - due_s))
        self._arm(loop)
