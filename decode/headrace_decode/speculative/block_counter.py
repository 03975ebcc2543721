"""Counts the distinct KV blocks of a batch, from one step to the next.

A step reads only the changes: blocks that rows got, and rows that left. Its time is therefore
linear in the number of rows, and not in the number of blocks that they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockCounter:
    """The blocks that the rows of an engine's batch hold.

    Args:
        blocks: all block numbers are below this. Block 0 belongs to no row and never counts.

    Attributes:
        distinct: number of blocks that rows hold; shared ones count once.
        entries_read: number of entries of rows that were read so far.
    """

    def __init__(self, blocks: int) -> None:
        self._holders = np.zeros(blocks, np.int32)
        self._rows: dict[str, list[NDArray[np.integer]]] = {}
        self._lengths: dict[str, int] = {}
        self.distinct = self.entries_read = 0

    def update(
        self, names: Sequence[str], table: NDArray[np.integer], lengths: NDArray[np.integer]
    ) -> int:
        """Update the counts for the batch of a step; return `distinct`.

        Args:
            names: names of the rows' requests.
            table: int [rows or more, any], blocks of each row.
            lengths: int [rows], number of blocks of each row.
        """
        for name in self._rows.keys() - set(names):
            self._remove(name)
        for row, (name, length) in enumerate(zip(names, lengths.tolist(), strict=True)):
            known = self._lengths.get(name, 0)
            if known == length and not known:
                continue
            if known and (length < known or table[row, known - 1] != self._rows[name][-1][-1]):
                self._remove(name)  # the request was preempted, and has other blocks now
                known = 0
            if length > known:
                self._add(name, table[row, known:length].copy(), length)
        return self.distinct

    def _add(self, name: str, blocks: NDArray[np.integer], length: int) -> None:
        self._rows.setdefault(name, []).append(blocks)
        self._lengths[name] = length
        self.entries_read += len(blocks)
        held = blocks[blocks > 0]
        self.distinct += int(np.count_nonzero(self._holders[held] == 0))
        self._holders[held] += 1

    def _remove(self, name: str) -> None:
        del self._lengths[name]
        for blocks in self._rows.pop(name):
            self.entries_read += len(blocks)
            held = blocks[blocks > 0]
            self._holders[held] -= 1
            self.distinct -= int(np.count_nonzero(self._holders[held] == 0))
