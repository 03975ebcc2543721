"""Asks the policy for victims and admission, and reports prompts and writes to it.

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
from headrace_kvstore.arena.room import own_victims, roomy, runs, victims
from headrace_kvstore.policy.base import Keys, Policy, block_keys, parent_keys, slot_keys
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
        self._per_segment = len(table) // len(tables.segments)
        self._quotas, self._default_quota = dict(quotas), default_quota

    def victims(self, row: int, need: int, now_s: float) -> Chosen:
        """Slots whose eviction makes room for `need` blocks of a namespace, if there is a way."""
        generations = self._table["generation"].copy()
        size = int(self._t.spaces["slot_bytes"][row])

        def chosen(policy: Policy) -> np.ndarray:
            found = victims(*(self._table, self._t.segments, row, size, need, now_s, policy.choose))
            policy.given_up(self._table, found)
            return found

        slots = self._ask(chosen)
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

    def admitted(self, rows: np.ndarray) -> np.ndarray:
        """Which of these blocks, none of which is there, are worth the room: bool (n,).

        All are while there is room. rows: SLOT [n], of one namespace.
        """
        wanted = np.ones(len(rows), np.bool_)
        if not self.shared.learns or not len(rows):
            return wanted
        row = int(rows["namespace"][0])
        size = int(self._t.spaces["slot_bytes"][row])
        if roomy(self._t.segments, row, size, self._per_segment):
            return wanted

        compute_s, load_s = (rows[name].astype(np.float64) for name in ("compute_s", "load_s"))
        sizes = np.full(len(rows), float(size))

        def decide(policy: Policy) -> None:
            for run, trail in _trails(rows):
                ticket = policy.ticket(trail)
                count = policy.admit(ticket, compute_s[run], load_s[run], sizes[run])
                wanted[run][count:] = False

        self._ask(decide)
        return wanted

    def written(self, slots: np.ndarray, now_s: float) -> None:
        """Blocks have got these slots."""
        if not self.shared.learns:
            return
        rows = self._table[slots]

        def note(policy: Policy) -> None:
            for run, trail in _trails(rows):
                policy.touched(self._table, slots[run], policy.ticket(trail), now_s, False)

        self._ask(note)

    def prompt(self, row: int, heads: np.ndarray, slots: np.ndarray, at_s: float) -> None:
        """A prompt came at `at_s` whose full blocks are these; slots: where they are, -1 if not."""
        if not self.shared.learns or not len(heads):
            return
        found = int(np.argmax(slots < 0)) if (slots < 0).any() else len(slots)

        def note(policy: Policy) -> None:
            ticket = policy.prompt(block_keys(row, heads), at_s)
            policy.touched(self._table, slots[:found], ticket, at_s, True)

        self._ask(note)

    def _ask(self, call: Callable[[Policy], T]) -> T:
        try:
            with self.shared as policy:
                return call(policy)
        except LockBusyError:
            raise
        except Exception:
            logger.exception("policy %s failed; LRU decides", self.shared.name)
            return call(LRU())


def _trails(rows: np.ndarray) -> list[tuple[slice, Keys]]:
    """Each run of these blocks (SLOT [n]), with its keys, deepest first, and its parent's."""
    keys, parents = slot_keys(rows), parent_keys(rows)
    return [(run, np.append(keys[run][::-1], parents[run][:1])) for run in runs(rows)]
