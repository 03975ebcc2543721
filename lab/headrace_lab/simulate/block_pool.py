"""KV blocks of each holder: an engine's KV cache, or the KV store of a node.

They behave as in vLLM's pool. A block in use has references. A full block of a prompt has a key,
and stays without references until its slot is needed: the least recently used block is evicted
first. A request's blocks are released from its last to its first, so that the ends of chains are
evicted first. All other blocks in use (not full, of answers, being computed) are only counted.

Pure: NumPy and numba. All holders share flat arrays, so that compiled code can reach them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.numba_jit import jit

inner = jit(no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)
"""Decorator for functions that only compiled code calls.

They have no entry from Python, and no numba reference counts of the state's arrays at each call,
since both compile slowly. Therefore no such function may make an array.
"""

_SPREAD = np.int64(0x1E3779B97F4A7C15)  # odd: neighbouring keys go to cells far apart


HOLDER = np.dtype(
    [
        ("first", "i8"),  # its first slot; its last one is before the next holder's first
        ("cells", "i8"),  # first cell of its hash table; the number of cells is a power of two
        ("held", "i8"),  # blocks with a key
        ("idle", "i8"),  # blocks with a key and without references
        ("plain", "i8"),  # blocks in use without a key
        ("oldest", "i4"),  # ends of the list of slots without references
        ("newest", "i4"),
    ],
    align=True,
)
SLOT = np.dtype(
    [("key", "i8"), ("refs", "i4"), ("older", "i4"), ("newer", "i4")],
    align=True,
)


class Caches(NamedTuple):
    """Slots of all holders, one holder after the other.

    Attributes:
        of: HOLDER [holders + 1]; the last one only marks the end of the others.
        slot: SLOT [slots]. older, newer: neighbours among slots without references, -1 at the ends.
        free: numbers of slots; holder h's entries from its first + held on are free slots.
        table: a cell holds a slot's number + 1, or 0.
    """

    of: NDArray[np.void]
    slot: NDArray[np.void]
    free: NDArray[np.int32]
    table: NDArray[np.int32]


def new_caches(capacities: Sequence[int]) -> Caches:
    """Return empty holders with these capacities in blocks."""
    of = np.zeros(len(capacities) + 1, HOLDER)
    of["first"][1:] = np.cumsum(capacities)
    of["cells"][1:] = np.cumsum([1 << max(2, (2 * size - 1).bit_length()) for size in capacities])
    of["oldest"] = of["newest"] = -1
    slot = np.zeros(int(of["first"][-1]), SLOT)
    slot["key"] = slot["older"] = slot["newer"] = -1
    free = np.arange(len(slot), dtype=np.int32)
    return Caches(of, slot, free, np.zeros(int(of["cells"][-1]), np.int32))


@inner
def _home(c: Caches, h: int, key: int) -> int:
    mixed = key * _SPREAD
    return (mixed ^ (mixed >> 32)) & (c.of[h + 1].cells - c.of[h].cells - 1)


@inner
def find(c: Caches, h: int, key: int) -> int:
    """Return the slot of a block, or -1."""
    first, mask = c.of[h].cells, c.of[h + 1].cells - c.of[h].cells - 1
    at = _home(c, h, key)
    while True:
        slot = c.table[first + at] - 1
        if slot < 0:
            return -1
        if c.slot[slot].key == key:
            return slot
        at = (at + 1) & mask


@inner
def room(c: Caches, h: int) -> int:
    """Return how many blocks can be taken now: free ones, and ones without references."""
    return c.of[h + 1].first - c.of[h].first - c.of[h].held - c.of[h].plain + c.of[h].idle


@inner
def _unlink(c: Caches, h: int, slot: int) -> None:
    older, newer = c.slot[slot].older, c.slot[slot].newer
    if older >= 0:
        c.slot[older].newer = newer
    else:
        c.of[h].oldest = newer
    if newer >= 0:
        c.slot[newer].older = older
    else:
        c.of[h].newest = older
    c.of[h].idle -= 1


@inner
def _link_newest(c: Caches, h: int, slot: int) -> None:
    last = c.of[h].newest
    c.slot[slot].older, c.slot[slot].newer = last, -1
    if last >= 0:
        c.slot[last].newer = slot
    else:
        c.of[h].oldest = slot
    c.of[h].newest = slot
    c.of[h].idle += 1


@inner
def use(c: Caches, h: int, slot: int) -> None:
    """Add a reference to a block."""
    if c.slot[slot].refs == 0:
        _unlink(c, h, slot)
    c.slot[slot].refs += 1


@inner
def release(c: Caches, h: int, slot: int) -> None:
    """Remove a reference; a block without references becomes the most recently used such block."""
    c.slot[slot].refs -= 1
    if c.slot[slot].refs == 0:
        _link_newest(c, h, slot)


@inner
def touch(c: Caches, h: int, slot: int) -> None:
    """Make a block the most recently used one, if it has no references."""
    if c.slot[slot].refs == 0:
        _unlink(c, h, slot)
        _link_newest(c, h, slot)


@inner
def add(c: Caches, h: int, key: int, refs: int) -> int:
    """Add a block with `refs` references, and return its slot.

    The caller ensures that a slot is free, and that the holder lacks the block.
    """
    slot = c.free[c.of[h].first + c.of[h].held]
    c.of[h].held += 1
    c.slot[slot].key, c.slot[slot].refs = key, refs
    first, mask = c.of[h].cells, c.of[h + 1].cells - c.of[h].cells - 1
    at = _home(c, h, key)
    while c.table[first + at] != 0:
        at = (at + 1) & mask
    c.table[first + at] = slot + 1
    if refs == 0:
        _link_newest(c, h, slot)
    return slot


@inner
def drop(c: Caches, h: int, slot: int) -> None:
    """Remove a block without references."""
    _unlink(c, h, slot)
    first, mask = c.of[h].cells, c.of[h + 1].cells - c.of[h].cells - 1
    at = _home(c, h, c.slot[slot].key)
    while c.table[first + at] != slot + 1:
        at = (at + 1) & mask
    # Close the gap: move back entries that a search would not find after an empty cell.
    hole, ahead = at, (at + 1) & mask
    while c.table[first + ahead] != 0:
        home = _home(c, h, c.slot[c.table[first + ahead] - 1].key)
        if ((ahead - home) & mask) >= ((ahead - hole) & mask):
            c.table[first + hole] = c.table[first + ahead]
            hole = ahead
        ahead = (ahead + 1) & mask
    c.table[first + hole] = 0
    c.slot[slot].key = -1
    c.of[h].held -= 1
    c.free[c.of[h].first + c.of[h].held] = slot


@inner
def evict(c: Caches, h: int) -> int:
    """Remove the least recently used unused block; return its key, or -1 if there is none."""
    slot = c.of[h].oldest
    if slot < 0:
        return -1
    key = c.slot[slot].key
    drop(c, h, slot)
    return key


@inner
def clear(c: Caches, h: int) -> None:
    """Remove all blocks of a holder, in use or not."""
    first, last = c.of[h].first, c.of[h + 1].first
    c.table[c.of[h].cells : c.of[h + 1].cells] = 0
    c.of[h].oldest = c.of[h].newest = -1
    c.of[h].held = c.of[h].idle = c.of[h].plain = 0
    for slot in range(first, last):
        c.free[slot] = slot
        c.slot[slot].key, c.slot[slot].refs = -1, 0
