"""Asks the policy for victims, and reports prompts to it.

None of this happens under the arena's own lock, so lookups and leases never wait for it. A choice
may be outdated when it is carried out, so each slot comes with the generation in which it was
chosen. If a policy raises, the error is logged and LRU chooses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from headrace_kvstore.arena.geometry import Tables
from headrace_kvstore.arena.locking import LockBusyError
from headrace_kvstore.arena.room import own_victims, victims
from headrace_kvstore.policy.base import Policy, block_keys
from headrace_kvstore.policy.recency import LRU
from headrace_kvstore.policy.shared import SharedPolicy

logger = logging.getLogger("headrace.kvstore")

T = TypeVar("T")

Chosen = tuple[np.ndarray, np.ndarray]
"""Slots, and the generations in which they were chosen."""


class Eviction:
    """The policy at work on one arena. Calls raise LockBusyError where others keep the policy.

    Args:
        tables: the arena's; `table` is the slot table as SLOT.
        quotas: bytes that each tenant (its SLOT number) may hold.
        default_quota: bytes that any other tenant may hold; None for no limit. Blocks without a
            tenant have none.
    """

    def __init__(
        self,
        tables: Tables,
        table: np.ndarray,
        shared: SharedPolicy,
        quotas: Mapping[int, float],
        default_quota: float | None,
    ) -> None:
        self.shared = shared
        self._t, self._table = tables, table
        self._quotas, self._default_quota = dict(quotas), default_quota

    def victims(self, row: int, need: int, now_s: float) -> Chosen:
        """Slots whose eviction makes room for `need` blocks of a namespace, if there is a way."""
        generations = self._table["generation"].copy()
        size = int(self._t.spaces["slot_bytes"][row])

        slots = self._ask(
            lambda policy: victims(
                *(self._table, self._t.segments, row, size, need, now_s, policy.choose)
            )
        )
        return slots, generations[slots]

    def over_quota(self, tenant: int, asked_bytes: float, now_s: float) -> Chosen:
        """Blocks of the tenant's own that must go before it stores so many bytes."""
        limit = self._quotas.get(tenant, self._default_quota if tenant else None)
        if limit is None:
            return np.zeros(0, np.int64), np.zeros(0, np.uint32)
        generations = self._table["generation"].copy()
        held_bytes = float(self._table["bytes"][self._table["tenant"] == tenant].sum())
        excess_bytes = min(asked_bytes, held_bytes + asked_bytes - limit)
        slots = self._ask(
            lambda policy: own_victims(self._table, tenant, excess_bytes, now_s, policy.choose)
        )
        return slots, generations[slots]

    def prompt(self, row: int, heads: np.ndarray, at_s: float) -> None:
        """A prompt came at `at_s` whose full blocks are these."""
        if self.shared.learns and len(heads):
            self._ask(lambda policy: policy.prompt(block_keys(row, heads), at_s))

    def _ask(self, call: Callable[[Policy], T]) -> T:
        try:
            with self.shared as policy:
                return call(policy)
        except LockBusyError:
            raise
        except Exception:
            logger.exception("policy %s failed; LRU decides", self.shared.name)
            return call(LRU())
