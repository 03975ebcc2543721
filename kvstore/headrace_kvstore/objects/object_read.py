"""Blocks on their way from an object store into memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

import numpy as np

from headrace_kvstore.objects.object_catalog import StoredObject
from headrace_kvstore.objects.object_format import unpack


class ObjectRead:
    """Blocks on their way from objects into memory: a `staging.sources.PendingRead`.

    One request fetches each block, and the answer lands in memory of its own. The thread that waits
    for the read copies it to its destination, in the same pass that computes its checksums. So a
    caller may give up at any time: a late answer never touches the caller's memory.

    Args:
        objects: of one shape.
        addresses: u64 (blocks, layers), where each layer goes.
        sums: u64 (layers,) a block: filled in for blocks that are right.
        deadline_s: monotonic time at which missing blocks are given up.
        on_result: called with each block that arrived, and whether it is right.
    """

    def __init__(
        self,
        objects: Sequence[StoredObject],
        addresses: np.ndarray,
        sums: Sequence[np.ndarray],
        deadline_s: float,
        on_result: Callable[[StoredObject, bool], None],
    ) -> None:
        self.objects, self._sums = list(objects), sums
        self._addresses = np.ascontiguousarray(addresses, np.uint64)
        self._deadline_s, self._on_result = deadline_s, on_result
        self._answers: list[Future[memoryview | None]] = [Future() for _ in objects]
        self.aborted = False

    def answer(self, block: int, data: memoryview | None) -> None:
        """Take a block's bytes, or None if it will not arrive."""
        with suppress(InvalidStateError):  # it was given up
            self._answers[block].set_result(data)

    def abort(self) -> None:
        """Give the read up; all its blocks count as missing."""
        self.aborted = True
        for block in range(len(self._answers)):
            self.answer(block, None)

    def wait(self) -> np.ndarray:
        """Return, for each block, whether it is in memory, whole and verified: bool (blocks,)."""
        good = np.zeros(len(self.objects), np.bool_)
        for block, answer in enumerate(self._answers):
            try:
                data = answer.result(max(0.0, self._deadline_s - time.monotonic()))
            except TimeoutError:
                self.abort()
            if self.aborted:
                return np.zeros_like(good)
            if data is not None:
                good[block] = self._copy(block, data)
                self._on_result(self.objects[block], bool(good[block]))
        return good

    def _copy(self, block: int, data: memoryview) -> bool:
        name = self.objects[block].name
        sums = unpack(name.shape, name.hash, data, self._addresses[block])
        if sums is not None:
            self._sums[block][:] = sums
        return sums is not None
