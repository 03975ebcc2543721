"""Which objects exist, and which blocks are in them. In memory, no I/O.

Several objects may hold the same block, since clusters that share a bucket do not wait for each
other. Any of them serves a read. The block is gone when the last one is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace_kvstore.nvme.record import Block, padded
from headrace_kvstore.objects.object_format import ObjectName
from headrace_kvstore.table import READY, SLOT


@dataclass(eq=False)
class Bundle:
    """One object and its blocks; None where a block is known to be bad."""

    name: ObjectName
    blocks: list[Block | None]
    used_s: float
    """Monotonic seconds of its last use here, or of its making."""
    hits: int = 0
    readers: int = 0

    @property
    def digest(self) -> bytes:
        """The namespace."""
        return self.name.shape.digest


@dataclass(frozen=True)
class Place:
    """Where a block lies."""

    bundle: Bundle = field(repr=False)
    position: int

    @property
    def block(self) -> Block:
        """What its header says."""
        block = self.bundle.blocks[self.position]
        assert block is not None
        return block


class ObjectCatalog:
    """Blocks by key, objects by name. Not locked: the tier's lock is held around every call."""

    def __init__(self) -> None:
        self.bundles: dict[str, Bundle] = {}
        self._places: dict[bytes, list[Place]] = {}
        self.pinned: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, bundle: Bundle) -> list[bytes]:
        """Take an object in; hashes of the blocks that nothing held before."""
        if str(bundle.name) in self.bundles:
            return []
        self.bundles[str(bundle.name)] = bundle
        new = []
        for position, block in enumerate(bundle.blocks):
            if block is not None:
                places = self._places.setdefault(bundle.digest + block.hash, [])
                if not places:
                    new.append(block.hash)
                places.append(Place(bundle, position))
        return new

    def remove(self, name: str) -> list[bytes]:
        """Forget an object; hashes of the blocks that nothing holds now."""
        bundle = self.bundles.pop(name, None)
        if bundle is None:
            return []
        held = [i for i, block in enumerate(bundle.blocks) if block is not None]
        return [h for i in held if (h := self._drop(Place(bundle, i))) is not None]

    def _drop(self, place: Place) -> bytes | None:
        """Forget one place; the block's hash if it was the last."""
        block_hash = place.block.hash
        key = place.bundle.digest + block_hash
        left = [p for p in self._places.get(key, []) if p != place]
        if left:
            self._places[key] = left
            return None
        self._places.pop(key, None)
        self.pinned.discard(key)
        return block_hash

    def forget(self, place: Place) -> bool:
        """Forget a bad copy of a block; whether nothing holds the block now."""
        bundle = place.bundle
        if str(bundle.name) not in self.bundles or bundle.blocks[place.position] is None:
            return False
        last = self._drop(place)
        bundle.blocks[place.position] = None
        return last is not None

    def find(self, digest: bytes, block_hash: bytes) -> Place | None:
        """A place of this block: the one found last."""
        places = self._places.get(digest + padded(block_hash))
        return places[-1] if places else None

    def contains(self, digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
        """Which blocks are held, bool (n,)."""
        known = self._places
        return np.fromiter((digest + padded(h) in known for h in hashes), bool, len(hashes))

    def pin(self, digest: bytes, block_hash: bytes, pinned: bool) -> bool:
        """Keep whatever holds a block, or let it go; False if nothing holds it."""
        key = digest + padded(block_hash)
        if key not in self._places:
            return False
        if pinned:
            self.pinned.add(key)
        else:
            self.pinned.discard(key)
        return True

    def written_bytes(self, writer: str) -> int:
        """Bytes of all objects of one writer."""
        names = [bundle.name for bundle in self.bundles.values()]
        return sum(name.size_bytes for name in names if name.writer == writer)

    def victims(self, writer: str, excess_bytes: int) -> list[Bundle]:
        """Objects of one writer to remove so that it holds `excess_bytes` less, unused longest
        first; fewer where the others are being read or hold a pinned block."""
        mine = [b for b in self.bundles.values() if b.name.writer == writer]
        chosen: list[Bundle] = []
        for bundle in sorted(mine, key=lambda bundle: bundle.used_s):
            if excess_bytes <= 0:
                break
            if not bundle.readers and not self._holds_pinned(bundle):
                chosen.append(bundle)
                excess_bytes -= bundle.name.size_bytes
        return chosen

    def _holds_pinned(self, bundle: Bundle) -> bool:
        keys = (bundle.digest + block.hash for block in bundle.blocks if block is not None)
        return bool(self.pinned) and any(key in self.pinned for key in keys)

    def contents(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Namespace digest and rows, SLOT (n,), of each object's blocks, each block once."""
        for bundle in list(self.bundles.values()):
            first = [
                block
                for i, block in enumerate(bundle.blocks)
                if block is not None
                and self._places[bundle.digest + block.hash][-1] == Place(bundle, i)
            ]
            if first:
                yield bundle.digest, slot_rows(bundle, first)


def slot_rows(bundle: Bundle, blocks: Sequence[Block]) -> np.ndarray:
    """Rows of SLOT, as policies and event makers read them; `namespace` is 0."""
    rows = np.zeros(len(blocks), SLOT)
    rows["state"] = READY
    rows["used_s"] = rows["stored_s"] = bundle.used_s
    rows["hits"] = bundle.hits
    rows["bytes"] = bundle.name.shape.payload_bytes
    for row, block in zip(rows, blocks, strict=True):
        row["hash"], row["depth"], row["tenant"] = block.hash, block.depth, block.tenant
        row["priority"], row["compute_s"] = block.priority, block.compute_s
        row["parent"] = int.from_bytes(block.parent[:8], "little")
    return rows
