"""The arena with its eviction policy: feeds the policy, and evicts the blocks that it names."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace_kvstore.arena.arena_map import ArenaMap
from headrace_kvstore.arena.geometry import POLICY
from headrace_kvstore.arena.locking import LockBusyError
from headrace_kvstore.arena.shared_file import SharedFile
from headrace_kvstore.arena.victim_selection import own_victims, victims
from headrace_kvstore.blocks.slot_record import pack_hashes
from headrace_kvstore.policy.base import block_keys, slot_keys
from headrace_kvstore.policy.registry import NAMES, warm
from headrace_kvstore.policy.shared_policy import SharedPolicy

Chosen = tuple[np.ndarray, np.ndarray]
"""Slots, and the generations in which they were chosen: a choice may be outdated when it is carried
out, since it is made without the arena's lock."""

Hashes = Sequence[bytes] | np.ndarray
"""Block hashes: bytes of at most 32 each, or an array of n rows of 32 bytes."""


class EvictingArena(ArenaMap):
    """A mapped arena with the policy and quotas that decide which blocks are evicted."""

    def __init__(
        self,
        file: SharedFile,
        quotas: Mapping[int, float] | None = None,
        default_quota: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(file, clock)
        name = NAMES.get(int(self.words[POLICY]), "lru")
        warm(name)
        self.policy = SharedPolicy(
            name, self.tables.state, self.geometry.size_bytes, file.second_lock
        )
        self._quotas, self._default_quota = dict(quotas or {}), default_quota

    def record_prompt(self, namespace_id: int, hashes: Hashes, at_s: float | None = None) -> bool:
        """Tell the policy that a prompt with these full blocks arrived at `at_s`, else now.

        The blocks are in order, root first, wherever they were found. The call may wait while
        another process uses the policy, so it must not run on a thread that an engine or a client
        waits for. Returns False if another process held the policy for too long.
        """
        self._check_namespace(namespace_id)
        keys = pack_hashes(hashes)
        at_s = self._clock() if at_s is None else at_s
        try:
            if self.policy.learns and len(keys):
                heads = np.ascontiguousarray(keys[:, 0])
                self.policy.ask(lambda policy: policy.prompt(block_keys(namespace_id, heads), at_s))
        except LockBusyError:
            return False
        return True

    def set_load_cost(self, medium: str, byte_s: float) -> None:
        """Tell the policy the seconds to load one more byte from a medium; takes no lock."""
        self.policy.policy.set_load_cost(medium, byte_s)

    def load_cost_s_per_byte(self, medium: str) -> float:
        """Return the seconds to load one more byte from a medium; 0 if it was not measured."""
        return self.policy.policy.seconds_per_byte(medium)

    def rates(self, digest: bytes, rows: np.ndarray) -> np.ndarray:
        """Return the hits per second that the policy expects of blocks of one namespace, float64
        [n], whichever tier they are in; takes no lock. rows: SLOT [n]."""
        namespace_id = self.find_namespace(digest)
        keys = slot_keys(rows) if namespace_id is None else slot_keys(rows, namespace_id)
        return self.policy.policy.rates(keys, rows, self._clock())

    def close(self) -> None:
        if hasattr(self, "policy"):
            del self.policy
        super().close()

    def _victims(self, namespace_id: int, need: int, now_s: float) -> Chosen:
        """Choose slots whose eviction makes room for `need` blocks of a namespace, if possible."""
        generations = self.table["generation"].copy()
        room_for = namespace_id, int(self.tables.namespaces["slot_bytes"][namespace_id])
        slots = self.policy.ask(
            lambda policy: victims(
                self.table, self.tables.segments, *room_for, need, now_s, policy.choose
            )
        )
        return slots, generations[slots]

    def _quota(self, tenant: int) -> float:
        """Return the bytes that a tenant's blocks may take; infinite without a quota."""
        limit = self._quotas.get(tenant, self._default_quota if tenant else None)
        return math.inf if limit is None else limit

    def _over_quota(self, tenant: int, asked_bytes: float, now_s: float) -> Chosen:
        """Choose blocks of the tenant that must be evicted before it stores so many bytes."""
        limit = self._quota(tenant)
        if limit == math.inf:
            return np.zeros(0, np.int64), np.zeros(0, np.uint32)
        generations = self.table["generation"].copy()
        held_bytes = float(self.table["bytes"][self.table["tenant"] == tenant].sum())
        excess_bytes = min(asked_bytes, held_bytes + asked_bytes - limit)
        slots = self.policy.ask(
            lambda policy: own_victims(self.table, tenant, excess_bytes, now_s, policy.choose)
        )
        return slots, generations[slots]
