"""Policies to compare the store's with: a fixed time to live, a clairvoyant, a perfect forecast."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.kvpolicy.foresight import next_use_s
from benchmarks.kvpolicy.workload import Workload
from benchmarks.sessions.agents import Session, arrivals, next_turn_by
from headrace_kvstore.policy.base import Keys, Mask, Policy, Slots, Table
from headrace_kvstore.policy.cost_aware import CostAware, state_dtype
from headrace_kvstore.policy.recency import LRU
from headrace_kvstore.policy.tree import Forest, worst_first


class FixedTtl(LRU):
    """Keep each block for `ttl_s` after its last use, then LRU. If all blocks are younger, a new
    block finds no room and is not stored."""

    name = "ttl"

    def __init__(self, ttl_s: float = 10.0) -> None:
        self._ttl_s = ttl_s

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        old = table["used_s"] + self._ttl_s <= now_s
        return super().choose(table, now_s, need, old if among is None else old & among)


class Belady(Policy):
    """Evict the block whose next use is furthest away, known from the workload; of one prompt's
    blocks the deepest first. A block's next use is never later than that of a block that needs
    it."""

    name = "belady"

    def __init__(self, work: Workload, slots: int) -> None:
        self._starts, self._next_s = work.starts, next_use_s(work)
        self._slot_next_s = np.full(slots, np.inf)
        self._prompt = -1

    def prompt(self, keys: Keys, now_s: float) -> None:
        self._prompt += 1

    def touched(self, table: Table, slots: Slots, now_s: float, hit: bool) -> None:
        upcoming = self._next_s[self._starts[self._prompt] : self._starts[self._prompt + 1]]
        self._slot_next_s[slots] = upcoming[table["depth"][slots]]

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        return worst_first(table, Forest(table), -self._slot_next_s, now_s, need, among)


class KnownGaps(CostAware):
    """The store's policy that is told the distribution of each session's gaps: what a forecast can
    reach that knows all but the future."""

    def __init__(self, found: list[Session], seconds: float, slots: int) -> None:
        super().__init__(np.zeros(1, state_dtype()))
        self._session = [i for _, i, _ in arrivals(found, seconds)]
        medians_s = np.geomspace(1.0, 5.0, 13)
        self._class = np.array(
            [np.abs(np.log(session.median_s / medians_s)).argmin() for session in found]
        )
        self._ages_s = np.concatenate([[0.0], np.geomspace(0.1, 2_000.0, 170)])
        self._best = np.array([_best_rates(self._ages_s, median_s) for median_s in medians_s])
        self._slot_session = np.zeros(slots, np.int64)
        self._prompt = -1

    def prompt(self, keys: Keys, now_s: float) -> None:
        self._prompt += 1

    def touched(self, table: Table, slots: Slots, now_s: float, hit: bool) -> None:
        self._slot_session[slots] = self._session[self._prompt]

    def _waiting(
        self, keys: Keys, rows: Table, now_s: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        age_s = now_s - rows["used_s"].astype(np.float64)
        at = np.searchsorted(self._ages_s, age_s).clip(0, len(self._ages_s) - 1)
        return self._slot_session + 1, self._best[self._class[self._slot_session], at]


def _best_rates(ages_s: NDArray[np.float64], median_s: float) -> NDArray[np.float64]:
    """Return the Gittins index at each age, as `hazard.best_rate` does."""
    by = next_turn_by(ages_s, median_s)
    held_s = np.concatenate([[0.0], np.cumsum((1.0 - (by[1:] + by[:-1]) / 2) * np.diff(ages_s))])
    best = [
        ((by[a + 1 :] - by[a]) / (held_s[a + 1 :] - held_s[a])).max() for a in range(len(by) - 1)
    ]
    return np.array([*best, 0.0])
