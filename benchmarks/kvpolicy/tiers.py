"""Two tiers: what a disk below DRAM saves, and what prefetching from it would add.

DRAM is evicted from by the cost-aware policy, the disk keeps all that was ever computed. What is
found on disk is loaded at the disk's speed and put into DRAM. Between prompts the disk is idle;
``prefetch`` uses that time to fetch what `prefetch.worth_fetching` names, of the prompts that wait
for their next turn. ``ceiling`` is what would be saved if all that was on disk had been in DRAM.
"""

from __future__ import annotations

import numpy as np

from benchmarks.kvpolicy.prefetch import worth_fetching
from benchmarks.kvpolicy.replay import Replay
from benchmarks.kvpolicy.workload import Costs, Workload
from headrace_kvstore.blocks.slot_record import SLOT
from headrace_kvstore.policy.base import Mask, Slots, Table
from headrace_kvstore.policy.cost_aware import CostAware
from headrace_kvstore.policy.tree import Forest

DISK_BYTES_S = 3e9
LOOK_S = 1.0
"""Between looks for something to fetch."""
FOLLOWED, LOOKED_AT = 4096, 256
"""Prompts that may be waiting for a next turn, and how many likely ones are looked at a time."""


class Priced(CostAware):
    """Knows what room cost at the last eviction: the worth of the best block given up."""

    price = 0.0

    def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
        chosen = super().choose(table, now_s, need, among)
        self.price = float(self.worth(table, Forest(table), now_s)[chosen].max(initial=0.0))
        return chosen


class TwoTiers(Replay):
    """`slots` blocks of DRAM above a disk without limit."""

    def __init__(self, work: Workload, costs: Costs, slots: int, prefetch: bool) -> None:
        self.cost_aware = Priced.create()
        super().__init__(work, costs, slots, self.cost_aware)
        self.prefetch = prefetch
        self.on_disk = np.zeros(work.distinct, np.bool_)
        self.disk_s = costs.block_bytes / DISK_BYTES_S
        self.block_bytes = costs.block_bytes
        self.saved_s = self.ceiling_s = self.looked_s = self.busy_until_s = 0.0
        self.disk_hits = self.fetched = 0
        self.waiting: dict[int, np.ndarray] = {}

    def step(self, chain: np.ndarray, now_s: float, priority: int) -> int:
        if self.prefetch and now_s - self.looked_s >= LOOK_S:
            self._fetch(self.looked_s, now_s)
            self.looked_s = now_s
        hits = super().step(chain, now_s, priority)
        there = self.on_disk[chain[hits:]]
        below = int(np.argmin(there)) if len(there) and not there.all() else len(there)
        from_disk = (self.compute_s[hits : hits + below] - self.disk_s).clip(0.0)
        self.saved_s += self.saving_s[hits] + from_disk.sum()
        self.ceiling_s += self.saving_s[hits + below]
        self.disk_hits += below
        self.busy_until_s = max(self.busy_until_s, now_s) + below * self.disk_s
        self.on_disk[chain] = True
        followed = self._conversation(chain)
        self.waiting.pop(followed, None)
        self.waiting[followed] = chain
        if len(self.waiting) > FOLLOWED:
            self.waiting.pop(next(iter(self.waiting)))
        return hits

    def _conversation(self, chain: np.ndarray) -> int:
        """The policy's number of the conversation whose last prompt this was, 0 for none."""
        last = np.zeros(min(1, len(chain)), SLOT)
        serials, _ = self.cost_aware._waiting(self.keys[chain[-1:]], last, 0.0)
        return int(serials.sum())

    def _fetch(self, since_s: float, now_s: float) -> None:
        """Use the disk's idle time since the last look, as of its beginning."""
        at_s = max(since_s, self.busy_until_s)
        budget = int((now_s - at_s) / self.disk_s)
        if budget < 1 or not self.waiting:
            return
        tails = np.array([chain[-1] for chain in self.waiting.values()])
        rows = np.zeros(len(tails), SLOT)
        rows["used_s"] = at_s
        rate = self.cost_aware.rates(self.keys[tails], rows, at_s)
        chains = list(self.waiting.values())
        price = self.cost_aware.price if not self.free else 0.0
        for i in np.argsort(-rate, kind="stable")[:LOOKED_AT].tolist():
            chain = chains[i]
            saves = self.compute_s[: len(chain)] - self.load_s[: len(chain)]
            worth = rate[i] * saves / self.block_bytes
            which = worth_fetching(worth, self.slot_of[chain] >= 0, price, budget)
            if not len(which):
                continue
            held = self.slot_of[chain][self.slot_of[chain] >= 0]
            self.table["lease_until_s"][held] = at_s + 1e-3
            before = self.written
            self._write(chain, which, at_s, 0)
            self.table["lease_until_s"][held] = 0.0
            self.fetched += self.written - before
            budget -= len(which)
            if budget < 1:
                return


def measure(work: Workload, costs: Costs, shares: tuple[float, ...]) -> dict[str, float]:
    """Seconds saved per DRAM size (a share of the distinct blocks), with and without prefetch."""
    figures: dict[str, float] = {}
    for k, share in enumerate(shares, 1):
        for name, prefetch in (("plain", False), ("prefetch", True)):
            tiers = TwoTiers(work, costs, int(share * work.distinct), prefetch)
            tiers.run()
            at = f"tiers.cap{k}.{name}"
            figures[f"{at}.seconds_saved"] = tiers.saved_s
            figures[f"{at}.ceiling.seconds_saved"] = tiers.ceiling_s
            figures[f"{at}.disk_hits"] = float(tiers.disk_hits)
            figures[f"{at}.fetched"] = float(tiers.fetched)
    return figures
