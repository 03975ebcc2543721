"""LRU: the block used longest ago is evicted first."""

from __future__ import annotations

import numpy as np

from headrace_kvstore.policy.base import Mask, Policy, Slots, Table
from headrace_kvstore.policy.tree import Forest, worst_first


class LRU(Policy):
    """Policy that evicts the least recently leased or written block first, and of one prompt's
    blocks the deepest first."""

    name = "lru"

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        score = table["used_s"].astype(np.float64)
        return worst_first(table, Forest(table), score, now_s, need, among)
