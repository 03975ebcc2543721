"""What an arena holds, in numbers."""

from __future__ import annotations

from typing import Any

from headrace_kvstore.arena.geometry import (
    DISCARDED_TOTAL,
    EVICTED_TOTAL,
    HITS_TOTAL,
    MISSES_TOTAL,
    NAMESPACE_COUNT,
    NONE,
    RECLAIMED_TOTAL,
    REPAIRS_TOTAL,
    STORED_TOTAL,
    Tables,
)
from headrace_kvstore.table import READY, WRITING


def describe(t: Tables, now_s: float) -> dict[str, Any]:
    """JSON-able sizes, counts and totals."""
    table = t.table
    ready = table["state"] == READY
    totals = {
        "stored_total": STORED_TOTAL,
        "evicted_total": EVICTED_TOTAL,
        "discarded_total": DISCARDED_TOTAL,
        "hits_total": HITS_TOTAL,
        "misses_total": MISSES_TOTAL,
        "reclaimed_total": RECLAIMED_TOTAL,
        "repairs_total": REPAIRS_TOTAL,
    }
    return {
        "data_bytes": int(t.segments["bytes"].sum()),
        "held_bytes": int(table["bytes"].sum()),
        "blocks": int(ready.sum()),
        "writing": int((table["state"] == WRITING).sum()),
        "leased": int((ready & (table["lease_until_s"] > now_s)).sum()),
        "pinned": int((ready & (table["pinned"] == 1)).sum()),
        "segments": len(t.segments),
        "segments_free": int((t.segments["namespace"] == NONE).sum()),
        "namespaces": [
            {
                "digest": t.spaces["digest"][row].tobytes().hex(),
                "block_bytes": int(t.spaces["block_bytes"][row]),
                "layers": int(t.spaces["layers"][row]),
                "blocks": int((ready & (table["namespace"] == row)).sum()),
            }
            for row in range(int(t.words[NAMESPACE_COUNT]))
        ],
        **{name: int(t.words[word]) for name, word in totals.items()},
    }
