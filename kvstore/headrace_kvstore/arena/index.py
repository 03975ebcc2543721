"""The arena's index: from (namespace id, block hash) to the slot that holds it, compiled.

Open addressing with linear probing over `Tables.buckets`, derived from the slot table. `lookup`
runs without the arena's lock: all its loops are bounded, it writes nothing shared, and each hit is
checked against the slot's own record; the caller notices a section in between and repeats. The
others run under the lock (see arena/kernels.py).
"""

from __future__ import annotations

import numpy as np

from headrace_kvstore.arena.geometry import Tables
from headrace_kvstore.blocks.slot_record import READY
from headrace_kvstore.numba_jit import jit

Int = int | np.int64

ABSENT = -1

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@jit()
def mix(namespace_id: int, key: np.ndarray) -> int:
    """Return 64 well-mixed bits of the key in its namespace. (vLLM's hashes are uniform, others
    need not be.)"""
    x = key[0] ^ (key[1] * np.uint64(0x9E3779B97F4A7C15))
    x ^= (key[2] * np.uint64(0xC2B2AE3D27D4EB4F)) ^ (key[3] * np.uint64(0x165667B19E3779F9))
    x = (x ^ (x >> np.uint64(29)) ^ np.uint64(namespace_id)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _HALF)) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@jit()
def find(t: Tables, namespace_id: int, key: np.ndarray) -> Int:
    """Return the slot that holds the key in any state, or ABSENT."""
    mask = t.buckets.size - 1
    tag = mix(namespace_id, key) >> _HALF
    at = np.int64(tag) & mask
    for _ in range(t.buckets.size):
        entry = t.buckets[at]
        if entry == 0:
            return ABSENT
        if entry >> _HALF == tag:
            slot = np.int64(entry & _LOW) - 1
            if slot < t.table.size:
                record = t.table[slot]
                stored = record.hash
                if (
                    record.namespace == namespace_id
                    and stored[0] == key[0]
                    and stored[1] == key[1]
                    and stored[2] == key[2]
                    and stored[3] == key[3]
                ):
                    return slot
        at = (at + 1) & mask
    return ABSENT


@jit()
def insert(t: Tables, slot: Int) -> None:
    mask = t.buckets.size - 1
    tag = mix(t.table[slot].namespace, t.table[slot].hash) >> _HALF
    at = np.int64(tag) & mask
    while t.buckets[at] != 0:
        at = (at + 1) & mask
    t.buckets[at] = (tag << _HALF) | np.uint64(slot + 1)


@jit()
def remove(t: Tables, slot: Int) -> None:
    """Remove the slot from the index, and move later entries forward into the gap."""
    mask = t.buckets.size - 1
    at = np.int64(mix(t.table[slot].namespace, t.table[slot].hash) >> _HALF) & mask
    for _ in range(t.buckets.size):
        if t.buckets[at] == 0:
            return
        if np.int64(t.buckets[at] & _LOW) == slot + 1:
            break
        at = (at + 1) & mask
    hole, at = at, (at + 1) & mask
    while t.buckets[at] != 0:
        home = np.int64(t.buckets[at] >> _HALF) & mask
        if (at - home) & mask >= (at - hole) & mask:
            t.buckets[hole] = t.buckets[at]
            hole = at
        at = (at + 1) & mask
    t.buckets[hole] = 0


@jit()
def lookup(t: Tables, namespace_id: int, keys: np.ndarray, slots: np.ndarray) -> None:
    """Set slots[i] to the READY slot of keys[i], or ABSENT. Runs without the lock."""
    for i in range(keys.shape[0]):
        slot = find(t, namespace_id, keys[i])
        if slot != ABSENT and t.table[slot].state != READY:
            slot = ABSENT
        slots[i] = slot
