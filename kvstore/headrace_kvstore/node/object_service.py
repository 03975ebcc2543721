"""A node's work with an object store: it writes blocks worth sharing there, and fetches wanted
ones.

Only use shows which blocks are worth sharing, so there is no queue. Every `sweep_s` the writer
searches the arena for blocks that were used again and are in no object yet. The next sweep finds
blocks that could not be written. The writer holds at most `WRITE_BYTES` of copies at a time.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.arena_map import NamespaceInfo
from headrace_kvstore.blocks.slot_record import PINNED
from headrace_kvstore.least_squares import LinearTime
from headrace_kvstore.nvme.record import BlockShape
from headrace_kvstore.objects.object_client import StoreClient
from headrace_kvstore.objects.object_format import ObjectName
from headrace_kvstore.objects.object_tier import ObjectTier, Packed
from headrace_kvstore.peers.pull_cost import PeerRun, pull_cost
from headrace_kvstore.protocol.events import OBJECT
from headrace_kvstore.settings.node_settings import NodeSettings
from headrace_kvstore.staging.prefetch import Prefetcher
from headrace_kvstore.staging.sources import (
    PendingRead,
    SourceBlock,
    SourceLease,
    SourceUnavailable,
)
from headrace_kvstore.staging.write_behind import arena_saves

logger = logging.getLogger("headrace.kvstore")

READ_BYTES = 32 * 2**20
WRITE_BYTES = 16 * 2**20
"""Bytes copied from the arena at once, and then put, each block as an object of its own."""
OBJECTS = "object store"
"""Name of the object store as the peer of a `PeerRun`."""
FIRST_LATENCY_S, FIRST_BYTES_PER_S = 0.05, 1e8
"""Latency and bandwidth assumed before the first fetch."""


def is_worth_sharing(rows: np.ndarray) -> np.ndarray:
    """Return which blocks are worth sharing: those used again since they were stored, and pinned
    ones.

    An object costs a request, and room for as long as it stays, and most blocks are never wanted
    twice. A block that a second request wanted here will be wanted elsewhere too.
    """
    wanted: np.ndarray = (rows["hits"] > 0) | (rows["kept_until_s"] == PINNED)
    return wanted


class ObjectSource:
    """The object tier as a `staging.sources.Source`; `cost` is learned from its reads."""

    batch_blocks = 64

    def __init__(self, tier: ObjectTier) -> None:
        self._tier = tier
        self.cost = pull_cost(FIRST_LATENCY_S, FIRST_BYTES_PER_S)

    def split(self, blocks: int, block_bytes: int) -> list[int]:
        """Split into reads of `READ_BYTES`, so that the first blocks arrive before the last are
        requested."""
        size = max(1, READ_BYTES // block_bytes)
        return [min(size, blocks - first) for first in range(0, blocks, size)]

    def open(self, digest: bytes, hashes: Sequence[bytes]) -> SourceLease:
        """Find the blocks' objects; see `Source.open`."""
        if not self._tier.may_read:
            raise SourceUnavailable("breaker")
        return ObjectLease(self._tier, self.cost, digest, hashes)


class ObjectLease:
    """Blocks in objects; one that is removed before its read is a miss."""

    def __init__(
        self, tier: ObjectTier, cost: LinearTime, digest: bytes, hashes: Sequence[bytes]
    ) -> None:
        self._tier, self._cost = tier, cost
        found = [tier.find(digest, block_hash) for block_hash in hashes]
        self._objects = [held for held in found if held is not None]
        self.found = [_source_block(held.name) for held in self._objects]
        self._began_s, self._asked_bytes = time.monotonic(), 0

    def read(self, which: Sequence[int], addresses: np.ndarray) -> PendingRead:
        """Begin to read blocks; see `SourceLease.read`. A block's sums in `found` are known once it
        has arrived."""
        objects = [self._objects[i] for i in which]
        self._asked_bytes += sum(held.name.shape.payload_bytes for held in objects)
        return self._tier.read(objects, addresses, [self.found[i].sums for i in which])

    def close(self, bad: Sequence[int]) -> None:
        """Learn the cost of the reads; see `SourceLease.close`. The tier itself has dropped bad
        objects."""
        if self._asked_bytes and not bad:
            self._cost.observe(self._asked_bytes, time.monotonic() - self._began_s)


def _source_block(name: ObjectName) -> SourceBlock:
    sums = np.zeros(name.shape.layers, np.uint64)
    where = name.parent, name.depth, name.tenant, name.compute_s
    return SourceBlock(name.hash, name.shape, sums, *where)


class ObjectWriter:
    """Writer of an arena's blocks into objects, in a thread of its own.

    Args:
        bytes_per_s: mean bandwidth of the writes.
        sweep_s: time between searches of the arena.
    """

    def __init__(self, arena: Arena, tier: ObjectTier, bytes_per_s: int, sweep_s: float) -> None:
        self._arena, self._tier = arena, tier
        self._bytes_per_s, self._sweep_s = bytes_per_s, sweep_s
        self.sweeps = self.written = self.failed = 0
        self._stop = threading.Event()
        self._touching = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kv-share", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Stop writing; return False if the arena's memory may still be read after that time.

        A put under way continues: its bytes are a copy.
        """
        deadline = time.monotonic() + timeout_s
        self._stop.set()
        free = self._touching.acquire(timeout=max(0.0, timeout_s))
        if free:
            self._touching.release()
        self._thread.join(max(0.0, min(deadline - time.monotonic(), timeout_s / 4)))
        return free

    def stats(self) -> dict[str, Any]:
        """Return JSON-able counts of sweeps, and of blocks."""
        return {"sweeps": self.sweeps, "written": self.written, "failed": self.failed}

    def _run(self) -> None:
        while not self._stop.wait(self._sweep_s):
            try:
                if self._tier.refreshed.is_set():
                    self._sweep()
                    self.sweeps += 1
            except Exception:
                logger.exception("sharing blocks failed; it goes on")

    def _sweep(self) -> None:
        for namespace, rows in self._candidates():
            if namespace.block_bytes % namespace.layers:
                continue
            shape = BlockShape(
                namespace.digest, namespace.layers, namespace.block_bytes // namespace.layers
            )
            size = max(1, WRITE_BYTES // shape.payload_bytes)
            for first in range(0, len(rows), size):
                if self._stop.is_set() or not self._tier.may_write:
                    return
                self._write(shape, rows[first : first + size])

    def _candidates(self) -> Iterator[tuple[NamespaceInfo, np.ndarray]]:
        """Yield the blocks worth sharing that are in no object, SLOT (n,), by namespace."""
        with self._touching:
            if self._stop.is_set():
                return
            rows, _ = self._arena.blocks()
            namespaces = self._arena.namespaces()
        rows = rows[is_worth_sharing(rows)]
        for number in np.unique(rows["namespace"]).tolist():
            mine = rows[rows["namespace"] == number]
            here = self._tier.contains(
                namespaces[number].digest, [r["hash"].tobytes() for r in mine]
            )
            if not here.all():
                yield namespaces[number], mine[~here]

    def _write(self, shape: BlockShape, rows: np.ndarray) -> None:
        began_s = time.monotonic()
        with self._touching:
            packed = [] if self._stop.is_set() else self._pack(shape, rows)
        written = self._tier.put(packed)
        self.written += written
        self.failed += len(packed) - written
        due_s = began_s + sum(len(data) for _, data in packed) / self._bytes_per_s
        self._stop.wait(max(0.0, due_s - time.monotonic()))

    def _pack(self, shape: BlockShape, rows: np.ndarray) -> list[Packed]:
        number = int(rows[0]["namespace"])
        slots = self._arena.lookup(number, [row["hash"].tobytes() for row in rows])
        there = slots >= 0
        return self._tier.pack(shape, arena_saves(self._arena, slots[there], rows[there]))


class ObjectService:
    """One arena's part in the object tier: blocks fetched into it, blocks shared from it."""

    def __init__(self, settings: NodeSettings, arena: Arena, tier: ObjectTier) -> None:
        self.tier = tier
        self._source = ObjectSource(tier)
        self.fetcher = Prefetcher(arena, self._source, settings.reading_bytes, "kv-fetch")
        self._writer = ObjectWriter(
            *(arena, tier, settings.object_bytes_per_s, settings.object_sweep_s)
        )

    def runs(self, digest: bytes, hashes: Sequence[bytes]) -> list[PeerRun]:
        """Return the leading run of these blocks that objects hold, priced as a peer's; none while
        the endpoint fails."""
        here = self.tier.contains(digest, hashes)
        count = len(here) if here.all() else int(here.argmin())
        if not count or not self.tier.may_read:
            return []
        return [PeerRun(OBJECTS, ((OBJECT, count, self._source.cost),))]

    def close(self, timeout_s: float) -> bool:
        """End the work; return False if the arena's memory may still be used after that time."""
        deadline = time.monotonic() + timeout_s
        ended = self.fetcher.close(timeout_s)
        return self._writer.close(max(0.05, deadline - time.monotonic())) and ended

    def stats(self) -> dict[str, Any]:
        """Return JSON-able sizes and counts."""
        cost = self._source.cost
        return {
            "fetch": self.fetcher.stats(),
            "share": self._writer.stats(),
            "latency_s": cost.fixed_s,
            "s_per_byte": cost.each_s,
        }


def open_tier(settings: NodeSettings, ready: Callable[[], None]) -> ObjectTier:
    """Start and return the settings' object tier; it calls `ready` once it knows its objects.

    Raises:
        ImportError: the client is not installed.
        ValueError: a URL or option that it does not know.
    """
    assert settings.object_url is not None
    client = StoreClient(settings.object_url, settings.object_options, settings.object_timeout_s)
    writer = settings.object_writer or re.sub(r"[^A-Za-z0-9_-]", "-", settings.name)[:64]
    return ObjectTier(
        client,
        writer,
        settings.object_bytes,
        refresh_s=settings.object_refresh_s,
        timeout_s=settings.object_timeout_s,
        ready=ready,
    ).start()
