"""What a StoreNode asks of its tiers beyond what engines ask of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from headrace_kvstore import arena_kernels as kernels
from headrace_kvstore.arena import Arena, Hashes
from headrace_kvstore.arena_layout import EVENT_HEAD, NAMESPACE_COUNT
from headrace_kvstore.checksum import block_seed, checksum, layer_seeds
from headrace_kvstore.mover import Mover
from headrace_kvstore.node_settings import NodeSettings
from headrace_kvstore.table import pack_hashes
from headrace_kvstore.tiers.nvme import NvmeTier, TierEvent
from headrace_kvstore.tiers.segment import Location


class Space(NamedTuple):
    """A namespace of the arena."""

    digest: bytes
    block_bytes: int
    layers: int


class NodeArena(Arena):
    """The node's own handle on the arena."""

    @classmethod
    def of(cls, settings: NodeSettings) -> NodeArena:
        """Open it, or make it. Raises as `create_or_attach`."""
        arena = cls.create_or_attach(
            settings.name,
            settings.dram_bytes,
            folder=settings.folder,
            block_bytes=settings.block_bytes,
            layers=settings.layers,
        )
        assert isinstance(arena, cls)
        return arena

    def spaces(self) -> list[Space]:
        """Namespaces by row."""
        rows = self._t.spaces[: int(self._words[NAMESPACE_COUNT])]
        return [
            Space(row["digest"].tobytes(), int(row["block_bytes"]), int(row["layers"]))
            for row in rows
        ]

    def row_of(self, digest: bytes) -> int | None:
        """A namespace's row, if it is registered."""
        return next((i for i, s in enumerate(self.spaces()) if s.digest == digest), None)

    @property
    def next_seq(self) -> int:
        """Sequence number of the next event, read without the lock."""
        return int(self._words[EVENT_HEAD])

    def hold(self, row: int, hashes: Hashes, hold_s: float) -> np.ndarray:
        """As `lease`, but the blocks do not count as used: policies see readers only."""
        self._check_row(row)
        keys = pack_hashes(hashes)
        slots = np.full(len(keys), -1, np.int64)
        now_s = self._clock()
        with self._section:
            kernels.lookup(self._t, row, keys, slots)
            there = slots[slots >= 0]
            until_s, readers = self.table["lease_until_s"], self._t.readers
            readers[there] = np.where(until_s[there] > now_s, readers[there] + 1, 1)
            until_s[there] = np.maximum(until_s[there], now_s + hold_s)
        return slots

    def free_bytes(self) -> int:
        """Data bytes that hold no block."""
        return int(self._t.segments["bytes"].sum()) - int(self.table["bytes"].sum())

    def replaced(self) -> bool:
        """Whether another file has taken this one's name."""
        try:
            return os.stat(self._file.path).st_ino != os.fstat(self._file.lock.fd).st_ino
        except FileNotFoundError:
            return False


class NodeTier(NvmeTier):
    """The node's NVMe tier; readers in other processes are known by what they locate."""

    @classmethod
    def of(
        cls, settings: NodeSettings, mover: Mover, on_event: Callable[[TierEvent], None]
    ) -> NodeTier:
        """Own the folder of the settings, which there is. Raises FolderBusy."""
        assert settings.nvme_folder is not None
        tier = cls.open(
            settings.nvme_folder,
            settings.nvme_bytes,
            settings.segment_bytes,
            mover,
            events=[on_event],
        )
        assert isinstance(tier, cls)
        return tier

    def locate(self, digest: bytes, block_hash: bytes, lease_s: float = 0.0) -> Location | None:
        """As the tier's; with a lease it counts as a use."""
        with self._lock:
            place = super().locate(digest, block_hash, lease_s)
            row = self._catalog.row(digest, block_hash) if place and lease_s > 0 else None
            if row is not None:
                self._catalog.table[row]["hits"] += 1
                self._catalog.table[row]["used_s"] = time.monotonic()
            return place

    def record(self, digest: bytes, block_hash: bytes) -> np.void | None:
        """A copy of a block's row, SLOT."""
        with self._lock:
            row = self._catalog.row(digest, block_hash)
            return None if row is None else self._catalog.table[row].copy()

    def contents(self) -> Iterator[tuple[bytes, np.ndarray]]:
        """Namespace digest and rows, SLOT (n,), of each segment's blocks."""
        with self._lock:
            segments = list(self._catalog.segments.values())
        for segment in segments:
            with self._lock:
                rows = self._catalog.table[segment.rows[segment.rows >= 0]]
            if len(rows):
                yield segment.shape.digest, rows

    def heal(self) -> None:
        """Trust the disk again, after it failed, until it fails once more."""
        with self._lock:
            self.state, self.reason, self._failed_reads = "on", "", 0


def payload_sums(
    digest: bytes, block_hash: bytes, first_layer: int, addresses: np.ndarray, layer_bytes: int
) -> np.ndarray:
    """Checksums of layers in memory, u64 (n,): a `segment.Verify`."""
    seeds = layer_seeds(block_seed(digest, block_hash), first_layer + len(addresses))
    return checksum(addresses, layer_bytes, seeds[first_layer:])
