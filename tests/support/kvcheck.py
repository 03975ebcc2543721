"""Whether an arena's tables agree with each other."""

from __future__ import annotations

import numpy as np

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.geometry import NAMESPACE_COUNT, NONE, Tables
from headrace_kvstore.blocks.slot_record import FREE, READY, WRITING


def broken(arena: Arena) -> list[str]:
    """The invariants of an arena that do not hold, in words; empty if all is well.

    1. A slot that is not FREE has a registered namespace, lies in a segment that this namespace
       holds, and within what the segment can hold.
    2. No two such slots have the same key.
    3. The index leads to each such slot and to nothing else.
    4. A segment's count is that of its slots that are not FREE; it is held iff that is not 0.
    5. A held segment's free chain runs through each of its FREE slots once.
    6. FREE slots are neither kept nor count any bytes.
    """
    with arena.section:
        return _broken(arena.tables, arena._per_segment)


def _broken(t: Tables, per_segment: int) -> list[str]:
    wrong: list[str] = []
    namespaces = int(t.words[NAMESPACE_COUNT])
    state = t.table["state"]
    taken = np.flatnonzero(state != FREE)
    if not np.isin(state, (FREE, WRITING, READY)).all():
        wrong.append("a slot has no such state")
    free = t.table[state == FREE]
    if free["kept_until_s"].any() or free["bytes"].any():
        wrong.append("a FREE slot is kept or counts bytes")

    keys = {(int(record["namespace"]), record["hash"].tobytes()) for record in t.table[taken]}
    if len(keys) != len(taken):
        wrong.append("two slots hold the same key")
    indexed = np.sort((t.buckets[t.buckets != 0] & np.uint64(0xFFFFFFFF)).astype(np.int64) - 1)
    if not np.array_equal(indexed, taken):
        wrong.append("the index names other slots than those taken")
    wrong += _unreachable(t)

    for number, segment in enumerate(t.segments):
        first = number * per_segment
        its = taken[(taken >= first) & (taken < first + per_segment)]
        if segment["used"] != len(its) or (segment["namespace"] == NONE) != (len(its) == 0):
            wrong.append(f"segment {number} counts {segment['used']} slots, has {len(its)}")
        if segment["namespace"] == NONE:
            continue
        if segment["namespace"] >= namespaces:
            wrong.append(f"segment {number} belongs to no namespace")
            continue
        if np.any(t.table["namespace"][its] != segment["namespace"]):
            wrong.append(f"segment {number} holds blocks of another namespace")
        slot_bytes = int(t.namespaces["slot_bytes"][segment["namespace"]])
        capacity = min(per_segment, int(segment["bytes"]) // slot_bytes)
        if len(its) and its.max() >= first + capacity:
            wrong.append(f"segment {number} holds a slot beyond its end")
        chain: list[int] = []
        at = int(segment["free"])
        while at != NONE and len(chain) <= capacity:
            chain.append(at)
            at = int(t.free[at])
        if sorted(chain) != sorted(set(range(first, first + capacity)) - set(its.tolist())):
            wrong.append(f"the free chain of segment {number} is not its FREE slots")
    return wrong


def _unreachable(t: Tables) -> list[str]:
    """Index entries with a gap between where they should stand and where they do."""
    mask = len(t.buckets) - 1
    for at in np.flatnonzero(t.buckets):
        home = int(t.buckets[at]) >> 32 & mask
        while home != at:
            if t.buckets[home] == 0:
                return ["an index entry stands behind a gap"]
            home = (home + 1) & mask
    return []
