"""Blocks on their way from objects into memory.

Each block comes with one request, and the answer lands in memory of its own. From there it is
copied to its destination in the same pass that computes its checksums. So a caller may give up at
any time: what comes later never touches the caller's memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from headrace_kvstore.objects.object_catalog import Held
from headrace_kvstore.objects.object_format import unpack


class ObjectRead:
    """A `staging.sources.Fill`.

    Args:
        objects: of one shape.
        addresses: u64 (blocks, layers), where each layer goes.
        deadline_s: monotonic seconds at which the tier gives it up.

    Attributes:
        sums: u64 (blocks, layers), of those that are right.
    """

    def __init__(self, objects: Sequence[Held], addresses: np.ndarray, deadline_s: float) -> None:
        self.objects = list(objects)
        self.deadline_s = deadline_s
        self._addresses = np.ascontiguousarray(addresses, np.uint64)
        self.sums = np.zeros(self._addresses.shape, np.uint64)
        self._ok = np.zeros(len(self.objects), np.bool_)
        self._changed = threading.Condition()
        self._missing = len(self.objects)
        self._calls: list[Callable[[], None]] = []

    def copy(self, block: int, data: memoryview) -> bool | None:
        """Copy a block's bytes to where they are wanted; whether they are right, None if they are
        not wanted any more."""
        with self._changed:
            if self.done():
                return None
            name = self.objects[block].name
            sums = unpack(name.shape, name.hash, data, self._addresses[block])
            if sums is not None:
                self._ok[block], self.sums[block] = True, sums
            return sums is not None

    def settle(self) -> None:
        """A block has come, or will not; to be called once for each."""
        with self._changed:
            self._missing -= 1
        self._tell()

    def done(self) -> bool:
        """The memory is nobody's but the caller's again."""
        return self._missing <= 0

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this, on any thread, once `done`; at once if it is."""
        with self._changed:
            self._calls.append(call)
        self._tell()

    def call_off(self) -> None:
        """Do without what has not come; all blocks count as not there."""
        with self._changed:
            if not self.done():
                self._missing = 0
                self._ok[:] = False
        self._tell()

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        """Which blocks are in memory whole and proven right: bool (blocks,).

        Raises TimeoutError while bytes may still arrive.
        """
        with self._changed:
            if not self._changed.wait_for(self.done, timeout_s):
                raise TimeoutError("blocks are still on their way")
            return self._ok.copy()

    def _tell(self) -> None:
        with self._changed:
            if not self.done():
                return
            self._changed.notify_all()
            calls, self._calls = self._calls, []
        for call in calls:
            call()
