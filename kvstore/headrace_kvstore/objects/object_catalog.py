"""Catalog of existing objects. In memory, no I/O.

Several objects may hold the same block, since clusters that share a bucket do not wait for each
other. Any of them serves a read. The block is missing once the last one is removed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace_kvstore.blocks.slot_record import READY, SLOT
from headrace_kvstore.nvme.record import padded
from headrace_kvstore.objects.object_format import ObjectName


@dataclass(eq=False, slots=True)
class StoredObject:
    """One object."""

    name: ObjectName
    text: str
    """Name of the object in the store."""
    used_s: float
    """Monotonic seconds of its last use here, or of its making."""
    hits: int = 0
    listing: int = 0
    """Number of the last walk in which it was seen or made."""

    @property
    def key(self) -> bytes:
        """Key of its block."""
        return self.name.shape.digest + self.name.hash


class UseOrder:
    """Objects of a dictionary in the order of their last use. A heap whose entries are corrected
    when they reach the top, so that a use costs nothing."""

    _SPARE = 1024

    def __init__(self, objects: dict[str, StoredObject]) -> None:
        self._objects = objects
        self._heap: list[tuple[float, str]] = []

    def add(self, held: StoredObject) -> None:
        """Add an object that is in the dictionary."""
        heapq.heappush(self._heap, (held.used_s, held.text))
        if (
            len(self._heap) > 2 * len(self._objects) + self._SPARE
        ):  # most entries are of removed ones
            self._heap = [(each.used_s, each.text) for each in self._objects.values()]
            heapq.heapify(self._heap)

    def pop(self) -> StoredObject:
        """Remove and return the object unused longest; the caller removes it from the dictionary.
        Raises IndexError if there is none."""
        while True:
            used_s, text = self._heap[0]
            held = self._objects.get(text)
            if held is not None and held.used_s > used_s:
                heapq.heapreplace(self._heap, (held.used_s, text))
                continue
            heapq.heappop(self._heap)
            if held is not None:
                return held


class ObjectCatalog:
    """Objects by name and by block. Not locked: callers hold the tier's lock.

    Args:
        writer: name of the writer of `own` objects.
    """

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self.objects: dict[str, StoredObject] = {}
        self.own: dict[str, StoredObject] = {}
        self.own_bytes = 0
        self._by_use = UseOrder(self.objects)
        self._own_by_use = UseOrder(self.own)
        self._by_key: dict[bytes, list[StoredObject]] = {}

    @property
    def blocks(self) -> int:
        """Number of different blocks."""
        return len(self._by_key)

    def add(self, held: StoredObject) -> None:
        """Add an object."""
        if held.text in self.objects:
            return
        self.objects[held.text] = held
        self._by_use.add(held)
        if self.is_own(held):
            self.own[held.text] = held
            self._own_by_use.add(held)
            self.own_bytes += held.name.size_bytes
        self._by_key.setdefault(held.key, []).append(held)

    def remove(self, text: str) -> None:
        """Remove an object."""
        held = self.objects.pop(text, None)
        if held is None:
            return
        if self.own.pop(text, None) is not None:
            self.own_bytes -= held.name.size_bytes
        same = self._by_key[held.key]
        same.remove(held)
        if not same:
            del self._by_key[held.key]

    def find(self, digest: bytes, block_hash: bytes) -> StoredObject | None:
        """Return the object found last of those that hold this block."""
        same = self._by_key.get(digest + padded(block_hash))
        return same[-1] if same else None

    def contains(self, digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
        """Return for each block whether an object holds it, bool (n,)."""
        known = self._by_key
        return np.fromiter((digest + padded(h) in known for h in hashes), bool, len(hashes))

    def use(self, held: StoredObject, now_s: float) -> None:
        """Record that a read begins."""
        held.hits += 1
        held.used_s = now_s

    def is_own(self, held: StoredObject) -> bool:
        """Whether this tier's writer made the object."""
        return held.name.writer == self._writer

    def take_victims(self, excess_bytes: int) -> list[str] | None:
        """Remove the own objects unused longest, until at least `excess_bytes` are removed. Returns
        their names; None, with nothing removed, if all of them are not enough."""
        if excess_bytes > self.own_bytes:
            return None
        chosen: list[str] = []
        while excess_bytes > 0:
            held = self._own_by_use.pop()
            chosen.append(held.text)
            excess_bytes -= held.name.size_bytes
            self.remove(held.text)
        return chosen

    def shrink(self, most_objects: int) -> list[StoredObject]:
        """Remove the objects unused longest until `most_objects` are left; return the removed
        ones."""
        gone: list[StoredObject] = []
        while len(self.objects) > most_objects:
            gone.append(self._by_use.pop())
            self.remove(gone[-1].text)
        return gone

    def contents(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Yield namespace digest and rows, SLOT (n,), of all blocks; `namespace` is 0."""
        by_digest: dict[bytes, list[StoredObject]] = {}
        for same in self._by_key.values():
            by_digest.setdefault(same[-1].name.shape.digest, []).append(same[-1])
        for digest, found in by_digest.items():
            rows = np.zeros(len(found), SLOT)
            rows["state"] = READY
            for row, held in zip(rows, found, strict=True):
                name = held.name
                row["hash"], row["bytes"] = name.hash, name.shape.payload_bytes
                row["used_s"] = row["stored_s"] = held.used_s
                row["hits"] = held.hits
                for field in ("parent", "depth", "tenant", "compute_s"):
                    row[field] = getattr(name, field)
            yield digest, rows
