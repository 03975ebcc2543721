"""Blocks from NVMe into the arena, ahead of whoever needs them.

Wanted blocks queue by priority. A batch reserves arena slots, the disk fills them, their checksums
are compared where they lie, and only then they are published: readers see whole and right blocks or
none. What does not fit the queue, or finds no room in the arena, is dropped and counted.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from headrace_kvstore.node_tiers import NodeArena, NodeTier, payload_sums
from headrace_kvstore.tiers.record import padded
from headrace_kvstore.tiers.segment import Location, Read

logger = logging.getLogger("headrace.kvstore")

QUEUE_BLOCKS = 1 << 16
BATCH_BLOCKS = 32
ERROR_PAUSE_S = 0.5


@dataclass(eq=False)
class _Batch:
    read: Read
    slots: np.ndarray
    places: list[Location]
    bytes: int


@dataclass(frozen=True)
class _Found:
    """A block on NVMe, and where it stands for the eviction policy."""

    place: Location
    record: np.void

    @property
    def kind(self) -> tuple[int, int, int, int]:
        """What all blocks of one reservation have in common."""
        shape = self.place.shape
        return (
            *(shape.layers, shape.layer_bytes),
            *(int(self.record["tenant"]), int(self.record["priority"])),
        )


class Prefetcher:
    """Fills an arena from whatever `tier()` is.

    Args:
        tier: the NVMe tier, or None while there is none.
        reading_bytes: blocks on their way from the disk at once.
    """

    def __init__(
        self, arena: NodeArena, tier: Callable[[], NodeTier | None], reading_bytes: int
    ) -> None:
        self._arena, self._tier, self._limit = arena, tier, reading_bytes
        self._wake = threading.Condition()
        self._queue: list[tuple[int, int, bytes, bytes]] = []
        self._queued: set[bytes] = set()
        self._order = count()
        self._flying: deque[_Batch] = deque()
        self._reading_bytes = 0
        self._counts: Counter[str] = Counter()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-prefetch", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing is being read."""
        with self._wake:
            return not self._queued and not self._reading_bytes

    def ask(self, digest: bytes, hashes: Sequence[bytes], priority: int = 0) -> int:
        """Queue blocks, higher priorities first; returns how many there was room for."""
        taken = 0
        with self._wake:
            for block_hash in hashes:
                key = digest + padded(block_hash)
                if key in self._queued:
                    continue
                if len(self._queued) >= QUEUE_BLOCKS:
                    self._counts["dropped_busy"] += 1
                    continue
                self._queued.add(key)
                entry = (-priority, next(self._order), digest, padded(block_hash))
                heapq.heappush(self._queue, entry)
                taken += 1
            self._wake.notify()
        return taken

    def close(self, timeout_s: float) -> bool:
        """Read no more; False if the disk may still write into the arena after that time."""
        with self._wake:
            self._stopping = True
            self._queue.clear()
            self._queued.clear()
            for batch in self._flying:
                batch.read.call_off()
            self._wake.notify()
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def stats(self) -> dict[str, Any]:
        """JSON-able sizes and counts."""
        with self._wake:
            return {
                "queued_blocks": len(self._queued),
                "reading_bytes": self._reading_bytes,
                "dropped": sum(n for name, n in self._counts.items() if name.startswith("dropped")),
                **self._counts,
            }

    # The thread

    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception:
                logger.exception("prefetch failed; it goes on")
                time.sleep(ERROR_PAUSE_S)

    def _turn(self) -> bool:
        with self._wake:
            while not self._landed() and not self._may_start():
                if self._stopping and not self._flying:
                    return False
                self._wake.wait()
            landed = [batch for batch in self._flying if batch.read.done()]
            digest, hashes = self._take() if self._may_start() else (b"", [])
        for batch in landed:
            self._end(batch)
        if hashes:
            try:
                self._start(digest, hashes)
            finally:
                with self._wake:
                    self._queued.difference_update(digest + name for name in hashes)
        return True

    def _landed(self) -> bool:
        return any(batch.read.done() for batch in self._flying)

    def _may_start(self) -> bool:
        return bool(self._queue) and self._reading_bytes < self._limit and not self._stopping

    def _take(self) -> tuple[bytes, list[bytes]]:
        """First blocks of the queue, of one namespace and priority."""
        priority, _, digest, _ = self._queue[0]
        hashes: list[bytes] = []
        while (
            self._queue
            and len(hashes) < BATCH_BLOCKS
            and (self._queue[0][0], self._queue[0][2]) == (priority, digest)
        ):
            hashes.append(heapq.heappop(self._queue)[3])
        return digest, hashes

    def _start(self, digest: bytes, hashes: list[bytes]) -> None:
        tier = self._tier()
        if tier is None or tier.state == "off":
            self._count("dropped_off", len(hashes))
            return
        groups: dict[tuple[int, int, int, int], list[_Found]] = {}
        for block_hash in hashes:
            place, record = tier.locate(digest, block_hash), tier.record(digest, block_hash)
            if place is None or record is None:
                self._count("absent", 1)
            else:
                found = _Found(place, record)
                groups.setdefault(found.kind, []).append(found)
        for group in groups.values():
            self._read(tier, group)

    def _read(self, tier: NodeTier, group: list[_Found]) -> None:
        """Reserve slots and have the disk fill them."""
        shape = group[0].place.shape
        records = np.array([found.record for found in group])
        names = [found.place.hash for found in group]
        row = self._arena.namespace(shape.digest, shape.payload_bytes, shape.layers)
        slots = self._arena.reserve(
            *(row, names, records["parent"], records["depth"]),
            tenant=int(records["tenant"][0]),
            priority=int(records["priority"][0]),
            compute_s=records["compute_s"],
        )
        given = slots >= 0
        if not given.all():
            refused = [name for name, g in zip(names, given, strict=True) if not g]
            there = int((self._arena.lookup(row, refused) >= 0).sum())
            self._count("already_there", there)
            self._count("dropped_no_room", len(refused) - there)
        slots = slots[given]
        if not len(slots):
            return
        places = [found.place for found, g in zip(group, given, strict=True) if g]
        layers = np.arange(shape.layers) * shape.layer_bytes
        try:
            addresses = self._arena.addresses(slots)[:, None] + layers
            read = tier.read(places, addresses, verify=payload_sums)
        except BaseException:
            self._arena.abandon(slots)
            raise
        batch = _Batch(read, slots, places, len(slots) * shape.payload_bytes)
        with self._wake:
            self._flying.append(batch)
            self._reading_bytes += batch.bytes
            if self._stopping:
                read.call_off()
        read.move.add_done_callback(lambda _: self._notify())

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _end(self, batch: _Batch) -> None:
        try:
            good = batch.read.wait(0.0)
            self._arena.abandon(batch.slots[~good])
            self._count("dropped_bad", int((~good).sum()))
            if good.any():
                sums = np.array([place.sums for place in batch.places])
                done = self._arena.publish(batch.slots[good], sums[good])
                self._count("loaded", int(done.sum()))
        finally:
            with self._wake:
                self._flying.remove(batch)
                self._reading_bytes -= batch.bytes

    def _count(self, name: str, blocks: int) -> None:
        if blocks:
            with self._wake:
                self._counts[name] += blocks
