"""A node's work on one arena.

It follows the arena's events, writes blocks to NVMe (write-behind), prefetches blocks, leases them
to peers and shares them through the object store. An engine may remove the arena and create another
one under the same name. The work on the old arena then ends, and new work begins on the new one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace_kvstore.arena.arena import WRITER_TIMEOUT_S, Arena
from headrace_kvstore.node.arena_follower import ArenaFollower
from headrace_kvstore.node.object_service import ObjectService
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.objects.object_tier import ObjectTier
from headrace_kvstore.peers.peer_transfers import PeerTransfers
from headrace_kvstore.peers.peers import Peers
from headrace_kvstore.protocol.events import Change
from headrace_kvstore.settings.node_settings import NodeSettings
from headrace_kvstore.staging.prefetch import Prefetcher
from headrace_kvstore.staging.sources import NvmeSource
from headrace_kvstore.staging.write_behind import WriteBehind

logger = logging.getLogger("headrace.kvstore")

NO_PEERS = "neither listen nor peers are given"

_LEAKED: list[DramService] = []
"""Work on arenas that stay mapped, because a disk that hangs may still use their memory."""


def open_arena(settings: NodeSettings) -> Arena:
    """Open the node's arena, or create it. Raises as `Arena.create_or_attach`."""
    return Arena.create_or_attach(
        settings.name,
        settings.dram_bytes,
        folder=settings.folder,
        block_bytes=settings.block_bytes,
        layers=settings.layers,
        policy=settings.policy,
        **settings.quota_options,
    )


class DramService:
    """Work on an arena, which the constructor opens or makes and on which it begins to work.

    Raises:
        OSError, ValueError, LockBusyError: the arena cannot be opened.
    """

    def __init__(
        self,
        settings: NodeSettings,
        tier: Callable[[], NvmeTier | None],
        publish: Callable[[list[Change]], None],
        resync: Callable[[], None],
        peers: Peers | None = None,
        objects: ObjectTier | None = None,
    ) -> None:
        self.arena = open_arena(settings)
        self.writer = WriteBehind(self.arena, tier, settings.backlog_bytes, settings.writing_bytes)
        self.prefetcher = Prefetcher(self.arena, NvmeSource(tier), settings.reading_bytes)
        self._settings, self._tier = settings, tier
        self._renew_at_s = 0.0
        self.remote: PeerTransfers | None = None
        self.remote_reason = NO_PEERS
        self.connect_peers(peers)
        self.objects = None if objects is None else ObjectService(settings, self.arena, objects)
        self.follower = ArenaFollower(self.arena, self.writer, publish, resync, settings.sweep_s)

    def connect_peers(self, peers: Peers | None) -> None:
        """Lease blocks to peers and pull from them from now on; tried once. Not thread-safe."""
        if peers is None or self.remote_reason != NO_PEERS:
            return
        try:
            remote = PeerTransfers(self._settings, self.arena, self._tier, self.prefetcher, peers)
            self.remote_reason, self.remote = "", remote
        except (ImportError, RuntimeError) as error:
            self.remote_reason = str(error)
            logger.exception("no blocks are shared with peers")

    def prefetch(self, digest: bytes, hashes: Sequence[bytes], priority: int) -> int:
        """Bring blocks in from NVMe, or from objects if only these have them; return how many were
        queued."""
        if self.objects is None:
            return self.prefetcher.ask(digest, hashes, priority)
        fetched, nvme = self.objects.tier.contains(digest, hashes), self._tier()
        if nvme is not None:
            fetched &= ~nvme.contains(digest, hashes)
        there = [name for name, far in zip(hashes, fetched, strict=True) if not far]
        far = [name for name, far in zip(hashes, fetched, strict=True) if far]
        queued = self.prefetcher.ask(digest, there, priority)
        return queued + self.objects.fetcher.ask(digest, far, priority)

    def renew(self) -> None:
        """Keep the slots of blocks on their way, a few times in each WRITER_TIMEOUT_S. Raises
        LockBusyError."""
        now_s = time.monotonic()
        if now_s < self._renew_at_s:
            return
        self._renew_at_s = now_s + WRITER_TIMEOUT_S / 4
        self.prefetcher.renew()
        if self.remote is not None:
            self.remote.puller.renew()
        if self.objects is not None:
            self.objects.fetcher.renew()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to publish, write or read."""
        return (
            self.follower.caught_up
            and self.writer.idle
            and self.prefetcher.idle
            and (self.remote is None or self.remote.puller.idle)
            and (self.objects is None or self.objects.fetcher.idle)
            and self.follower.caught_up
        )

    def stats(self) -> dict[str, Any]:
        """Return JSON-able statistics of following, writing and reading."""
        return {
            "follow": self.follower.stats(),
            "write_behind": self.writer.stats(),
            "prefetch": self.prefetcher.stats(),
        }

    def close(self, timeout_s: float, flush: bool = False) -> bool:
        """End the work; `flush` first writes waiting blocks, for at most half of the time.

        Returns False if a disk or a peer still uses some of the arena's memory, which then stays
        mapped.
        """
        deadline = time.monotonic() + timeout_s
        if flush:
            self.writer.drain(timeout_s / 2)
        parts = (self.follower, self.prefetcher, self.writer, self.remote, self.objects)
        ended = all(
            part.close(max(0.05, deadline - time.monotonic())) for part in parts if part is not None
        )
        if not ended:
            logger.warning("a disk or a peer that hangs keeps the arena's memory")
            _LEAKED.append(self)
            return False
        self.arena.close()
        return True
