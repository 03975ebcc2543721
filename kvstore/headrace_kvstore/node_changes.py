"""A node's tiers as the changes that it publishes: each event of a tier, and all that there is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from headrace_kvstore.arena import Arena
from headrace_kvstore.chains import chains
from headrace_kvstore.events import NVME, OBJECT, Change
from headrace_kvstore.tiers.nvme import NvmeTier, TierEvent
from headrace_kvstore.tiers.objects import ObjectTier


def nvme_change(tier: NvmeTier | None, event: TierEvent) -> Change | None:
    """None for what is told otherwise: found by a scan, or gone again already."""
    if event.reason == "scanned":
        return None
    parent = 0
    if event.stored:
        record = None if tier is None else tier.record(event.digest, event.hash)
        if record is None:
            return None
        parent = int(record["parent"])
    return Change(event.stored, NVME, event.digest, event.hash, parent)


def object_change(tier: ObjectTier, event: TierEvent) -> Change | None:
    """None for what is gone again already: another thread tells so."""
    place = tier.find(event.digest, event.hash) if event.stored else None
    if event.stored and place is None:
        return None
    parent = 0 if place is None else int.from_bytes(place.block.parent[:8], "little")
    return Change(event.stored, OBJECT, event.digest, event.hash, parent)


def arena_contents(arena: Arena) -> list[tuple[bytes, np.ndarray]]:
    """Namespace digest and rows, SLOT (n,), of the blocks in DRAM."""
    rows, _ = arena.blocks()
    digests = [space.digest for space in arena.spaces()]
    numbers = np.unique(rows["namespace"]).tolist()
    return [(digests[number], rows[rows["namespace"] == number]) for number in numbers]


def all_there(medium: str, contents: Iterable[tuple[bytes, np.ndarray]]) -> Iterator[Change]:
    """All blocks of a tier, given as namespace digest and rows, each chain in order."""
    for digest, rows in contents:
        for row in chains(rows):
            yield Change(True, medium, digest, row["hash"].tobytes(), int(row["parent"]))
