"""Cost of choosing blocks to evict, and whether other calls wait for it.

As in the arena, each choice frees 1/64 of a full table of `slots` blocks, so that many blocks share
its cost. Prompts have 32 blocks and all have a history.
"""

from __future__ import annotations

import threading
import time

import numpy as np

from headrace_kvstore.blocks.slot_record import READY, SLOT
from headrace_kvstore.policy.base import slot_keys
from headrace_kvstore.policy.cost_aware import CostAware

CHAIN = 32
BATCHES = 64


def full_table(slots: int) -> np.ndarray:
    """SLOT (slots,): whole prompts of CHAIN blocks."""
    table = np.zeros(slots, SLOT)
    numbers = np.arange(slots, dtype=np.uint64)
    heads = (numbers + np.uint64(1)) * np.uint64(0xD6E8FEB86659FD93)
    hashes = np.zeros((slots, 4), "<u8")
    hashes[:, 0] = heads
    table["state"], table["hash"] = READY, hashes.view("V32")[:, 0]
    table["depth"] = numbers % CHAIN
    table["parent"][1:] = heads[:-1]
    table["parent"][table["depth"] == 0] = 0
    table["used_s"] = numbers / CHAIN
    table["bytes"], table["compute_s"] = 1e6, 0.05
    return table


def measure(slots: int, rounds: int = 5) -> dict[str, float]:
    """Milliseconds of a choice, of a fit, of a prompt; the longest stop of another thread."""
    table = full_table(slots)
    policy = CostAware.create()
    keys = slot_keys(table)
    rank = np.random.default_rng(0).permutation(slots // CHAIN)  # arrivals in any order
    for arrival, chain in enumerate(rank.tolist()):
        now_s = float(arrival)
        mine = np.arange(chain * CHAIN, (chain + 1) * CHAIN)
        policy.prompt(keys[mine], now_s)
    now_s = slots / CHAIN
    need = max(1, slots // BATCHES)
    policy.choose(table, now_s, need)
    longest_s, done = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest_s
        while not done.is_set():
            before = time.perf_counter()
            time.sleep(0.001)
            longest_s = max(longest_s, time.perf_counter() - before - 0.001)

    ticking = threading.Thread(target=tick)
    ticking.start()
    took = []
    for _ in range(rounds):
        before = time.perf_counter()
        policy.choose(table, now_s, need)
        took.append(time.perf_counter() - before)
    done.set()
    ticking.join()
    before = time.perf_counter()
    policy._fit(now_s)
    fit_s = time.perf_counter() - before
    at = f"choice.{slots}"
    return {
        f"{at}.ms": 1e3 * float(np.median(took)),
        f"{at}.us_per_block": 1e6 * float(np.median(took)) / need,
        f"{at}.fit_ms": 1e3 * fit_s,
        f"{at}.other_thread_stopped_ms": 1e3 * longest_s,
    }
