"""The arena with its pins, which keep blocks from eviction up to a share of the arena."""

from __future__ import annotations

import numpy as np

from headrace_kvstore.arena import kernels
from headrace_kvstore.arena.evicting_arena import EvictingArena, Hashes
from headrace_kvstore.arena.pins import MAX_PINNED_SHARE
from headrace_kvstore.blocks.slot_record import pack_hashes


class PinningArena(EvictingArena):
    """A mapped arena whose blocks can be pinned."""

    def pin(self, namespace_id: int, hashes: Hashes, pinned: bool = True) -> np.ndarray:
        """Pin blocks, which keeps them from eviction, or unpin them.

        Returns bool [n]: whether the block is stored and, with `pinned`, is pinned. All pins
        together take at most MAX_PINNED_SHARE of the arena; the first of these blocks take
        precedence. If there is no room, the pins of namespaces that no process uses are removed.
        """
        self._check_namespace(namespace_id)
        keys = pack_hashes(hashes)
        slots = np.empty(len(keys), np.int64)
        room = self.pin_limit_bytes - self.table["bytes"][self.table["pinned"] == 1].sum()
        with self.section:
            kernels.lookup(self.tables, namespace_id, keys, slots)
            there = slots[slots >= 0]
            if pinned:
                new = self.table["pinned"][there] == 0
                taken = np.cumsum(self.table["bytes"][there] * new)
                if len(taken) and taken[-1] > room:
                    room += self._unpin_unused_namespaces(namespace_id)
                fits = taken <= room
                slots[np.flatnonzero(slots >= 0)[~fits & new]] = -1
                there = there[fits | ~new]
            self.table["pinned"][there] = pinned
        return slots >= 0

    def _unpin_unused_namespaces(self, namespace_id: int) -> float:
        """Unpin the blocks of namespaces that no living process uses, such as those of replaced
        weights; return their bytes. In a section."""
        pinned = (self.table["pinned"] == 1) & (self.table["namespace"] != namespace_id)
        freed = 0.0
        for other in np.unique(self.table["namespace"][pinned]).tolist():
            if self._file.unused(other):
                slots = np.flatnonzero(pinned & (self.table["namespace"] == other))
                freed += float(self.table["bytes"][slots].sum())
                self.table["pinned"][slots] = 0
        return freed

    @property
    def pin_limit_bytes(self) -> int:
        """Bytes that pinned blocks may take."""
        return int(MAX_PINNED_SHARE * int(self.tables.segments["bytes"].sum()))

    def pinned(self) -> np.ndarray:
        """Return the rows of all pinned blocks, SLOT [n], a copy."""
        rows, _ = self.blocks()
        return rows[rows["pinned"] == 1]

    def unpin(self, rows: np.ndarray) -> int:
        """Unpin blocks, so that they may be evicted; return how many were unpinned. rows: SLOT [n],
        copies."""
        count = 0
        for namespace_id in np.unique(rows["namespace"]).tolist():
            names = [h.tobytes() for h in rows["hash"][rows["namespace"] == namespace_id]]
            count += int(self.pin(namespace_id, names, pinned=False).sum())
        return count
