"""LFU with decay: the blocks with the fewest recent uses are evicted first."""

from __future__ import annotations

import numpy as np

from headrace_kvstore.policy.base import Mask, Policy, Slots, Table
from headrace_kvstore.policy.tree import Forest, worst_first


class LFU(Policy):
    """Least decayed count of uses first.

    `_rate` holds the count as of `since_s`, of which half is forgotten every `half_life_s`:
    ``rate <- rate * 2^(-age / half_life) + 1 / half_life`` at each use.

    Parameters
    ----------
    since_s
        float64 (slots,), zeroed when new: when each slot's `rate` was last brought up to date.
    """

    name = "lfu"
    learns = True

    def __init__(self, since_s: np.ndarray, half_life_s: float = 600.0) -> None:
        if not half_life_s > 0:
            raise ValueError("half_life_s must be above 0")
        self._since_s, self._rate = since_s, np.zeros_like(since_s)
        self._half_life_s = half_life_s

    def _now(self, slots: Slots | slice, now_s: float) -> np.ndarray:
        age = np.maximum(now_s - self._since_s[slots], 0.0)
        decayed: np.ndarray = self._rate[slots] * np.exp2(-age / self._half_life_s)
        return decayed

    def touched(self, table: Table, slots: Slots, now_s: float, hit: bool) -> None:
        before = self._now(slots, now_s) if hit else 0.0
        self._rate[slots] = before + 1.0 / self._half_life_s
        self._since_s[slots] = now_s

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        score = self._now(slice(None), now_s)
        return worst_first(table, Forest(table), score, now_s, need, among)
