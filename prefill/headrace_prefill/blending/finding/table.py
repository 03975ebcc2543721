"""A hash table of fixed size with the latest places of each hash; it overwrites the oldest ones.

A bucket has `SLOTS` slots. Each slot has a fingerprint (32 bits of the hash) and a place, an ever
growing number. Places below `tail` are expired. A hash keeps its `CANDIDATES` latest places; a full
bucket overwrites its oldest one. Fingerprints may collide, so the caller must compare the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_kvstore.numba_jit import jit

SLOTS = 16
CANDIDATES = 4


class Table(NamedTuple):
    """Arrays [buckets, SLOTS]; a place of -1 is empty."""

    fingerprints: NDArray[np.uint32]
    places: NDArray[np.int64]

    @staticmethod
    def of(alive: int) -> Table:
        """Return a table for `alive` hashes at a time; 1.5 times as many would overflow some
        buckets."""
        buckets = 1 << max(0, (2 * alive // SLOTS).bit_length())
        shape = buckets, SLOTS
        return Table(np.zeros(shape, np.uint32), np.full(shape, -1, np.int64))


@jit(nogil=True)
def put(table, hashes, places, tail):  # type: ignore[no-untyped-def]
    """Add the places of hashes: uint64 [n], int64 [n] ascending and all new."""
    mask = np.uint64(len(table.places) - 1)
    for n in range(len(hashes)):
        bucket = np.int64((hashes[n] >> np.uint64(32)) & mask)
        mark = np.uint32(hashes[n] & np.uint64(0xFFFFFFFF))
        same, oldest_same, oldest = 0, 0, 0
        for slot in range(SLOTS):
            if table.places[bucket, slot] < table.places[bucket, oldest]:
                oldest = slot
            if table.fingerprints[bucket, slot] == mark and table.places[bucket, slot] >= tail:
                if same == 0 or table.places[bucket, slot] < table.places[bucket, oldest_same]:
                    oldest_same = slot
                same += 1
        slot = oldest_same if same >= CANDIDATES else oldest
        table.fingerprints[bucket, slot] = mark
        table.places[bucket, slot] = places[n]


@jit(nogil=True)
def get(table, hashed, tail, found):  # type: ignore[no-untyped-def]
    """Write a hash's places, latest first, to int64 [CANDIDATES] and return their number."""
    bucket = np.int64((hashed >> np.uint64(32)) & np.uint64(len(table.places) - 1))
    mark = np.uint32(hashed & np.uint64(0xFFFFFFFF))
    count = 0
    for slot in range(SLOTS):
        place = table.places[bucket, slot]
        if table.fingerprints[bucket, slot] != mark or place < max(tail, 0):
            continue
        at = min(count, CANDIDATES)
        while at > 0 and found[at - 1] < place:
            if at < CANDIDATES:
                found[at] = found[at - 1]
            at -= 1
        if at < CANDIDATES:
            found[at] = place
        count = min(count + 1, CANDIDATES)
    return count
