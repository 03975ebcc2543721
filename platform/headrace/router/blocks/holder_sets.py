"""Sets of holders, each stored once: the blocks of a run of a prefix mostly have the same holders.

A set is a number. 0 is the empty set, 1 to `SINGLES` is the set of one slot (slot + 1), and a
higher number names a row of `bits`. Equal sets have equal numbers, so one comparison shows whether
two blocks have the same holders. A block with many holders takes no more memory than a block with
one. Rows count their blocks and are reused when no block is left.

All functions are compiled and take the index's arrays as one `Tables`. Without room for a new set,
they return `FULL`, and the caller decides what it drops. They are compiled without numba's
reference counts (`_nrt`), because counting all arrays at each call slowed a look-up from 30 ns to
270 ns. Therefore none of them may make an array.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.numba_jit import jit

Int = Any
"""A numba integer: int64, or uint64 for a word of bits."""
SINGLES = 1 << 16
"""Slots are below this."""
FULL = (1 << 32) - 1
EVERYONE = FULL - 1
"""The set of all slots; never stored at a node."""
OR, MINUS = 0, 1

NODE = np.dtype(
    [
        ("key", "u8"),
        ("usable", "u4"),  # set of the holders that have the block and all blocks before it
        ("orphan", "u4"),  # set of the other holders that have the block
        ("parent", "u4"),  # node of the block before it; 0: not known
        ("child", "u4"),  # node of one of the next blocks; 0: none
        ("before", "u4"),  # sibling
        ("next", "u4"),  # sibling; in a free node, the next free node
    ]
)
SET = np.dtype(
    [
        ("hash", "u8"),
        ("blocks", "u4"),  # number of nodes with this set; in a free row, the next free row
        ("size", "u4"),
    ]
)

# Indices into `state`.
SECRET, BLOCKS, NODES, FREE_NODE, SETS, ROWS, FREE_ROW, PAIRS, WORDS, DRAINED, DROPPED = range(11)
STATES = 11


class Tables(NamedTuple):
    """All arrays of a `BlockIndex`."""

    nodes: Any
    """NODE rows, an array. Row 1 is the root, the parent of all first blocks."""
    table: NDArray[np.uint64]
    """Open addressing: hash << 32 | node, 0 where empty. Its length is a power of two."""
    old: NDArray[np.uint64]
    """The earlier, smaller table, while its entries are still being moved."""
    sets: Any
    """SET rows, an array, from 1 on."""
    bits: NDArray[np.uint64]
    """[row, word]: a bit for each slot."""
    set_table: NDArray[np.uint32]
    """Open addressing by `holder_sets.hash`: row, 0 where empty."""
    scratch: NDArray[np.uint64]
    """[2, word]"""
    stack: NDArray[np.int64]
    """[2, 64] for `prefix_tree.match`."""
    state: NDArray[np.int64]
    """Counts: see the constants above."""


_ONE, _ZERO = np.uint64(1), np.uint64(0)
_M1, _M2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_HALF = np.uint64(32)


@jit(_nrt=False)
def mixed(word: Int, secret: Int) -> Int:
    """Return 64 bits that each depend on all of `word`; unpredictable without the secret."""
    x = (np.uint64(word) ^ np.uint64(secret)) * _M1
    x ^= x >> _HALF
    x *= _M2
    return x ^ (x >> _HALF)


@jit(_nrt=False)
def popcount(word: Int) -> Int:
    x = np.uint64(word)
    x -= (x >> _ONE) & np.uint64(0x5555555555555555)
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@jit(_nrt=False)
def word_of(t: Tables, one: Int, w: Int) -> Int:
    """Return word `w` of a set's bits."""
    if one == EVERYONE:
        return ~_ZERO
    if one > SINGLES:
        return t.bits[one - SINGLES, w]
    if one != 0 and (one - 1) >> 6 == w:
        return _ONE << np.uint64((one - 1) & 63)
    return _ZERO


@jit(_nrt=False)
def has(t: Tables, one: Int, slot: Int) -> bool:
    """Return whether a set contains a slot."""
    if one > SINGLES:
        return (t.bits[one - SINGLES, slot >> 6] >> np.uint64(slot & 63)) & _ONE != _ZERO
    return one == slot + 1


@jit(_nrt=False)
def size_of(t: Tables, one: Int) -> Int:
    if one > SINGLES:
        return np.int64(t.sets[one - SINGLES].size)
    return np.int64(1) if one != 0 else np.int64(0)


@jit(_nrt=False)
def intern(t: Tables, row: Int) -> Int:
    """Return the number of the set in a row of `scratch`; `FULL` if it is new and does not fit.

    A new set has no blocks yet.
    """
    words, size, digest = t.state[WORDS], 0, _ZERO
    last = 0
    for w in range(words):
        word = t.scratch[row, w]
        if word != _ZERO:
            size += popcount(word)
            digest += mixed(word ^ (np.uint64(w) * _M2), t.state[SECRET])
            last = w
    if size == 0:
        return np.int64(0)
    if size == 1:
        low = t.scratch[row, last] - _ONE
        return np.int64(last * 64 + popcount(low) + 1)
    mask = t.set_table.size - 1
    at = np.int64(digest & np.uint64(mask))
    while t.set_table[at] != 0:
        found = np.int64(t.set_table[at])
        if t.sets[found].hash == digest:
            same = True
            for w in range(words):
                if t.bits[found, w] != t.scratch[row, w]:
                    same = False
                    break
            if same:
                return found + SINGLES
        at = (at + 1) & mask
    fresh = t.state[FREE_ROW]
    if fresh != 0:
        t.state[FREE_ROW] = np.int64(t.sets[fresh].blocks)
    elif t.state[ROWS] < t.sets.size:
        fresh = t.state[ROWS]
        t.state[ROWS] += 1
    else:
        return np.int64(FULL)
    t.state[SETS] += 1
    t.set_table[at] = fresh
    t.sets[fresh].hash = digest
    t.sets[fresh].blocks = 0
    t.sets[fresh].size = size
    for w in range(words):
        t.bits[fresh, w] = t.scratch[row, w]
    return fresh + SINGLES


@jit(_nrt=False)
def combine(t: Tables, a: Int, b: Int, how: Int) -> Int:
    """Return the union of two sets, or `a` without `b`; `FULL` if it is new and does not fit."""
    if a == 0:
        return np.int64(b) if how == OR else np.int64(0)
    for w in range(t.state[WORDS]):
        if how == OR:
            t.scratch[0, w] = word_of(t, a, w) | word_of(t, b, w)
        else:
            t.scratch[0, w] = word_of(t, a, w) & ~word_of(t, b, w)
    return intern(t, 0)


@jit(_nrt=False)
def keep(t: Tables, one: Int) -> None:
    """Count one more block with this set."""
    if one > SINGLES:
        t.sets[one - SINGLES].blocks += np.uint32(1)


@jit(_nrt=False)
def drop(t: Tables, one: Int) -> None:
    """Count one block less with this set; free its row if no block is left."""
    if one <= SINGLES:
        return
    row = np.int64(one - SINGLES)
    t.sets[row].blocks -= np.uint32(1)
    if t.sets[row].blocks != 0:
        return
    mask = t.set_table.size - 1
    hole = np.int64(t.sets[row].hash & np.uint64(mask))
    while np.int64(t.set_table[hole]) != row:
        hole = (hole + 1) & mask
    at = hole
    while True:  # move up entries that the hole would hide, instead of leaving a tombstone
        at = (at + 1) & mask
        other = np.int64(t.set_table[at])
        if other == 0:
            break
        home = np.int64(t.sets[other].hash & np.uint64(mask))
        if ((at - home) & mask) >= ((at - hole) & mask):
            t.set_table[hole] = other
            hole = at
    t.set_table[hole] = 0
    t.sets[row].blocks = t.state[FREE_ROW]
    t.state[FREE_ROW] = row
    t.state[SETS] -= 1


@jit(_nrt=False)
def put_usable(t: Tables, node: Int, one: Int) -> None:
    """Replace a node's set of holders that can use it."""
    before = np.int64(t.nodes[node].usable)
    keep(t, one)
    t.state[PAIRS] += size_of(t, one) - size_of(t, before)
    t.nodes[node].usable = one
    drop(t, before)


@jit(_nrt=False)
def put_orphan(t: Tables, node: Int, one: Int) -> None:
    """Replace a node's set of holders that have it after a hole."""
    before = np.int64(t.nodes[node].orphan)
    keep(t, one)
    t.state[PAIRS] += size_of(t, one) - size_of(t, before)
    t.nodes[node].orphan = one
    drop(t, before)
