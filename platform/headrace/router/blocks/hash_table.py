"""Hash table from a block's key to its node: open addressing without tombstones.

The table grows a few entries at a call. While it grows, a key that the new table lacks is looked up
in the old one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.router.blocks.holder_sets import DRAINED, SECRET, Int, Tables, mixed
from headrace_kvstore.numba_jit import jit

_HALF, _LOW, _ZERO = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(0)


@jit(_nrt=False)
def position_of(t: Tables, table: NDArray[np.uint64], key: Int, tag: Int) -> Int:
    """Return the position of a key's entry in a table; -1 if it has none."""
    mask = table.size - 1
    at = np.int64(tag) & mask
    while table[at] != _ZERO:
        if table[at] >> _HALF == tag and t.nodes[np.int64(table[at] & _LOW)].key == key:
            return at
        at = (at + 1) & mask
    return np.int64(-1)


@jit(_nrt=False)
def find(t: Tables, key: Int) -> Int:
    """Return the node of a key; 0 if there is none."""
    tag = mixed(key, t.state[SECRET]) & _LOW
    at = position_of(t, t.table, key, tag)
    if at >= 0:
        return np.int64(t.table[at] & _LOW)
    if t.old.size > 1:
        at = position_of(t, t.old, key, tag)
        if at >= 0:
            return np.int64(t.old[at] & _LOW)
    return np.int64(0)


@jit(_nrt=False)
def enter(t: Tables, node: Int) -> None:
    tag = mixed(t.nodes[node].key, t.state[SECRET]) & _LOW
    mask = t.table.size - 1
    at = np.int64(tag) & mask
    while t.table[at] != _ZERO:
        at = (at + 1) & mask
    t.table[at] = (tag << _HALF) | np.uint64(node)


@jit(_nrt=False)
def erase(t: Tables, node: Int) -> None:
    """Remove a node from the table.

    Its entry in the old table stays and is never found, since a free node has another key.
    """
    key = t.nodes[node].key
    hole = position_of(t, t.table, key, mixed(key, t.state[SECRET]) & _LOW)
    t.nodes[node].key = ~key
    if hole < 0:
        return
    mask = t.table.size - 1
    at = hole
    while True:  # as in `holder_sets.drop`: move entries up instead of leaving a tombstone
        at = (at + 1) & mask
        if t.table[at] == _ZERO:
            break
        home = np.int64(t.table[at] >> _HALF) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            t.table[hole] = t.table[at]
            hole = at
    t.table[hole] = _ZERO


@jit(_nrt=False)
def drain(t: Tables, slots: Int) -> bool:
    """Move a number of the old table's slots to the new one; return whether all are moved."""
    end = min(t.old.size, t.state[DRAINED] + slots)
    for at in range(t.state[DRAINED], end):
        entry = t.old[at]
        if entry == _ZERO:
            continue
        node = np.int64(entry & _LOW)
        key = t.nodes[node].key
        tag = mixed(key, t.state[SECRET]) & _LOW
        live = (t.nodes[node].usable | t.nodes[node].orphan) != 0
        if live and tag == entry >> _HALF and position_of(t, t.table, key, tag) < 0:
            enter(t, node)
    t.state[DRAINED] = end
    return end == t.old.size
