"""Priority: blocks ranked lowest by operator or request are evicted first, LRU among equals."""

from __future__ import annotations

import numpy as np

from headrace_kvstore.policy.base import Mask, Policy, Slots, Table
from headrace_kvstore.policy.tree import Forest, worst_first


class Priority(Policy):
    """Lowest priority first; within one priority the least recently used. The store has no
    field for it: the replay keeps it in `tenant`."""

    name = "priority"

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        # Ranks keep the two keys exact in one float: (priority, used_s) -> position.
        rank = np.lexsort((table["used_s"], table["tenant"]))
        sorted_pairs = table[["tenant", "used_s"]][rank]
        steps = np.r_[
            0,
            (np.diff(sorted_pairs["tenant"]) != 0) | (np.diff(sorted_pairs["used_s"]) != 0),
        ]
        score = np.empty(len(table))
        score[rank] = np.cumsum(steps)
        return worst_first(table, Forest(table), score, now_s, need, among)
