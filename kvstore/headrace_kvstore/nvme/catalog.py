"""Catalog of the blocks that a file tier holds, and their places. In memory, no I/O.

It is rebuilt from the files. Blocks lie in slots of segments. Slots are used in order and never
reused. Space is freed one segment at a time: the one whose blocks are worth least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from headrace_kvstore.blocks.slot_record import FREE, READY, SLOT
from headrace_kvstore.nvme.record import BlockShape, RecordHeader, padded

Value = Callable[[bytes, np.ndarray, float], np.ndarray]
"""(namespace digest, rows of SLOT (n,), now in monotonic seconds) -> value of keeping each, f8
(n,). Segments are of one size, so the sum over a segment's blocks is the value of its bytes."""


def use_per_second(digest: bytes, rows: np.ndarray, now_s: float) -> np.ndarray:
    """Return (1 + hits) / (1 + seconds since last use), the value if no policy is given."""
    return (1.0 + rows["hits"]) / (1.0 + np.maximum(0.0, now_s - rows["used_s"]))


@dataclass
class Segment:
    """One file. Slots below `next_slot` were given out."""

    number: int
    path: str
    file_bytes: int
    shape: BlockShape
    slots: int
    next_slot: int = 0
    users: int = 0
    """Reads and writes under way."""
    rows: np.ndarray = field(init=False)
    """Table row of each slot's block, -1 if it has none, (slots,)."""
    sums: np.ndarray = field(init=False)
    """(slots, layers) u64."""

    def __post_init__(self) -> None:
        self.rows = np.full(self.slots, -1, np.int64)
        self.sums = np.zeros((self.slots, self.shape.layers), np.uint64)


class Catalog:
    """Map of keys to slots and back. Not locked: callers hold the tier's lock."""

    def __init__(self) -> None:
        self.table = np.zeros(64, SLOT)
        """One row a block; rows in state FREE hold none."""
        self.segments: dict[int, Segment] = {}
        self._place = np.zeros((64, 2), np.int64)  # segment number, slot
        self._free = list(range(63, -1, -1))
        self._rows: dict[bytes, int] = {}
        self._namespaces: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def file_bytes(self) -> int:
        """Bytes of all segment files."""
        return sum(segment.file_bytes for segment in self.segments.values())

    def row(self, digest: bytes, block_hash: bytes) -> int | None:
        """Return the block's row in `table`."""
        return self._rows.get(digest + padded(block_hash))

    def contains(self, digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
        """Return for each block whether it is here, bool (n,)."""
        rows = self._rows
        return np.fromiter((digest + padded(h) in rows for h in hashes), bool, len(hashes))

    def leading(self, digest: bytes, keys: Sequence[bytes]) -> list[int]:
        """Return the rows of the leading run of blocks that are here. keys: padded hashes."""
        rows: list[int] = []
        for key in keys:
            row = self._rows.get(digest + key)
            if row is None:
                break
            rows.append(row)
        return rows

    def places(self, rows: Sequence[int]) -> Iterator[tuple[Segment, list[int]]]:
        """Yield the segments of rows in their order, with the slots of each run in one segment."""
        where = self._place[rows].tolist() if rows else []
        for number, run in groupby(where, key=lambda place: place[0]):
            yield self.segments[number], [slot for _, slot in run]

    def place(self, row: int) -> tuple[Segment, int]:
        """Return segment and slot of a row."""
        number, slot = self._place[row]
        return self.segments[int(number)], int(slot)

    def add(self, segment: Segment, slot: int, block: RecordHeader, stored_s: float) -> None:
        """Add a published record. The key must not be in the catalog: of two records of one key the
        caller adds the one with the later sequence."""
        if not self._free:
            size = len(self.table)
            self.table = np.concatenate([self.table, np.zeros(size, SLOT)])
            self._place = np.concatenate([self._place, np.zeros((size, 2), np.int64)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        row = self._free.pop()
        digest = segment.shape.digest
        self._rows[digest + block.hash] = row
        self._place[row] = segment.number, slot
        segment.rows[slot] = row
        segment.sums[slot] = block.sums
        entry = self.table[row]
        generation = entry["generation"] + 1
        self.table[row] = np.zeros((), SLOT)
        entry["state"], entry["generation"] = READY, generation
        entry["tenant"], entry["depth"] = block.tenant, block.depth
        entry["namespace"] = self._namespaces.setdefault(digest, len(self._namespaces))
        entry["compute_s"] = block.compute_s
        entry["parent"] = int.from_bytes(block.parent[:8], "little")
        entry["hash"] = block.hash
        entry["stored_s"] = entry["used_s"] = stored_s
        entry["bytes"] = segment.shape.record_bytes

    def remove(self, row: int) -> None:
        """Remove a block; its slot is not reused."""
        segment, slot = self.place(row)
        segment.rows[slot] = -1
        block_hash = self.table[row]["hash"].tobytes()
        del self._rows[segment.shape.digest + block_hash]
        self.table[row]["state"] = FREE
        self._free.append(row)

    def hashes(self, segment: Segment) -> Iterator[tuple[int, bytes]]:
        """Yield row and hash of each block in a segment."""
        for row in segment.rows[segment.rows >= 0].tolist():
            yield row, self.table[row]["hash"].tobytes()

    def rows(self, segment: Segment) -> np.ndarray:
        """Return a copy of the rows of a segment's blocks, SLOT (n,)."""
        return self.table[segment.rows[segment.rows >= 0]]

    def drop(self, segment: Segment, now_s: float) -> list[bytes] | None:
        """Remove a segment; return the hashes of its blocks. Return None, and remove nothing, if
        the segment is in use: being read or written, or with a leased block."""
        rows = segment.rows[segment.rows >= 0]
        entries = self.table[rows]
        held = entries["lease_until_s"] > now_s
        if segment.number not in self.segments or segment.users or held.any():
            return None
        for row in rows.tolist():
            self.remove(row)
        del self.segments[segment.number]
        return [entry["hash"].tobytes() for entry in entries]
