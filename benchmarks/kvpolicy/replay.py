"""Replays prompts through a slot table that a policy of the store evicts from.

The table and every call are those of production; only the bytes are missing. Blocks are written
at the moment their prompt arrives, hits are leased while the rest is written, and room is made
for the prompt's own blocks or 1/64 of the slots, whichever is more, at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.kvpolicy.s3fifo import S3FIFO
from benchmarks.kvpolicy.workload import Costs, Workload
from headrace_kvstore.blocks.slot_record import FREE, READY, SLOT, WRITING
from headrace_kvstore.policy.base import Policy, block_keys

BATCHES = 64
LEASE_S = 1e-3  # shorter than any two arrivals that are apart, longer than none


@dataclass
class Outcome:
    """Per prompt: leading blocks served, seconds that they saved; and blocks written."""

    hits: NDArray[np.int64]
    saved_s: NDArray[np.float64]
    written: int


def _leading(chain: NDArray[np.int64], gaps: NDArray[np.int64]) -> int:
    return int(gaps[0]) if len(gaps) else len(chain)


class Replay:
    """One table of `slots` slots, driven by `policy`."""

    def __init__(self, work: Workload, costs: Costs, slots: int, policy: Policy) -> None:
        self.work, self.policy = work, policy
        policy.set_load_cost("dram", 1.0 / costs.load_bytes_s)
        self.table = np.zeros(slots, SLOT)
        self.slot_of = np.full(work.distinct, -1, np.int64)
        self.block_in = np.full(slots, -1, np.int64)
        self.free = list(range(slots - 1, -1, -1))
        # Hash heads are the block numbers, spread so that they look like hashes and none is 0.
        self.heads = (np.arange(work.distinct, dtype=np.uint64) + np.uint64(1)) * np.uint64(
            0xD6E8FEB86659FD93
        )
        self.hashes = np.zeros((work.distinct, 4), "<u8")
        self.hashes[:, 0] = self.heads
        self.keys = block_keys(0, self.heads)
        deepest = int(np.diff(work.starts).max(initial=1))
        self.compute_s = costs.compute_s(np.arange(deepest))
        self.load_s = np.full(deepest, costs.load_s)
        self.bytes = np.full(deepest, float(costs.block_bytes))
        self.saving_s = np.concatenate([[0.0], np.cumsum(self.compute_s - self.load_s)])
        self.written = 0

    def run(self, priorities: NDArray[np.int64] | None = None) -> Outcome:
        """Replay everything; `priorities`, one a prompt, go into the slots it touches."""
        work, n = self.work, len(self.work)
        hits = np.zeros(n, np.int64)
        for i in range(n):
            chain = work.blocks[work.starts[i] : work.starts[i + 1]]
            priority = 0 if priorities is None else int(priorities[i])
            hits[i] = self.step(chain, float(work.arrival_s[i]), priority)
        return Outcome(hits, self.saving_s[hits], self.written)

    def leading(self, chain: NDArray[np.int64]) -> int:
        """Return the number of a prompt's leading blocks that would be hits."""
        return _leading(chain, np.flatnonzero(self.slot_of[chain] < 0))

    def step(self, chain: NDArray[np.int64], now_s: float, priority: int) -> int:
        """One prompt; returns its leading hit blocks."""
        table, policy = self.table, self.policy
        policy.prompt(self.keys[chain], now_s)
        slots = self.slot_of[chain]
        gaps = np.flatnonzero(slots < 0)
        leading = _leading(chain, gaps)
        found = slots[slots >= 0]  # blocks after a gap are computed again and not written again
        table["used_s"][found] = now_s
        table["lease_until_s"][found] = now_s + LEASE_S
        table["hits"][slots[:leading]] += 1
        table["tenant"][found] = np.maximum(table["tenant"][found], priority)
        self._touched(slots[:leading], now_s, True)
        if len(gaps):
            self._write(chain, gaps, now_s, priority)
        table["lease_until_s"][found] = 0.0
        return leading

    def _write(
        self, chain: NDArray[np.int64], gaps: NDArray[np.int64], now_s: float, pri: int
    ) -> None:
        table, policy = self.table, self.policy
        if len(gaps) > len(self.free):
            need = max(len(gaps) - len(self.free), len(table) // BATCHES, 1)
            chosen = policy.choose(table, now_s, need)
            if isinstance(policy, S3FIFO):
                policy.given_up(table, chosen)
            for slot in chosen.tolist():
                self.slot_of[self.block_in[slot]] = -1
                table["state"][slot] = FREE
                self.free.append(slot)
        gaps = gaps[: len(self.free)]
        if not len(gaps):
            return
        slots = np.array([self.free.pop() for _ in range(len(gaps))])
        blocks = chain[gaps]
        self.slot_of[blocks], self.block_in[slots] = slots, blocks
        rows = np.zeros(len(slots), SLOT)
        rows["state"], rows["tenant"], rows["depth"] = WRITING, pri, gaps
        rows["hash"] = self.hashes[blocks].view("V32")[:, 0]
        rows["parent"] = np.where(gaps > 0, self.heads[chain[gaps - 1]], 0)
        rows["stored_s"] = rows["used_s"] = now_s
        rows["compute_s"] = self.compute_s[gaps]
        rows["bytes"] = self.bytes[gaps]
        rows["generation"] = table["generation"][slots] + 1
        table[slots] = rows
        self._touched(slots, now_s, False)
        table["state"][slots] = READY
        self.written += len(slots)

    def _touched(self, slots: NDArray[np.int64], now_s: float, hit: bool) -> None:
        """Blocks were found (`hit`) or written; the store's own policies need not know."""
        touched = getattr(self.policy, "touched", None)
        if touched is not None and len(slots):
            touched(self.table, slots, now_s, hit)
