"""Peers as a source of the prefetcher: a peer leases its blocks, and this node reads them.

Each batch goes to the peer that holds the longest leading run; if several do, to the one with the
shortest predicted pull. A pull ends well before its lease. A block that arrives later, or does not
match its tag (`block_tags`), is a miss. The peer makes the tags while this node reads the blocks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from headrace_kvstore.arena.arena_map import NamespaceInfo
from headrace_kvstore.blocks.slot_record import HASH_BYTES, SLOT
from headrace_kvstore.nvme.record import BlockShape
from headrace_kvstore.peers.agent_pool import AgentPool
from headrace_kvstore.peers.block_tags import TAG_BYTES, BlockTags
from headrace_kvstore.peers.messages import HandshakeResponse, Lease, Leased, Release, Tags
from headrace_kvstore.peers.nixl_agent import Pull, PullError
from headrace_kvstore.peers.peers import Peers
from headrace_kvstore.peers.pull_cost import PeerRun
from headrace_kvstore.protocol.events import DRAM, NVME
from headrace_kvstore.staging.sources import (
    PendingRead,
    SourceBlock,
    SourceLease,
    SourceUnavailable,
)

READ_BYTES = 64 * 2**20
"""Maximum size of one read; the agent's thread does nothing else during a read."""


@dataclass(frozen=True)
class PullLimits:
    """Limits in seconds: after which a pull counts as too slow, and how long blocks are leased."""

    pull_s: float
    lease_s: float


class PeerSource:
    """Source of pulls into one arena.

    Args:
        namespace: digest -> the namespace in the arena, with its block size; None if it is not
            known.
        readers: with the arena's memory.
        secret: the app's.
    """

    batch_blocks = 64

    def __init__(
        self,
        peers: Peers,
        readers: AgentPool,
        namespace: Callable[[bytes], NamespaceInfo | None],
        limits: PullLimits,
        secret: str,
    ) -> None:
        self._peers, self._readers, self._namespace, self.limits = peers, readers, namespace, limits
        self._secret = secret
        self._lock, self._connecting = threading.Lock(), threading.Lock()
        self._connected: dict[str, tuple[str, str]] = {}
        self.counts: Counter[str] = Counter()

    def split(self, blocks: int, block_bytes: int) -> list[int]:
        """Return the sizes of reads: half of the rest each time, at most READ_BYTES.

        Verifying is about twice as fast as reading. So each read is verified while the next one,
        half as large, arrives, and only one block is left to verify in the end.
        """
        most, sizes = max(1, READ_BYTES // block_bytes), []
        while blocks:
            sizes.append(min(most, -(-blocks // 2)))
            blocks -= sizes[-1]
        return sizes

    def open(self, digest: bytes, hashes: Sequence[bytes]) -> SourceLease:
        """Lease the blocks from the best peer; see `Source.open`."""
        namespace = self._namespace(digest)
        runs = self._peers.runs(digest, hashes)
        if namespace is None or not runs:
            raise SourceUnavailable("gone")
        run = max(runs, key=lambda r: (r.blocks, -r.pull_s(namespace.block_bytes)))
        handshake = self._peers.handshake(run.peer)
        if handshake is None:
            raise SourceUnavailable("gone")
        began_s = time.monotonic()
        shape = BlockShape(digest, namespace.layers, namespace.block_bytes // namespace.layers)
        request = Lease(
            *(handshake.generation, digest, shape.layers, shape.layer_bytes),
            *(list(hashes), self.limits.lease_s),
        )
        leased = self._peers.lease(run.peer, request, self.limits.pull_s)
        try:
            name = self._connect(run.peer, handshake)
            tags = BlockTags(self._secret, handshake.generation)
            return PeerLease(self, run, name, shape, hashes, leased.result(), tags, began_s)
        except PullError as error:
            word = str(error.args[0])
        except (ValueError, IndexError, OverflowError):
            word = "malformed"
        self.failed(run.peer, word, len(hashes))
        raise SourceUnavailable(word)

    def failed(self, peer: str, word: str, blocks: int) -> None:
        """Count a lease or a pull that failed, and report the peer's failure."""
        with self._lock:
            self.counts[f"failed_{word}"] += blocks
        if word in ("lost", "slow", "refused"):
            with self._connecting:
                self._disconnect(peer)
        self._peers.failed(peer, word)

    def _connect(self, peer: str, handshake: HandshakeResponse) -> str:
        """Return the agent name to read the peer by; connect first if needed. Raises PullError."""
        with self._connecting:
            known = self._connected.get(peer)
            if known is None or known[0] != handshake.generation:
                self._disconnect(peer)
                name = self._readers.connect(handshake.agent, self.limits.pull_s)
                known = self._connected[peer] = handshake.generation, name
            return known[1]

    def _disconnect(self, peer: str) -> None:
        """End the connection; the next lease opens a new one."""
        known = self._connected.pop(peer, None)
        if known is not None:
            self._readers.disconnect(known[1])


class PeerLease:
    """Leased blocks of one peer.

    Raises ValueError, IndexError or OverflowError if the peer's answer makes no sense.
    """

    def __init__(
        self,
        source: PeerSource,
        run: PeerRun,
        name: str,
        shape: BlockShape,
        hashes: Sequence[bytes],
        leased: Leased,
        tags: BlockTags,
        began_s: float,
    ) -> None:
        self._tags = tags
        self._source, self._run, self._name, self._shape = source, run, name, shape
        self._lease, self._began_s = leased.lease, began_s
        self._until_s = began_s + source.limits.lease_s
        sums = np.frombuffer(leased.sums, "<u8").astype(np.uint64)
        sums = sums.reshape(len(leased.rows), shape.layers)
        self._remote = np.array([row.address for row in leased.rows], np.uint64)
        for field in ("parent", "depth", "tenant"):
            np.array([getattr(row, field) for row in leased.rows], SLOT[field])
        if not np.isfinite([row.compute_s for row in leased.rows]).all():
            raise ValueError("a block whose seconds are no number")
        self.found = [
            SourceBlock(
                *(hashes[row.index].ljust(HASH_BYTES, b"\0"), shape, row_sums, row.parent),
                *(row.depth, row.tenant, row.compute_s),
            )
            for row, row_sums in zip(leased.rows, sums, strict=True)
        ]
        self._good_bytes = 0
        self._word = ""
        self._asked: Future[Tags] | None = None

    def read(self, which: Sequence[int], addresses: np.ndarray) -> PendingRead:
        """Begin to read blocks from the peer; the first call also asks for the tags. See
        `SourceLease.read`."""
        limit_s = min(self._source.limits.pull_s, self._until_s - time.monotonic())
        if self._asked is None:
            self._asked = self._source._peers.tags(self._run.peer, self._lease, limit_s)
        pull = self._source._readers.read(
            self._name,
            addresses[:, 0],
            self._remote[list(which)],
            np.full(len(which), self._shape.payload_bytes),
            limit_s,
        )
        return PeerRead(self, pull, which, addresses)

    def verify(
        self, which: Sequence[int], addresses: np.ndarray, timeout_s: float | None
    ) -> np.ndarray:
        """Return whether each block matches its tag at its address, bool (n,). Raises PullError,
        and TimeoutError if the tags have not arrived."""
        assert self._asked is not None  # since the first read
        tags, size = self._asked.result(timeout_s).tags, self._shape.payload_bytes
        if len(tags) != TAG_BYTES * len(self.found):
            raise PullError("malformed")
        right = [
            self._tags.verify(tags[TAG_BYTES * i : TAG_BYTES * (i + 1)], address, size)
            for i, address in zip(which, addresses.tolist(), strict=True)
        ]
        return np.array(right, np.bool_)

    def close(self, bad: Sequence[int]) -> None:
        """End the lease and record the peer's success or failure; see `SourceLease.close`."""
        peers, peer = self._source._peers, self._run.peer
        if self._lease:
            peers.send(peer, Release(self._lease, list(bad)))
        if self._word:
            self._source.failed(peer, self._word, len(bad))
        else:
            media = {medium for medium, _, _ in self._run.media}
            medium = NVME if NVME in media else DRAM
            seconds = time.monotonic() - self._began_s
            peers.succeeded(peer, medium, self._good_bytes, seconds)

    def record_result(self, pull: Pull, good: int, bad: int, word: str) -> None:
        """Record the result of one fill."""
        size = self._shape.payload_bytes
        self._good_bytes += good * size
        source = self._source
        if not word and bad:
            word = "corrupt" if pull.completed_s <= self._until_s else "lease_ran_out"
        self._word = self._word or word
        with source._lock:
            source.counts["pulled"] += good
            source.counts["pulled_bytes"] += good * size


class PeerRead:
    """Blocks being read from a peer."""

    def __init__(
        self, offer: PeerLease, pull: Pull, which: Sequence[int], addresses: np.ndarray
    ) -> None:
        self._offer, self._pull, self._which = offer, pull, which
        self._addresses = addresses

    def abort(self) -> None:
        """Call the pull off; see `PendingRead.abort`."""
        self._pull.aborted = True

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        """Wait for the pull and verify its blocks; see `PendingRead.wait`."""
        good, word = np.zeros(len(self._which), np.bool_), ""
        try:
            self._pull.result(timeout_s)
            good = self._offer.verify(self._which, self._addresses[:, 0], timeout_s)
        except PullError as error:
            word = str(error.args[0])
        self._offer.record_result(self._pull, int(good.sum()), int((~good).sum()), word)
        return good
