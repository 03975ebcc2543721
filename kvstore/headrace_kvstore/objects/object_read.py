"""Blocks on their way from objects into memory.

Each block comes with one request, and the answer lands in memory of its own. From there it is
copied to its destination in the same pass that computes its checksums. So a caller may give up at
any time: a block that has not begun to be copied never touches the caller's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from headrace_kvstore.objects.object_catalog import Held


class ObjectRead:
    """A `staging.sources.Fill`. Blocks are settled by the tier's workers, or given up.

    Args:
        objects: of one shape.
        addresses: u64 (blocks, layers), where each layer goes.
        deadline_s: monotonic seconds at which the tier gives it up.

    Attributes:
        sums: u64 (blocks, layers), of those that are right.
    """

    def __init__(self, objects: Sequence[Held], addresses: np.ndarray, deadline_s: float) -> None:
        self.objects = list(objects)
        self.addresses = np.ascontiguousarray(addresses, np.uint64)
        self.deadline_s = deadline_s
        self.sums = np.zeros(self.addresses.shape, np.uint64)
        self._ok = np.zeros(len(self.objects), np.bool_)
        self._changed = threading.Condition()
        self._open, self._copying = len(self.objects), 0
        self._given_up = False
        self._calls: list[Callable[[], None]] = []

    def begin_copy(self) -> bool:
        """A block's bytes are here; False if nobody wants them any more."""
        with self._changed:
            if not self._given_up:
                self._copying += 1
            return not self._given_up

    def settle(self, block: int, sums: np.ndarray | None, copied: bool) -> None:
        """A block is over: the sums that it matches, or None."""
        with self._changed:
            if copied:
                self._copying -= 1
                if sums is not None and not self._given_up:
                    self._ok[block], self.sums[block] = True, sums
            self._open -= 1
            calls = self._take_calls()
        for call in calls:
            call()

    def _take_calls(self) -> list[Callable[[], None]]:
        if not self._over:
            return []
        self._changed.notify_all()
        calls, self._calls = self._calls, []
        return calls

    @property
    def _over(self) -> bool:
        return not self._copying and (self._given_up or not self._open)

    @property
    def given_up(self) -> bool:
        """Requests that have not begun need not begin."""
        return self._given_up

    def done(self) -> bool:
        """The memory is nobody's but the caller's again."""
        with self._changed:
            return self._over

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this, on any thread, once `done`; at once if it is."""
        with self._changed:
            if not self._over:
                self._calls.append(call)
                return
        call()

    def call_off(self) -> None:
        """Do without what has not come; all blocks count as not there."""
        with self._changed:
            self._given_up = True
            self._ok[:] = False
            calls = self._take_calls()
        for call in calls:
            call()

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        """Which blocks are in memory whole and proven right: bool (blocks,).

        Raises TimeoutError while bytes may still arrive.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, timeout_s):
                raise TimeoutError("blocks are still on their way")
            return self._ok.copy()
