"""What clients can ask of a node: find blocks, bring them closer, drop, pin and count them.

Every operation works on the tiers that exist at that moment. A missing tier has no blocks.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from headrace_kvstore import supply
from headrace_kvstore.node.changes import NodeEvents
from headrace_kvstore.node.dram_work import DramWork
from headrace_kvstore.node.neighbours import Pulling
from headrace_kvstore.node.tiers import Tiers
from headrace_kvstore.node.worth import Uses, Worth, below_dram
from headrace_kvstore.node_settings import NodeSettings
from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.board import Board

TIERS = ("dram", "nvme")
CLEARABLE = (*TIERS, "object")
"""The object tier is cleared only if it is named: other clusters may share its blocks."""
PROMOTION_PRIORITY, WARM_PRIORITY = -64, -128
"""Of prefetches that no client asked for."""


class Operations:
    """Thread-safe.

    Args:
        settings: of the node.
        tiers: where its blocks are.
        worth: values blocks, for `warm`.
        board: notes that processes of this machine leave for each other.
        events: what the node publishes.

    Attributes:
        requests: how many of each kind clients sent; counted by the server.
    """

    def __init__(
        self, settings: NodeSettings, tiers: Tiers, worth: Worth, board: Board, events: NodeEvents
    ) -> None:
        self.tiers, self.board, self._events = tiers, board, events
        self.requests: Counter[str] = Counter()
        self._settings, self._worth = settings, worth
        self._uses = Uses()
        self._counts: Counter[str] = Counter()
        self._started_s = time.monotonic()

    def locate(
        self, digest: bytes, hashes: Sequence[bytes], lease_s: float = 30.0, request_key: str = ""
    ) -> list[Location]:
        """The leading run of these blocks that NVMe has, kept there for `lease_s`.

        With a lease it counts as a use, and a block that a second request uses is brought into DRAM
        in the background.
        """
        tier = self.tiers.nvme
        found: list[Location] = []
        if tier is not None:
            for block_hash in hashes:
                place = tier.locate(digest, block_hash, lease_s)
                if place is None or (found and place.shape != found[0].shape):
                    break
                found.append(place)
        if lease_s > 0:
            self._counts["nvme_hits"] += len(found)
            self._counts["nvme_misses"] += len(hashes) - len(found)
            again = self._uses.again(digest, hashes[: len(found)], request_key)
            if again:
                self._counts["promoted"] += self.prefetch(digest, again, PROMOTION_PRIORITY)
        return found

    def survey(
        self, digest: bytes, hashes: Sequence[bytes], compute_s: float = 0.0
    ) -> list[supply.Supply]:
        """Where the leading run of these blocks would come from: DRAM and NVMe, and behind these
        what `pull` would bring. Nothing is read, leased or counted."""
        dram, tier, neighbours = self.tiers.dram, self.tiers.nvme, self.tiers.neighbours
        row = None if dram is None else dram.arena.row_of(digest)
        in_dram = on_nvme = np.zeros(len(hashes), np.bool_)
        if dram is not None and row is not None:
            in_dram = dram.arena.lookup(row, hashes) >= 0
        if tier is not None:
            on_nvme = tier.contains(digest, hashes)
        here = int(np.append(in_dram | on_nvme, False).argmin())
        media = [supply.DRAM if fast else supply.NVME for fast in in_dram[:here]]
        found = [supply.Supply(medium, len(list(run))) for medium, run in groupby(media)]
        if neighbours is not None:
            found += neighbours.survey(digest, hashes[here:], compute_s)
        return found

    @property
    def has_more_than_dram(self) -> bool:
        """Whether `survey` can find blocks anywhere else."""
        tiers, peers = self.tiers, self.tiers.peers
        below = tiers.keeper is not None or tiers.objects is not None
        return below or (peers is not None and bool(peers.addresses()))

    def pull(
        self, digest: bytes, hashes: Sequence[bytes], compute_s: float = 0.0
    ) -> Pulling | None:
        """Have the leading run of blocks brought into DRAM, from a peer or from objects, if that is
        worth it."""
        neighbours = self.tiers.neighbours
        return None if neighbours is None else neighbours.pull(digest, hashes, compute_s)

    def prefetch(self, digest: bytes, hashes: Sequence[bytes], priority: int = 0) -> int:
        """Have blocks brought into DRAM, from objects if NVMe lacks them; returns how many were
        queued."""
        dram = self.tiers.dram
        return 0 if dram is None else dram.prefetch(digest, hashes, priority)

    def report_bad(self, digest: bytes, hashes: Sequence[bytes], tier: str) -> int:
        """Drop blocks whose bytes did not verify from one tier; returns how many it had.

        Raises ValueError for an unknown tier.
        """
        _check(tier, TIERS)
        self._counts[f"{tier}_reported_bad"] += len(hashes)
        if tier == "dram":
            return self.tiers.in_dram(digest, lambda dram, row: dram.arena.discard(row, hashes))
        nvme = self.tiers.nvme
        return 0 if nvme is None else sum(nvme.discard(digest, h, "corrupt") for h in hashes)

    def pin(self, digest: bytes, hashes: Sequence[bytes], pinned: bool = True) -> int:
        """Keep blocks from eviction in each tier, or stop that; returns how many were found."""
        found = np.zeros(len(hashes), np.bool_)

        def in_dram(dram: DramWork, row: int) -> int:
            found[:] = dram.arena.pin(row, hashes, pinned)
            return 0

        self.tiers.in_dram(digest, in_dram)
        for tier in (self.tiers.nvme, self.tiers.objects):
            if tier is not None:
                found |= [tier.pin(digest, block_hash, pinned) for block_hash in hashes]
        return int(found.sum())

    def warm(self) -> int:
        """Have the most valuable blocks of NVMe and the objects brought into DRAM's free room;
        returns how many were queued."""
        tiers = self.tiers
        with tiers.arena_lock:
            room = 0 if tiers.dram is None else tiers.dram.arena.free_bytes()
        best = self._worth.best(list(below_dram(tiers.nvme, tiers.objects)), room)
        return sum(self.prefetch(digest, hashes, WARM_PRIORITY) for digest, hashes in best)

    def clear(self, digest: bytes | None = None, tiers: Sequence[str] = TIERS) -> int:
        """Drop all blocks of a namespace, or of all, pinned and leased ones too; returns how many.

        Of objects, if "object" is named, those that this node's writer made. Raises ValueError for
        an unknown tier.
        """
        for tier in tiers:
            _check(tier, CLEARABLE)
        dropped, nvme, objects = 0, self.tiers.nvme, self.tiers.objects
        if "object" in tiers and objects is not None:
            dropped += objects.clear(digest)
        if "nvme" in tiers and nvme is not None:
            for owner, rows in nvme.contents():
                if digest in (None, owner):
                    dropped += sum(nvme.discard(owner, row["hash"].tobytes()) for row in rows)
        if "dram" in tiers and digest is not None:
            dropped += self.tiers.in_dram(digest, lambda dram, row: dram.arena.clear(row))
        elif "dram" in tiers:
            with self.tiers.arena_lock:
                dropped += 0 if self.tiers.dram is None else self.tiers.dram.arena.clear()
        return dropped

    def stats(self) -> dict[str, Any]:
        """JSON-able: each tier's state, sizes and hits, and what the node does."""
        counts, tiers = self._counts, self.tiers
        with tiers.arena_lock:
            work = {} if tiers.dram is None else tiers.dram.stats()
            each = tiers.stats(
                self._settings.nvme_bytes, counts["nvme_hits"], counts["nvme_misses"]
            )
        return {
            "name": self._settings.name,
            "pid": os.getpid(),
            "protocol": wire.PROTOCOL,
            "uptime_s": time.monotonic() - self._started_s,
            "tiers": each,
            **work,
            "remote": {} if tiers.neighbours is None else tiers.neighbours.stats(),
            "board": self.board.stats(),
            "promoted": counts["promoted"],
            "reported_bad": {tier: counts[f"{tier}_reported_bad"] for tier in TIERS},
            "requests": dict(self.requests),
            "events": self._events.stats(),
        }


def _check(tier: str, tiers: Sequence[str]) -> None:
    if tier not in tiers:
        raise ValueError(f"unknown tier {tier!r}; give one of {', '.join(tiers)}")
