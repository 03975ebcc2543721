"""Peers as a `Source` of the prefetcher: a peer leases its blocks, and this node reads them.

Each batch goes to the peer that holds the longest leading run; if several do, to the one with the
shortest predicted pull. A pull ends well before its lease. A block that arrives later, or does not
match its tag (`tags`), is a miss. The peer makes the tags while this node reads the blocks.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from headrace_kvstore.arena.arena_map import Space
from headrace_kvstore.nvme.record import Shape
from headrace_kvstore.peers.agent import Pull, PullError
from headrace_kvstore.peers.messages import Lease, Leased, Release, Tags, Welcome
from headrace_kvstore.peers.peers import Peers
from headrace_kvstore.peers.pull_price import Run
from headrace_kvstore.peers.readers import Readers
from headrace_kvstore.peers.tags import TAG_BYTES, BlockTags
from headrace_kvstore.protocol.events import DRAM, NVME
from headrace_kvstore.staging.sources import Fill, Found, Offer, Unavailable
from headrace_kvstore.table import HASH_BYTES, SLOT

READ_BYTES = 64 * 2**20
"""Maximum size of one read; the agent's thread does nothing else during a read."""


@dataclass(frozen=True)
class PullLimits:
    """Limits in seconds: after which a pull counts as too slow, and how long blocks are leased."""

    pull_s: float
    lease_s: float


class RemoteSource:
    """Source of pulls into one arena.

    Args:
        space: digest -> the namespace in the arena, with its block size; None if it is not known.
        readers: with the arena's memory.
        secret: the app's.
    """

    batch_blocks = 64

    def __init__(
        self,
        peers: Peers,
        readers: Readers,
        space: Callable[[bytes], Space | None],
        limits: PullLimits,
        secret: str,
    ) -> None:
        self._peers, self._readers, self._space, self.limits = peers, readers, space, limits
        self._secret = secret
        self._lock, self._meeting = threading.Lock(), threading.Lock()
        self._met: dict[str, tuple[str, str]] = {}
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

    def open(self, digest: bytes, hashes: Sequence[bytes]) -> Offer:
        """Lease the blocks from the best peer; see `Source.open`."""
        space = self._space(digest)
        runs = self._peers.runs(digest, hashes)
        if space is None or not runs:
            raise Unavailable("gone")
        run = max(runs, key=lambda r: (r.blocks, -r.pull_s(space.block_bytes)))
        welcome = self._peers.welcome(run.peer)
        if welcome is None:
            raise Unavailable("gone")
        began_s = time.monotonic()
        shape = Shape(digest, space.layers, space.block_bytes // space.layers)
        request = Lease(
            *(welcome.generation, digest, shape.layers, shape.layer_bytes),
            *(list(hashes), self.limits.lease_s),
        )
        leased = self._peers.lease(run.peer, request, self.limits.pull_s)
        try:
            name = self._meet(run.peer, welcome)
            tags = BlockTags(self._secret, welcome.generation)
            return RemoteOffer(self, run, name, shape, hashes, leased.result(), tags, began_s)
        except PullError as error:
            word = str(error.args[0])
        except (ValueError, IndexError, OverflowError):
            word = "nonsense"
        self.failed(run.peer, word, len(hashes))
        raise Unavailable(word)

    def failed(self, peer: str, word: str, blocks: int) -> None:
        """Count a lease or a pull that failed, and report the peer's failure."""
        with self._lock:
            self.counts[f"failed_{word}"] += blocks
        if word in ("lost", "slow", "refused"):
            with self._meeting:
                self._cut(peer)
        self._peers.failed(peer, word)

    def _meet(self, peer: str, welcome: Welcome) -> str:
        """Return the agent name to read the peer by; connect first if needed. Raises PullError."""
        with self._meeting:
            known = self._met.get(peer)
            if known is None or known[0] != welcome.generation:
                self._cut(peer)
                name = self._readers.meet(welcome.agent, self.limits.pull_s)
                known = self._met[peer] = welcome.generation, name
            return known[1]

    def _cut(self, peer: str) -> None:
        """End the connection; the next lease opens a new one."""
        known = self._met.pop(peer, None)
        if known is not None:
            self._readers.forget(known[1])


class RemoteOffer:
    """Leased blocks of one peer.

    Raises ValueError, IndexError or OverflowError if the peer's answer makes no sense.
    """

    def __init__(
        self,
        source: RemoteSource,
        run: Run,
        name: str,
        shape: Shape,
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
            Found(
                *(hashes[row.index].ljust(HASH_BYTES, b"\0"), shape, row_sums, row.parent),
                *(row.depth, row.tenant, row.compute_s),
            )
            for row, row_sums in zip(leased.rows, sums, strict=True)
        ]
        self._good_bytes = 0
        self._word = ""
        self._asked: Future[Tags] | None = None

    def read(self, which: Sequence[int], addresses: np.ndarray) -> Fill:
        """Begin to read blocks from the peer; the first call also asks for the tags. See
        `Offer.read`."""
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
        return RemoteFill(self, pull, which, addresses)

    def right(
        self, which: Sequence[int], addresses: np.ndarray, timeout_s: float | None
    ) -> np.ndarray:
        """Return whether each block matches its tag at its address, bool (n,). Raises PullError,
        and TimeoutError if the tags have not arrived."""
        assert self._asked is not None  # since the first read
        tags, size = self._asked.result(timeout_s).tags, self._shape.payload_bytes
        if len(tags) != TAG_BYTES * len(self.found):
            raise PullError("nonsense")
        right = [
            self._tags.right(tags[TAG_BYTES * i : TAG_BYTES * (i + 1)], address, size)
            for i, address in zip(which, addresses.tolist(), strict=True)
        ]
        return np.array(right, np.bool_)

    def close(self, bad: Sequence[int]) -> None:
        """End the lease and record the peer's success or failure; see `Offer.close`."""
        peers, peer = self._source._peers, self._run.peer
        if self._lease:
            peers.tell(peer, Release(self._lease, list(bad)))
        if self._word:
            self._source.failed(peer, self._word, len(bad))
        else:
            media = {medium for medium, _, _ in self._run.media}
            medium = NVME if NVME in media else DRAM
            seconds = time.monotonic() - self._began_s
            peers.succeeded(peer, medium, self._good_bytes, seconds)

    def judged(self, pull: Pull, good: int, bad: int, word: str) -> None:
        """Record the result of one fill."""
        size = self._shape.payload_bytes
        self._good_bytes += good * size
        source = self._source
        if not word and bad:
            word = "corrupt" if pull.landed_s <= self._until_s else "lease_ran_out"
        self._word = self._word or word
        with source._lock:
            source.counts["pulled"] += good
            source.counts["pulled_bytes"] += good * size


class RemoteFill:
    """Blocks being read from a peer."""

    def __init__(
        self, offer: RemoteOffer, pull: Pull, which: Sequence[int], addresses: np.ndarray
    ) -> None:
        self._offer, self._pull, self._which = offer, pull, which
        self._addresses = addresses

    def call_off(self) -> None:
        """Call the pull off; see `Fill.call_off`."""
        self._pull.called_off = True

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        """Wait for the pull and verify its blocks; see `Fill.wait`."""
        good, word = np.zeros(len(self._which), np.bool_), ""
        try:
            self._pull.result(timeout_s)
            good = self._offer.right(self._which, self._addresses[:, 0], timeout_s)
        except PullError as error:
            word = str(error.args[0])
        self._offer.judged(self._pull, int(good.sum()), int((~good).sum()), word)
        return good
