"""Which streamed contexts of an engine a later prompt can go on from.

Whenever a streamed context drops, what is held from then on stands for all of its tokens up to
there. It is remembered by the hash of the last block of these tokens, which stands for all blocks
before as well, for the share and for the tenant (vLLM's prefix hashes, with the cache salt). A
later prompt that begins with the same tokens goes on from there: a conversation's next turn, or
another question about the same text.

Nothing is held for it: its blocks may be free. Whoever needs them takes them, and then it is
forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

LEAST_SHARE = 0.75
"""Of a prompt's full blocks, that what is remembered stands for. It was chosen with the room that a
shorter prompt had: answers erred 1.5 times as much as over a prompt that was computed anew where it
stood for 0.6 of it, and 1.1 times at 0.8 (docs/bounded.md)."""


def least_of(hashes: Sequence[bytes]) -> int:
    """First blocks of a prompt, at least, that what it begins with stands for."""
    return max(1, math.ceil(LEAST_SHARE * len(hashes)))


class Kept(NamedTuple):
    """What was remembered once.

    Attributes:
        number: its own; none is used twice.
        held: blocks that it is kept in.
    """

    number: int
    held: int


class Remembered:
    """All that an engine remembers.

    Args:
        is_there: (number, held) -> whether the blocks still hold it.
    """

    def __init__(self, is_there: Callable[[int, int], bool]) -> None:
        self._is_there = is_there
        self._kept: dict[bytes, Kept] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, key: bytes, held: int) -> Kept | None:
        """Remember what is kept in so many blocks; None if as much is remembered by this hash."""
        if key in self._kept and self._is_there(*self._kept[key]):
            return None
        self._numbers += 1
        self._kept[key] = Kept(self._numbers, held)
        return self._kept[key]

    def longest(self, hashes: Sequence[bytes], most: int) -> tuple[int, Kept] | None:
        """How many first blocks of a prompt are remembered, and as what.

        Args:
            hashes: of the prompt's full blocks. most: of these, that it may be.
        """
        for blocks in range(min(most, len(hashes)), least_of(hashes) - 1, -1):
            kept = self._kept.get(hashes[blocks - 1])
            if kept is not None and self._is_there(*kept):
                return blocks, kept
        return None

    def clear(self) -> set[int]:
        """Forget all; returns the numbers."""
        numbers = {kept.number for kept in self._kept.values()}
        self._kept = {}
        return numbers

    def forget(self, numbers: Collection[int | None] = ()) -> set[int]:
        """Forget these, and what is not there any more; the numbers of all of them."""
        gone = {
            key: kept.number
            for key, kept in self._kept.items()
            if kept.number in numbers or not self._is_there(*kept)
        }
        for key in gone:
            del self._kept[key]
        return set(gone.values())
