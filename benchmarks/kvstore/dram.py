"""The DRAM tier against a plain copy: bandwidth of loads and saves, one and two threads.

The yardstick is `np.copyto` of as many bytes from one array to another, both touched before, by as
many threads. A load goes through the arena and the connector's worker half, from the lease to the
compared checksums, a save from the reservation to the publication.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from benchmarks.kvstore.stage import BLOCKS, Stage
from benchmarks.kvstore.timing import Figures, ratios, seconds, take_turns

CASES = {"": ("float32", 1), ".2_threads": ("float32", 2), ".bf16": ("bfloat16", 1)}
ROUNDS, QUICK_ROUNDS = 40, 8


def measure(figures: Figures, quick: bool = False) -> None:
    for suffix, (dtype, threads) in CASES.items():
        blocks = BLOCKS * (2 if dtype == "bfloat16" else 1)
        with Stage(dtype, blocks, threads) as stage:
            check(stage)
            _measure_one(figures, stage, threads, suffix, QUICK_ROUNDS if quick else ROUNDS)
    figures.note(
        "dram",
        f"{BLOCKS} blocks of 30 x 196,608 bytes (float32; bf16: twice as many of half the size), "
        "layer by layer through arena and worker half, against np.copyto of as many bytes",
    )


def check(stage: Stage) -> None:
    """Raise RuntimeError unless a load returns the saved bytes."""
    before = stage.content()
    stage.save()
    stage.wipe()
    stage.load()
    if not np.array_equal(stage.content(), before):
        raise RuntimeError("the engine's cache has other bytes after a load than before the save")


def plain_copy(size_bytes: int, threads: int) -> Callable[[], None]:
    """Return a copy of that many bytes, shared by threads."""
    source, target = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    cuts = [size_bytes * i // threads for i in range(threads + 1)]
    parts = [slice(a, b) for a, b in pairwise(cuts)]
    if threads == 1:
        return lambda: np.copyto(target, source)
    pool = ThreadPoolExecutor(threads)

    def copy() -> None:
        list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))

    return copy


def _measure_one(figures: Figures, stage: Stage, threads: int, suffix: str, rounds: int) -> None:
    memcpy = plain_copy(stage.size_bytes, threads)

    def save() -> float:
        stage.forget()
        return seconds(stage.save)

    taken = take_turns(
        {
            "memcpy": lambda: seconds(memcpy),
            "load": lambda: seconds(stage.load),
            "load_unverified": lambda: seconds(lambda: stage.load_unverified(threads)),
            "save": save,
        },
        rounds,
    )
    for arm, times in taken.items():
        figures.bandwidth(f"dram.{arm}_gb_s{suffix}", stage.size_bytes, times)
        if arm != "memcpy":
            figures.add(f"dram.{arm}_vs_memcpy{suffix}", ratios(taken["memcpy"], times))
