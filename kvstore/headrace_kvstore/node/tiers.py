"""The tiers that a node has at this moment. Each may appear and disappear while the node runs."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace_kvstore.node.dram_service import DramService
from headrace_kvstore.node.nvme_tier_manager import NvmeTierManager
from headrace_kvstore.node.peer_service import PeerService
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.objects.object_tier import ObjectTier
from headrace_kvstore.peers.peers import Peers
from headrace_kvstore.protocol.events import DRAM, NVME, OBJECT

Contents = Iterable[tuple[bytes, np.ndarray]]
"""Namespace digest and rows, SLOT (n,), of a tier's blocks."""


@dataclass
class Tiers:
    """Tiers of a node. None means that a tier is missing; `reasons` has the reason, by the tier's
    name.

    `arena_lock` is held while the arena is replaced or closed, and by users that must not run at
    that time.
    """

    dram: DramService | None = None
    nvme_manager: NvmeTierManager | None = None
    objects: ObjectTier | None = None
    peer_service: PeerService | None = None
    reasons: dict[str, str] = field(
        default_factory=lambda: {
            "dram": "opening",
            "nvme": "no nvme_folder is given",
            "object": "no object_url is given",
        }
    )
    arena_lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nvme(self) -> NvmeTier | None:
        """The NVMe tier, once it is open."""
        nvme_manager = self.nvme_manager
        return None if nvme_manager is None else nvme_manager.tier

    @property
    def peers(self) -> Peers | None:
        """The other nodes that this one pulls from."""
        peer_service = self.peer_service
        return None if peer_service is None else peer_service.peers

    def arena_contents(self) -> Contents:
        """Return namespace digest and rows, SLOT (n,), of the blocks in DRAM."""
        with self.arena_lock:
            if self.dram is None:
                return []
            rows, _ = self.dram.arena.blocks()
            digests = [namespace.digest for namespace in self.dram.arena.namespaces()]
        numbers = np.unique(rows["namespace"]).tolist()
        return [(digests[number], rows[rows["namespace"] == number]) for number in numbers]

    def stats(self, settings_nvme_bytes: int, hits: int, misses: int) -> dict[str, dict[str, Any]]:
        """Return JSON-able by tier: medium, state, the reason if it is off, sizes, blocks and hits.

        Args:
            settings_nvme_bytes: size of the NVMe tier while it is missing.
            hits, misses: blocks that requests looked up on NVMe.
        """
        dram, objects = self.dram, self.objects
        missing = {name: {"state": "off", "reason": why} for name, why in self.reasons.items()}
        found: dict[str, dict[str, Any]] = {
            "dram": {"medium": DRAM, **missing["dram"]},
            "nvme": {"medium": NVME, "size_bytes": settings_nvme_bytes, **missing["nvme"]},
            "object": {"medium": OBJECT, "blocks": 0, "bytes": 0, **missing["object"]},
        }
        if dram is not None:
            arena = dram.arena.stats()
            found["dram"] |= {"state": "on", "reason": "", **arena, "bytes": arena["held_bytes"]}
            found["dram"] |= {"hits": arena["hits_total"], "misses": arena["misses_total"]}
            found["dram"]["size_bytes"] = arena["data_bytes"]
        if self.nvme_manager is not None:
            found["nvme"] |= self.nvme_manager.stats()
        found["nvme"] |= {"hits": hits, "misses": misses}
        if objects is not None:
            work = None if dram is None else dram.objects
            stats = objects.stats()
            found["object"] |= {**stats, **({} if work is None else work.stats())}
            found["object"]["hits"] = stats.get("reads_good", 0)
            found["object"]["misses"] = stats.get("reads_absent", 0)
        return found
