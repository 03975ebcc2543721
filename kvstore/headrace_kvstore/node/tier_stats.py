"""What a node says of each of its tiers: medium, state, and why if it is off; sizes, blocks, hits.

A tier that is off, or an arena that is not there, still has a row: its state and the reason. Each
is JSON-able.
"""

from __future__ import annotations

from typing import Any

from headrace_kvstore.node.dram_work import DramWork
from headrace_kvstore.node.tier_keeper import TierKeeper
from headrace_kvstore.objects.object_tier import ObjectTier
from headrace_kvstore.protocol.events import DRAM, NVME, OBJECT


def dram_tier(dram: DramWork | None, reason: str) -> dict[str, Any]:
    """As the arena counts; `reason` is why there is none. Not while the arena may be closed."""
    if dram is None:
        return {"medium": DRAM, "state": "off", "reason": reason}
    arena = dram.arena.stats()
    return {
        "medium": DRAM,
        "state": "on",
        "reason": "",
        **arena,
        "bytes": arena["held_bytes"],
        "hits": arena["hits_total"],
        "misses": arena["misses_total"],
        "size_bytes": arena["data_bytes"],
    }


def nvme_tier(
    keeper: TierKeeper | None, reason: str, size_bytes: int, hits: int, misses: int
) -> dict[str, Any]:
    """As the tier counts, with the node's hits; `size_bytes` while there is none."""
    tier = {"state": "off", "reason": reason} if keeper is None else keeper.stats()
    counts = {"hits": hits, "misses": misses}
    return {"medium": NVME, "size_bytes": size_bytes, **tier, **counts}


def object_tier(tier: ObjectTier | None, reason: str, dram: DramWork | None) -> dict[str, Any]:
    """As the tier counts, with what is fetched and shared for the arena if there is one."""
    if tier is None:
        return {"medium": OBJECT, "state": "off", "reason": reason, "blocks": 0, "bytes": 0}
    work = None if dram is None else dram.objects
    return {"medium": OBJECT, **tier.stats(), **({} if work is None else work.stats())}


__all__ = ["dram_tier", "nvme_tier", "object_tier"]
