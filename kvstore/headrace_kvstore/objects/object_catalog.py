"""Which objects exist. In memory, no I/O.

Several objects may hold the same block, since clusters that share a bucket do not wait for each
other. Any of them serves a read. The block is gone when the last one is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headrace_kvstore.nvme.record import padded
from headrace_kvstore.objects.object_format import ObjectName
from headrace_kvstore.table import READY, SLOT


@dataclass(eq=False, slots=True)
class Held:
    """One object."""

    name: ObjectName
    text: str
    """Its name as the store has it."""
    used_s: float
    """Monotonic seconds of its last use here, or of its making."""
    hits: int = 0

    @property
    def key(self) -> bytes:
        """Of its block."""
        return self.name.shape.digest + self.name.hash


class ObjectCatalog:
    """Objects by name and by block. Not locked: the tier's lock is held around every call.

    Args:
        writer: whose objects are `own`.
    """

    def __init__(self, writer: str) -> None:
        self._writer = writer
        self.objects: dict[str, Held] = {}
        self.own: OrderedDict[str, Held] = OrderedDict()
        """Unused longest first."""
        self.own_bytes = 0
        self._by_key: dict[bytes, list[Held]] = {}

    @property
    def blocks(self) -> int:
        """Different ones."""
        return len(self._by_key)

    def add(self, held: Held) -> None:
        """Take an object in."""
        if held.text in self.objects:
            return
        self.objects[held.text] = held
        if held.name.writer == self._writer:
            self.own[held.text] = held
            self.own_bytes += held.name.size_bytes
        self._by_key.setdefault(held.key, []).append(held)

    def remove(self, text: str) -> None:
        """Forget an object."""
        held = self.objects.pop(text, None)
        if held is None:
            return
        if self.own.pop(text, None) is not None:
            self.own_bytes -= held.name.size_bytes
        same = self._by_key[held.key]
        same.remove(held)
        if not same:
            del self._by_key[held.key]

    def find(self, digest: bytes, block_hash: bytes) -> Held | None:
        """An object that holds this block: the one found last."""
        same = self._by_key.get(digest + padded(block_hash))
        return same[-1] if same else None

    def contains(self, digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
        """Which blocks are held, bool (n,)."""
        known = self._by_key
        return np.fromiter((digest + padded(h) in known for h in hashes), bool, len(hashes))

    def use(self, held: Held, now_s: float) -> None:
        """A read begins."""
        held.hits += 1
        held.used_s = now_s
        if held.text in self.own:
            self.own.move_to_end(held.text)

    def victims(self, excess_bytes: int) -> list[str] | None:
        """Own objects to remove for so many bytes less, unused longest first; None if all of them
        are not enough."""
        chosen: list[str] = []
        for held in self.own.values():
            if excess_bytes <= 0:
                break
            chosen.append(held.text)
            excess_bytes -= held.name.size_bytes
        return None if excess_bytes > 0 else chosen

    def contents(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Namespace digest and rows, SLOT (n,), of all blocks; `namespace` is 0."""
        by_digest: dict[bytes, list[Held]] = {}
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
