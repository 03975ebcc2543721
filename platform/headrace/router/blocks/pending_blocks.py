"""Blocks that plans will compute, counted for placement before their KV events arrive.

Between the choice of a replica and the first event of its blocks, the next prompts with the same
prefix must already see these blocks. Otherwise they are sent elsewhere and compute the same prefix
again. A plan makes all blocks of its prompt usable on the holders that it names, so the whole
prompt counts for each of these holders, in addition to the blocks that they hold:

    coming(prompt, holder) = longest common prefix of the prompt and of a plan for that holder

An engine with recurrent layers keeps a state at the end of a prompt, and at few blocks before it.
There, a plan counts only for prompts that begin with all of its blocks.

A plan stops counting when it is withdrawn, when all its holders can use its last block, or at its
deadline. The number of plans and of their blocks is bounded: beyond that, a new plan displaces the
plan with the earliest deadline.

The plans are the holders of a second `BlockIndex`, so a look-up costs as much as one in the index
of held blocks: O(d log(n / d)) look-ups for n blocks, where d plans diverge from the prompt. One
thread owns it. Times are in seconds of any monotonic clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.router.blocks.block_index import BlockIndex, Keys
from headrace_kvstore.numba_jit import jit

MAX_PLANS, MAX_BLOCKS = 8192, 1 << 20
MAX_HOLDERS = 8
"""Maximum number of holders that one plan names."""


@jit()
def _spread(
    reach: NDArray[np.int32],
    holders: NDArray[np.int32],
    least: NDArray[np.int32],
    found: NDArray[np.int32],
) -> None:
    for number in range(reach.size):
        if reach[number] > 0:
            for i in range(holders.shape[1]):
                holder = holders[number, i]
                if reach[number] < least[number, i]:
                    continue
                if 0 <= holder < found.size and found[holder] < reach[number]:
                    found[holder] = reach[number]


@dataclass(eq=False)
class _PendingPlan:
    plan: str
    number: int
    """The plan's holder number in the index of plans."""
    holders: tuple[int, ...]
    keys: Keys
    until_s: float


class PendingBlocks:
    """Plans whose blocks are not there yet.

    Args:
        index: the held blocks; shows whether a plan's blocks have arrived.
        max_plans: maximum number of plans.
        max_blocks: maximum number of blocks of all their prompts together.
    """

    def __init__(
        self, index: BlockIndex, max_plans: int = MAX_PLANS, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self._held, self._max_plans, self._max_blocks = index, max_plans, max_blocks
        self._index = BlockIndex(max(2**20, 128 * max_blocks), max_plans)
        self._plans: dict[str, _PendingPlan] = {}
        self._free: list[int] = []
        """Free holder numbers of the index of plans."""
        self._holders = np.full((max_plans, MAX_HOLDERS), -1, np.int32)
        self._least = np.zeros((max_plans, MAX_HOLDERS), np.int32)
        """Leading blocks that a prompt shares with each plan at least, to count on each holder."""
        self._times: list[tuple[float, int, _PendingPlan]] = []
        self._blocks = self._added = 0
        self.arrived = self.overdue = self.displaced = 0
        """Counts of plans whose blocks arrived, that were overdue, and that were displaced."""

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, plan: str, holders: Sequence[int], keys: Keys, until_s: float) -> None:
        """Add a plan that will make these blocks usable on these holders.

        Args:
            plan: name of the plan; a known plan of this name is replaced.
            keys: keys of all full blocks of the prompt, from the first on; kept, not copied.
            until_s: deadline after which the plan no longer counts.

        Raises:
            ValueError: the prompt alone has more than `max_blocks`; more than 8 holders.
        """
        if len(holders) > MAX_HOLDERS:
            raise ValueError(f"holders: {len(holders)}, more than {MAX_HOLDERS}")
        if len(keys) > self._max_blocks:
            raise ValueError(f"keys: {len(keys)} blocks, more than {self._max_blocks}")
        self.withdraw(plan)
        if len(keys) == 0 or not holders:
            return
        while len(self._plans) >= self._max_plans or self._blocks + len(keys) > self._max_blocks:
            self._drop_earliest()
            self.displaced += 1
        number = self._free.pop() if self._free else self._index.open()
        one = self._plans[plan] = _PendingPlan(plan, number, tuple(holders), keys, until_s)
        self._holders[number, : len(holders)] = holders
        self._least[number, : len(holders)] = [
            len(keys) if self._held.has_states(holder) else 0 for holder in holders
        ]
        self._added += 1
        heapq.heappush(self._times, (until_s, self._added, one))
        self._blocks += len(keys)
        self._index.stored(one.number, None, keys)

    def withdraw(self, plan: str) -> bool:
        """Remove a plan, and return whether it counted until now."""
        one = self._plans.pop(plan, None)
        if one is None:
            return False
        self._blocks -= len(one.keys)
        self._index.removed(one.number, np.ascontiguousarray(one.keys[::-1]))
        self._holders[one.number] = -1
        self._free.append(one.number)
        if len(self._times) > 2 * len(self._plans) + 64:  # most entries are of withdrawn plans
            self._times = [entry for entry in self._times if self._is_pending(entry[2])]
            heapq.heapify(self._times)
        return True

    def remove_holder(self, holder: int) -> None:
        """Remove an expired holder from all plans, since another holder may get its number."""
        for one in list(self._plans.values()):
            if holder in one.holders:
                self.add(one.plan, [h for h in one.holders if h != holder], one.keys, one.until_s)

    def expire(self, now_s: float, most: int = 256) -> None:
        """Withdraw plans past their deadline, and plans whose blocks have arrived.

        Args:
            most: maximum number of plans before their deadline that one call examines.
        """
        while self._times and (
            self._times[0][0] <= now_s or not self._is_pending(self._times[0][2])
        ):
            _, _, one = heapq.heappop(self._times)
            if self._is_pending(one):
                if self._has_arrived(one):
                    self.arrived += 1
                else:
                    self.overdue += 1
                self.withdraw(one.plan)
        for one in list(self._plans.values())[:most]:
            if self._has_arrived(one):
                self.arrived += 1
                self.withdraw(one.plan)
            else:  # move it to the end: the next call examines other plans
                self._plans[one.plan] = self._plans.pop(one.plan)

    def match(self, keys: Keys) -> NDArray[np.int32]:
        """Return how many leading blocks plans will make usable on each holder: [holders] i32.

        A holder will be able to use the larger of this number and the number that it can use now.
        """
        found = np.zeros(self._held.holders, np.int32)
        if not self._plans:
            return found
        _spread(self._index.match(keys), self._holders, self._least, found)
        return found

    def stats(self) -> dict[str, Any]:
        """Return counts for JSON."""
        return {
            "plans": len(self._plans),
            "blocks": self._blocks,
            "arrived": self.arrived,
            "overdue": self.overdue,
            "displaced": self.displaced,
            "bytes": self._index.bytes + 8 * self._blocks,
        }

    # Inside

    def _is_pending(self, one: _PendingPlan) -> bool:
        return self._plans.get(one.plan) is one

    def _has_arrived(self, one: _PendingPlan) -> bool:
        last = int(one.keys[-1])
        return all([self._held.usable(holder, last) for holder in one.holders])

    def _drop_earliest(self) -> None:
        while True:
            _, _, one = heapq.heappop(self._times)
            if self._is_pending(one):
                self.withdraw(one.plan)
                return
