"""The cost-aware policy with its forecast replaced by the truth: what its other parts can reach.

Its distance from the optimum is what ordering, batches and prefixes cost; the distance of the
real policy from it is what the forecast lacks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.kvpolicy.workload import Workload
from headrace_kvstore.policy.base import Keys, Slots, Table, saved_s
from headrace_kvstore.policy.cost_aware import CostAware, state_dtype
from headrace_kvstore.policy.tree import Forest

Floats = NDArray[np.float64]


def next_use_s(work: Workload) -> Floats:
    """When the block of each entry of `work.blocks` is asked for next; inf for never."""
    arrival_s = np.repeat(work.arrival_s, np.diff(work.starts))
    order = np.argsort(work.blocks, kind="stable")
    following = np.full(len(order), np.inf)
    same = work.blocks[order][1:] == work.blocks[order][:-1]
    following[order[:-1][same]] = arrival_s[order[1:][same]]
    return following


class Foresight(CostAware):
    """`CostAware` with rate = 1 / (seconds until the next use)."""

    def __init__(self, work: Workload, slots: int) -> None:
        super().__init__(np.zeros(1, state_dtype()))
        self._work, self._next_s = work, next_use_s(work)
        self._slot_next_s = np.full(slots, np.inf)
        self._prompt = -1

    def _upcoming(self) -> Floats:
        starts = self._work.starts
        return self._next_s[starts[self._prompt] : starts[self._prompt + 1]]

    def prompt(self, keys: Keys, now_s: float) -> None:
        self._prompt += 1
        super().prompt(keys, now_s)

    def touched(self, table: Table, slots: Slots, now_s: float, hit: bool) -> None:
        self._slot_next_s[slots] = self._upcoming()[table["depth"][slots]]

    def worth(self, table: Table, forest: Forest, now_s: float) -> Floats:
        ahead_s = np.maximum(self._slot_next_s - now_s, 0.5)
        ahead_s[self._slot_next_s < now_s] = np.inf
        saves = saved_s(table, self.seconds_per_byte("dram"))
        return forest.cover(saves / ahead_s / np.maximum(table["bytes"], 1))
