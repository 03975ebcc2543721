"""How long an event loop was held: the longest time in the last minute that nothing else could run.

A timer is due every `EVERY_S`. How late it fires is how long something else held the loop, or how
long the process got no processor. The two are told apart by the processor time that the process
used meanwhile: code that holds the loop uses some, in its own thread or in one that holds the
interpreter's lock.
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
        used_s: processor time that the process has used.
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

    def start(self) -> None:
        """Watch the running loop from now on. Idempotent."""
        if self._timer is None:
            self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def saw(self, late_s: float, used_s: float) -> None:
        """Note that the timer was this late, and the processor time since it was armed."""
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
        """For a status: the longest stall of the last minute, and the most that code of this
        process was the cause of."""
        stall_s, held_s = self._longest()
        return {"loop_stall_s": round(stall_s, 4), "loop_held_s": round(held_s, 4)}

    def _longest(self) -> tuple[float, float]:
        oldest = int(self._now_s()) - REMEMBERED_S
        recent = [each[1:] for each in self._slots if each[0] > oldest or each[0] < 0]
        return max(stall_s for stall_s, _ in recent), max(held_s for _, held_s in recent)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = loop.time() + EVERY_S
        self._timer = loop.call_later(EVERY_S, self._fired, loop, due_s, self._used_s())

    def _fired(self, loop: asyncio.AbstractEventLoop, due_s: float, used_s: float) -> None:
        self.saw(max(0.0, loop.time() - due_s), self._used_s() - used_s)
        self._arm(loop)
