"""The allocator of a memory's single array."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray


class Arena:
    """Allocator of the words of one int32 array: best fit, freed neighbours are joined.

    The array is the memory's whole capacity, so the capacity cannot be exceeded. Physical pages are
    used only where data is written.
    """

    def __init__(self, words: int) -> None:
        self.words: NDArray[np.int32] = np.zeros(words, np.int32)
        self.free_words = words
        self._free = [(0, words)]  # (offset, length), by offset, no two of them adjacent

    def largest_free_run(self, offset: int, words: int) -> int:
        """Return the length of the longest free run if this run were freed."""
        start, end = offset, offset + words
        for run, length in self._free:
            if run + length == offset:
                start = run
            if run == offset + words:
                end = run + length
        return max([end - start, *(length for _, length in self._free)])

    def allocate(self, words: int) -> int | None:
        """Allocate a run, whose content is arbitrary.

        Return its offset; None if no free run is that long.
        """
        fitting = [(length, offset) for offset, length in self._free if length >= words]
        if not fitting:
            return None
        length, offset = min(fitting)
        self.free_words -= words
        at = self._free.index((offset, length))
        self._free[at : at + 1] = [(offset + words, length - words)] if length > words else []
        return offset

    def free(self, offset: int, words: int) -> None:
        """Free a whole run that was allocated."""
        self.free_words += words
        at = bisect_left(self._free, (offset, 0))
        first, last = at, at
        start, end = offset, offset + words
        if at > 0 and sum(self._free[at - 1]) == offset:
            first, start = at - 1, self._free[at - 1][0]
        if at < len(self._free) and self._free[at][0] == end:
            last, end = at + 1, sum(self._free[at])
        self._free[first:last] = [(start, end - start)]
