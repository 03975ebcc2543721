"""Lookup of the blocks in a file tier: whether they are there, where they lie, their records."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from headrace_kvstore.nvme.record import BlockShape, padded
from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.nvme.segment_space import SegmentSpace

LOCATED_AT_ONCE = 256
"""Maximum number of blocks located under one hold of the lock: half a millisecond."""


class BlockLookup(SegmentSpace):
    """Segments whose blocks can be looked up. Nothing is read from the disk."""

    def contains(self, digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
        """Return for each block whether it can be read, bool (n,); change nothing."""
        with self._lock:
            if self.state == "off":
                return np.zeros(len(hashes), bool)
            return self._catalog.contains(digest, hashes)

    def locate(self, digest: bytes, block_hash: bytes, lease_s: float = 0.0) -> Location | None:
        """Return where a block lies, or None. With a lease, for a reader, the segment is not
        removed for so long, and the block counts as used."""
        with self._lock:
            row = None if self.state == "off" else self._catalog.row(digest, block_hash)
            if row is None:
                return None
            segment, slot = self._catalog.place(row)
            if lease_s > 0:
                entry = self._catalog.table[row]
                now_s = time.monotonic()
                entry["lease_until_s"] = max(entry["lease_until_s"], now_s + lease_s)
                entry["hits"] += 1
                entry["used_s"] = now_s
            sums = segment.sums[slot].copy()
            key = padded(block_hash)
            return Location(segment.path, segment.number, slot, segment.shape, key, sums)

    def locate_leading(
        self, digest: bytes, hashes: Sequence[bytes], lease_s: float = 0.0
    ) -> list[Location]:
        """Locate the leading run of blocks that are here and of one shape, as `locate`. The lock is
        held for LOCATED_AT_ONCE blocks at a time."""
        found: list[Location] = []
        for first in range(0, len(hashes), LOCATED_AT_ONCE):
            some = hashes[first : first + LOCATED_AT_ONCE]
            with self._lock:
                more = self._locate_some(digest, some, lease_s, found[0].shape if found else None)
            found += more
            if len(more) < len(some):
                break
        return found

    def _locate_some(
        self, digest: bytes, hashes: Sequence[bytes], lease_s: float, shape: BlockShape | None
    ) -> list[Location]:
        if self.state == "off":
            return []
        catalog = self._catalog
        found: list[Location] = []
        keys = [padded(block_hash) for block_hash in hashes]
        rows = catalog.leading(digest, keys)
        for segment, slots in catalog.places(rows):
            shape = shape or segment.shape
            if segment.shape != shape:
                break
            here = segment.path, segment.number
            found += [
                Location(*here, slot, shape, key, sums)
                for slot, key, sums in zip(
                    slots, keys[len(found) :], segment.sums[slots], strict=False
                )
            ]
        rows = rows[: len(found)]
        if lease_s > 0 and rows:
            table, now_s = catalog.table, time.monotonic()
            until_s = np.maximum(table["lease_until_s"][rows], now_s + lease_s)
            table["lease_until_s"][rows] = until_s
            table["hits"][rows] += 1
            table["used_s"][rows] = now_s
        return found

    def rows(self) -> np.ndarray:
        """Return a copy of the table, SLOT (n,), of the blocks that are here."""
        with self._lock:
            table = self._catalog.table
            return table[table["state"] > 0]

    def record(self, digest: bytes, block_hash: bytes) -> np.void | None:
        """Return a copy of a block's row, SLOT."""
        with self._lock:
            row = self._catalog.row(digest, block_hash)
            return None if row is None else self._catalog.table[row].copy()

    def contents(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield namespace digest and rows, SLOT (n,), of each segment's blocks."""
        with self._lock:
            segments = list(self._catalog.segments.values())
        for segment in segments:
            with self._lock:
                rows = self._catalog.table[segment.rows[segment.rows >= 0]]
            if len(rows):
                yield segment.shape.digest, rows
