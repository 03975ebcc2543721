"""The arena with blocks that are kept from eviction: pinned by operators, or retained for a time.

Both set `kept_until_s` of a block's slot, to infinity or to the end of its retention. Both have
limits, so that the rest of the arena always has room for what engines save.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from headrace_kvstore.arena import kernels
from headrace_kvstore.arena.evicting_arena import EvictingArena, Hashes
from headrace_kvstore.arena.pins import MAX_PINNED_SHARE, MAX_RETAINED_SHARE, MAX_TENANT_SHARE
from headrace_kvstore.blocks.slot_record import PINNED, pack_hashes

HeldUntil = np.ndarray
"""`kept_until_s` of some slots, float64 [n]."""


class PinningArena(EvictingArena):
    """A mapped arena whose blocks can be pinned and retained."""

    def pin(self, namespace_id: int, hashes: Hashes, pinned: bool = True) -> np.ndarray:
        """Pin blocks, which keeps them from eviction, or unpin them.

        Returns bool [n]: whether the block is stored and, with `pinned`, is pinned. All pins
        together take at most MAX_PINNED_SHARE of the arena; the first of these blocks take
        precedence. If there is no room, the blocks of namespaces that no process uses are kept no
        longer. A pin replaces the block's retention: unpinned, it may be evicted. Retained blocks
        that are not pinned stay retained when they are unpinned.
        """
        if pinned:
            return self._keep(namespace_id, hashes, PINNED, lambda s: s != PINNED, self._pin_room)
        self._check_namespace(namespace_id)
        keys = pack_hashes(hashes)
        with self.section:
            slots = self._find(namespace_id, keys)
            there = slots[slots >= 0]
            held_s = self.table["kept_until_s"][there]
            self.table["kept_until_s"][there] = np.where(held_s == PINNED, 0.0, held_s)
        return slots >= 0

    def retain(
        self, namespace_id: int, hashes: Hashes, until_s: float, tenant: int = 0
    ) -> np.ndarray:
        """Keep blocks of one tenant from eviction until `until_s`; a block that is kept longer
        already stays so.

        Args:
            hashes: in order, root first; the first blocks take precedence.
            until_s: seconds of the arena's clock; finite.
            tenant: as in SLOT.

        Returns bool [n]: whether the block is stored and kept until then. All retained blocks
        together take at most MAX_RETAINED_SHARE of the arena. Those of one tenant take at most
        MAX_TENANT_SHARE of that, and of the tenant's quota. Two processes that retain blocks at the
        same time may exceed these limits by what one of them retains. Takes milliseconds in large
        arenas, so it must not run on a thread that an engine waits for.

        Raises ValueError if `until_s` is not finite.
        """
        if not math.isfinite(until_s):
            raise ValueError(f"blocks are retained until a time, not until {until_s}")
        now_s = self._clock()
        if until_s <= now_s:
            return np.zeros(len(hashes), np.bool_)
        return self._keep(
            *(namespace_id, hashes, until_s),
            lambda held_s: held_s <= now_s,
            lambda: self._retention_room(tenant, now_s),
        )

    def _keep(
        self,
        namespace_id: int,
        hashes: Hashes,
        until_s: float,
        is_new: Callable[[HeldUntil], np.ndarray],
        room_bytes: Callable[[], float],
    ) -> np.ndarray:
        """Keep blocks until `until_s`, the first ones before the last, while there is room.

        Args:
            is_new: returns which blocks take room that they do not take yet.
            room_bytes: returns the room; it reads the whole table.
        """
        self._check_namespace(namespace_id)
        keys, (sizes, held_s) = pack_hashes(hashes), self._held()
        slots = self._find(namespace_id, keys)
        there = slots[slots >= 0]
        room = room_bytes()
        if sizes[there][is_new(held_s[there])].sum() > room and self._release_unused(namespace_id):
            room = room_bytes()
        with self.section:
            slots = self._find(namespace_id, keys)
            places = np.flatnonzero(slots >= 0)
            there = slots[places]
            new = is_new(held_s[there])
            fits = ~new | (np.cumsum(sizes[there] * new) <= room)
            kept = there[fits]
            self.table["kept_until_s"][kept] = np.maximum(held_s[kept], until_s)
        slots[places[~fits]] = -1
        return slots >= 0

    def _find(self, namespace_id: int, keys: np.ndarray) -> np.ndarray:
        """Return slots as `lookup`, from a single search that takes no lock. keys: u64 [n, 4]."""
        slots = np.empty(len(keys), np.int64)
        kernels.lookup(self.tables, namespace_id, keys, slots)
        return slots

    def _held(self) -> tuple[np.ndarray, HeldUntil]:
        """Return the sizes of all slots, and until when they are kept, as views of the table."""
        return self.table["bytes"], self.table["kept_until_s"]

    def _pin_room(self) -> float:
        sizes, held_s = self._held()
        return self.pin_limit_bytes - float(sizes[held_s == PINNED].sum())

    def _retention_room(self, tenant: int, now_s: float) -> float:
        """Return the bytes of further blocks of a tenant that may be retained."""
        limit = MAX_RETAINED_SHARE * int(self.tables.segments["bytes"].sum())
        own_limit = MAX_TENANT_SHARE * min(limit, self._quota(tenant))
        retained = self._retained(now_s)
        sizes, tenants = self.table["bytes"][retained], self.table["tenant"][retained]
        return float(min(limit - sizes.sum(), own_limit - sizes[tenants == tenant].sum()))

    def _release_unused(self, namespace_id: int) -> bool:
        """Keep the blocks of namespaces that no living process uses, such as those of replaced
        weights, no longer; return whether there were any."""
        kept = self.table["kept_until_s"] > 0.0
        others = np.unique(self.table["namespace"][kept]).tolist()
        with self.section:
            unused = [each for each in others if each != namespace_id and self._file.unused(each)]
            released = np.flatnonzero(kept & np.isin(self.table["namespace"], unused))
            self.table["kept_until_s"][released] = 0.0
        return bool(unused)

    @property
    def pin_limit_bytes(self) -> int:
        """Bytes that pinned blocks may take."""
        return int(MAX_PINNED_SHARE * int(self.tables.segments["bytes"].sum()))

    def pinned(self) -> np.ndarray:
        """Return the rows of all pinned blocks, SLOT [n], a copy."""
        rows, _ = self.blocks()
        return rows[rows["kept_until_s"] == PINNED]

    def unpin(self, rows: np.ndarray) -> int:
        """Unpin blocks, so that they may be evicted; return how many were unpinned. rows: SLOT [n],
        copies."""
        count = 0
        for namespace_id in np.unique(rows["namespace"]).tolist():
            names = [h.tobytes() for h in rows["hash"][rows["namespace"] == namespace_id]]
            count += int(self.pin(namespace_id, names, pinned=False).sum())
        return count
