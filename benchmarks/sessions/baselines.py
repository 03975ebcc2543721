"""The policies that the store's own are compared with: a fixed time to live, and a clairvoyant."""

from __future__ import annotations

import numpy as np

from benchmarks.kvpolicy.foresight import next_use_s
from benchmarks.kvpolicy.workload import Workload
from headrace_kvstore.policy.base import Keys, Mask, Policy, Slots, Table
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
