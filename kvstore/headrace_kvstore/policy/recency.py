"""LRU: what was used longest ago goes first."""

from __future__ import annotations

import numpy as np

from headrace_kvstore.policy.base import Mask, Policy, Slots, Table
from headrace_kvstore.policy.tree import Forest, worst_first


class LRU(Policy):
    """Least recently leased or written first; of one prompt's blocks the deepest first."""

    name = "lru"

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        score = table["used_s"].astype(np.float64)
        return worst_first(table, Forest(table), score, now_s, need, among)
