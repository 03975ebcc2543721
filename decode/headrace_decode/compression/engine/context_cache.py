"""Index of the retained KV in an engine's cache that a later prompt can continue from.

Whenever an incrementally compressed context drops KV, the retained KV stands for all of its tokens
so far. It is indexed under the hash of the last block of these tokens, which covers all blocks
before, the share and the tenant (vLLM's prefix hashes, with the cache salt). A later prompt that
begins with the same tokens continues from there: a conversation's next turn, or another question
about the same text.

No memory is reserved for it: its blocks may be free. When other requests take any of them, the
entry is evicted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

MIN_SHARE = 0.75
"""Minimum share of a prompt's full blocks that cached KV must stand for. It was chosen within
the budget of a shorter prompt. Answers erred 1.5 times as much as with a prompt that was computed
from the beginning when it stood for 0.6 of the prompt, and 1.1 times as much at 0.8
(docs/compression.md)."""


def min_blocks(hashes: Sequence[bytes]) -> int:
    """Return the minimum number of a prompt's first blocks that retained KV must stand for."""
    return max(1, math.ceil(MIN_SHARE * len(hashes)))


class CachedContext(NamedTuple):
    """Entry of the index.

    Attributes:
        number: unique number, which is never used again.
        held: number of blocks that it is kept in.
    """

    number: int
    held: int


class ContextCache:
    """Retained KV in an engine's cache, by hash of its context.

    Args:
        has_slots: (number, held) -> whether the blocks still hold it.
    """

    def __init__(self, has_slots: Callable[[int, int], bool]) -> None:
        self._has_slots = has_slots
        self._kept: dict[bytes, CachedContext] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, key: bytes, held: int) -> CachedContext | None:
        """Add KV that is kept in `held` blocks. Return None if this hash has an entry whose
        blocks are still there."""
        if key in self._kept and self._has_slots(*self._kept[key]):
            return None
        self._numbers += 1
        self._kept[key] = CachedContext(self._numbers, held)
        return self._kept[key]

    def longest(self, hashes: Sequence[bytes], most: int) -> tuple[int, CachedContext] | None:
        """Return the entry for the most first blocks of a prompt, after their number; None if there
        is no entry.

        Args:
            hashes: hashes of the prompt's full blocks. most: maximum number of first blocks.
        """
        for blocks in range(min(most, len(hashes)), min_blocks(hashes) - 1, -1):
            kept = self._kept.get(hashes[blocks - 1])
            if kept is not None and self._has_slots(*kept):
                return blocks, kept
        return None

    def clear(self) -> set[int]:
        """Evict all entries, and return their numbers."""
        numbers = {kept.number for kept in self._kept.values()}
        self._kept = {}
        return numbers

    def evict(self, numbers: Collection[int | None] = ()) -> set[int]:
        """Evict the entries with these numbers, and those whose blocks were taken. Return the
        numbers of all of them."""
        gone = {
            key: kept.number
            for key, kept in self._kept.items()
            if kept.number in numbers or not self._has_slots(*kept)
        }
        for key in gone:
            del self._kept[key]
        return set(gone.values())
