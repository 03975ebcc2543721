"""Requests of a node's clients: find blocks, bring them closer, and count them.

Every operation works on the tiers that exist at that moment. A missing tier has no blocks. Requests
that take microseconds are answered in the socket's thread. Those that read many blocks or wait for
locks are answered in the slow thread. `Locate` is answered twice if blocks are being pulled from a
peer or from objects: at once with what NVMe has, and again when the pull is over.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from itertools import groupby
from typing import Any

import msgspec
import numpy as np

from headrace_kvstore.lookup.availability import DRAM, NVME, AvailableRun
from headrace_kvstore.node.administration import administer
from headrace_kvstore.node.block_value import BlockValue, UseHistory, below_dram
from headrace_kvstore.node.node_events import NodeEvents
from headrace_kvstore.node.peer_service import PendingPull
from headrace_kvstore.node.tiers import Tiers
from headrace_kvstore.nvme.recheck import recheck
from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.gossip_log import GossipLog
from headrace_kvstore.protocol.server import StagedReply
from headrace_kvstore.settings.node_settings import NodeSettings

logger = logging.getLogger("headrace.kvstore")

PROMOTION_PRIORITY, WARM_PRIORITY = -64, -128
"""Priorities of prefetches that no client asked for."""


class Operations:
    """Operations of a node. Thread-safe.

    Args:
        settings: of the node.
        tiers: where its blocks are.
        block_value: values blocks, for `warm`.
        gossip_log: entries that processes of this machine leave for each other.
        events: publish the node's changes.
        slow: runs requests that may take long.

    Attributes:
        requests: number of the clients' requests of each kind; the server counts them.
    """

    def __init__(
        self,
        settings: NodeSettings,
        tiers: Tiers,
        block_value: BlockValue,
        gossip_log: GossipLog,
        events: NodeEvents,
        slow: Executor,
    ) -> None:
        self.tiers, self.gossip_log, self._events, self._slow = tiers, gossip_log, events, slow
        self.requests: Counter[str] = Counter()
        self._settings, self._block_value = settings, block_value
        self._uses = UseHistory()
        self._counts: Counter[str] = Counter()
        self._started_s = time.monotonic()

    def answer(self, request: wire.Request) -> wire.Reply | Future[wire.Reply] | StagedReply:
        """Carry out a request: a `protocol.server.Handle`."""
        match request:
            case wire.Locate(key, digest, hashes, lease_s, compute_s):
                located = wire.pack_locations(self.locate(digest, hashes, lease_s, key))
                pulling = self.pull(digest, hashes[len(located.places) :], compute_s)
                return located if pulling is None else _staged(located, pulling)
            case wire.Lookup(digest, hashes, compute_s):
                found = self.find_available(digest, hashes, compute_s)
                return wire.LookupReply([*found], self.has_more_than_dram)
            case wire.FindHeld(digest, hashes):
                return wire.HeldBlocks(np.flatnonzero(self.holds(digest, hashes)).tolist())
            case wire.AppendEntry(generation, entry):
                if generation == self.gossip_log.generation:
                    self.gossip_log.append(entry)
                end = self.gossip_log.head
                return wire.EntryPage(self.gossip_log.generation, end, end)
            case wire.ReadEntries(generation, after, most_bytes, except_writer):
                return self.gossip_log.read(
                    after, most_bytes, generation=generation, except_writer=except_writer
                )
        return self._slow.submit(self._answer_slowly, request)

    def _answer_slowly(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.ReportBad(digest, blocks):
                return wire.Done(self.report_bad(digest, blocks))
            case wire.GetStats():
                return wire.Stats(self.stats())
            case wire.Administer(action, namespace, block_hash):
                return wire.Stats(self.administer(action, namespace, block_hash))
        return wire.Failed(f"nobody answers {type(request).__name__}")

    def locate(
        self, digest: bytes, hashes: Sequence[bytes], lease_s: float = 30.0, request_key: str = ""
    ) -> list[Location]:
        """Return the leading run of these blocks that NVMe has, and keep them there for `lease_s`.

        A call with a lease counts as a use. A block that a second request uses is brought into DRAM
        in the background.
        """
        tier = self.tiers.nvme
        found = [] if tier is None else tier.locate_leading(digest, hashes, lease_s)
        if lease_s > 0 and tier is not None:
            self._counts["nvme_hits"] += len(found)
            self._counts["nvme_misses"] += len(hashes) - len(found)
            again = self._uses.again(digest, hashes[: len(found)], request_key)
            if again:
                self._counts["promoted"] += self.prefetch(digest, again, PROMOTION_PRIORITY)
        return found

    def find_available(
        self, digest: bytes, hashes: Sequence[bytes], compute_s: float = 0.0
    ) -> list[AvailableRun]:
        """Return where the leading run of these blocks would come from: DRAM and NVMe, and after
        these the blocks that `pull` would bring. Nothing is read, leased or counted."""
        dram, tier, peer_service = self.tiers.dram, self.tiers.nvme, self.tiers.peer_service
        namespace_id = None if dram is None else dram.arena.find_namespace(digest)
        in_dram = on_nvme = np.zeros(len(hashes), np.bool_)
        if dram is not None and namespace_id is not None:
            in_dram = dram.arena.lookup(namespace_id, hashes) >= 0
        if tier is not None:
            on_nvme = tier.contains(digest, hashes)
        here = int(np.append(in_dram | on_nvme, False).argmin())
        media = [DRAM if fast else NVME for fast in in_dram[:here]]
        found = [AvailableRun(medium, len(list(run))) for medium, run in groupby(media)]
        if peer_service is not None:
            found += peer_service.find_available(digest, hashes[here:], compute_s)
        return found

    def holds(self, digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
        """Return for each block whether NVMe, a peer or an object has it, bool (n,). Nothing is
        read, leased or counted."""
        tiers = self.tiers
        held = np.zeros(len(hashes), np.bool_)
        for tier in (tiers.nvme, tiers.peers, tiers.objects):
            if tier is not None:
                held |= tier.contains(digest, hashes)
        return held

    @property
    def has_more_than_dram(self) -> bool:
        """Whether `find_available` can find blocks anywhere else."""
        tiers, peers = self.tiers, self.tiers.peers
        below = tiers.nvme_manager is not None or tiers.objects is not None
        return below or (peers is not None and bool(peers.addresses()))

    def pull(
        self, digest: bytes, hashes: Sequence[bytes], compute_s: float = 0.0
    ) -> PendingPull | None:
        """Pull the leading run of blocks into DRAM, from a peer or from objects, if that is worth
        it."""
        peer_service = self.tiers.peer_service
        return None if peer_service is None else peer_service.pull(digest, hashes, compute_s)

    def prefetch(self, digest: bytes, hashes: Sequence[bytes], priority: int = 0) -> int:
        """Bring blocks into DRAM, from objects if NVMe lacks them; return how many were queued."""
        dram = self.tiers.dram
        return 0 if dram is None else dram.prefetch(digest, hashes, priority)

    def report_bad(self, digest: bytes, blocks: Sequence[wire.BadBlock]) -> int:
        """Check blocks on NVMe that a reader could not use; return how many were dropped.

        The node drops only blocks that it cannot read or verify either. If a block has moved since
        the reader got its place, the reader read other bytes, and the block is not checked.
        """
        self._counts["reported_bad"] += len(blocks)
        nvme = self.tiers.nvme
        if nvme is None:
            return 0
        found = [nvme.locate(digest, block.hash) for block in blocks]
        places = [
            place
            for place, block in zip(found, blocks, strict=True)
            if place is not None and (place.path, place.slot) == (block.path, block.slot)
        ]
        dropped = recheck(nvme, places)
        self._counts["reported_wrongly"] += len(blocks) - dropped
        return dropped

    def warm(self) -> int:
        """Bring the most valuable blocks of NVMe and the objects into DRAM's free room; return how
        many were queued."""
        tiers = self.tiers
        with tiers.arena_lock:
            room = 0 if tiers.dram is None else tiers.dram.arena.free_bytes()
        best = self._block_value.best(list(below_dram(tiers.nvme, tiers.objects)), room)
        return sum(self.prefetch(digest, hashes, WARM_PRIORITY) for digest, hashes in best)

    def administer(
        self, action: str, namespace: bytes | None = None, block_hash: bytes | None = None
    ) -> dict[str, Any]:
        """Carry out an operator's request, as `administration.administer`."""
        logger.info("operator: %s of namespace %s", action, namespace and namespace.hex())
        return administer(self.tiers, action, namespace, block_hash)  # type: ignore[arg-type]

    def stats(self) -> dict[str, Any]:
        """Return JSON-able: each tier's state, sizes and hits, and the node's own counts."""
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
            "remote": {} if tiers.peer_service is None else tiers.peer_service.stats(),
            "gossip": self.gossip_log.stats(),
            "promoted": counts["promoted"],
            "reported_bad": counts["reported_bad"],
            "reported_wrongly": counts["reported_wrongly"],
            "requests": dict(self.requests),
            "events": self._events.stats(),
        }


def _staged(located: wire.Located, pulling: PendingPull) -> StagedReply:
    later: Future[wire.Located] = Future()
    pulling.done.add_done_callback(lambda _: later.set_result(located))
    now = msgspec.structs.replace(located, pulling=pulling.blocks, wait_s=pulling.wait_s)
    return StagedReply(now, later)
