"""A node's work with its peers on one arena: leasing its blocks, and pulling theirs.

A new arena gets a new agent and a new generation, so that no peer reads addresses of the old one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.arena_map import NamespaceInfo
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.peers.agent_pool import AgentPool
from headrace_kvstore.peers.block_tags import BlockTags
from headrace_kvstore.peers.lease_server import LeaseServer
from headrace_kvstore.peers.messages import (
    GetTags,
    HandshakeRequest,
    HandshakeResponse,
    Lease,
    PeerRequest,
    Release,
)
from headrace_kvstore.peers.nixl_agent import NixlAgent
from headrace_kvstore.peers.peer_source import PeerSource, PullLimits
from headrace_kvstore.peers.peers import Peers
from headrace_kvstore.protocol.wire import Done
from headrace_kvstore.settings.node_settings import NodeSettings
from headrace_kvstore.staging.prefetch import Prefetcher

READERS = 2
"""Number of agents that read. UCX copies shared memory in the call that posts a read, so one thread
keeps one core busy and is slower than the memory."""


class PeerTransfers:
    """Work with peers on one arena; it begins in the constructor.

    Args:
        tier: the NVMe tier, or None while there is none.
        below: brings blocks from there into the arena.

    Raises:
        ImportError, RuntimeError: no NIXL with UCX.
    """

    def __init__(
        self,
        settings: NodeSettings,
        arena: Arena,
        tier: Callable[[], NvmeTier | None],
        below: Prefetcher,
        peers: Peers,
    ) -> None:
        def on_nvme(digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
            nvme = tier()
            if nvme is None:
                return np.zeros(len(hashes), np.bool_)
            return nvme.contains(digest, hashes)

        def namespace(digest: bytes) -> NamespaceInfo | None:
            return next((s for s in arena.namespaces() if s.digest == digest), None)

        self.generation = uuid.uuid4().hex
        assert settings.secret is not None  # there are peers
        tags = BlockTags(settings.secret, self.generation)
        self.lease_server = LeaseServer(arena, self.generation, tags, on_nvme, below)
        # Only blocks: peers must not reach tables and sums.
        memory = arena.data_address, arena.data_bytes
        self.agent = NixlAgent(*memory, self.lease_server.serving)
        try:
            self.readers = AgentPool(
                [self.agent, *(NixlAgent(*memory) for _ in range(READERS - 1))]
            )
        except BaseException:
            self.agent.close(0.0)
            raise
        limits = PullLimits(settings.pull_limit_s, settings.peer_lease_s)
        self.source = PeerSource(peers, self.readers, namespace, limits, settings.secret)
        self.puller = Prefetcher(arena, self.source, settings.pulling_bytes, "kv-pull")

    def answer(self, request: PeerRequest) -> Any:
        """Return the answer to a peer's request."""
        match request:
            case HandshakeRequest():
                return HandshakeResponse(self.generation, self.agent.metadata)
            case Lease():
                reply = self.lease_server.lease(request)
                if isinstance(reply, Future):
                    reply.add_done_callback(lambda _: self.agent.wake())
                self.agent.wake()
                return reply
            case GetTags(lease):
                return self.lease_server.tags(lease)
            case Release(lease, bad):
                self.lease_server.release(lease, bad)
        return Done()

    def stats(self) -> dict[str, Any]:
        """Return JSON-able counts."""
        return {
            "generation": self.generation,
            "pull": {**self.puller.stats(), **self.source.counts},
            "lease_server": self.lease_server.stats(),
        }

    def close(self, timeout_s: float) -> bool:
        """End the work; return False if bytes may still arrive after that time."""
        self.lease_server.close()
        ended = self.puller.close(timeout_s)
        return self.readers.close(timeout_s) and ended
