"""How fast this machine reads memory, for what a step of an engine on CPUs takes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

READ_BYTES = 1 << 27
"""By a thread at once: more than caches hold."""
ROUNDS = 5


def measured_gbps(threads: int) -> float:
    """GB a second that so many threads read together, the best of some rounds.

    Each multiplies a matrix by a vector, as computing a token does.
    """
    columns = 1024
    matrices = [
        np.ones((READ_BYTES // 4 // columns, columns), np.float32) for _ in range(max(1, threads))
    ]
    vector, best_s = np.ones(columns, np.float32), float("inf")
    with ThreadPoolExecutor(len(matrices)) as pool:
        for _ in range(ROUNDS):
            begun_s = time.perf_counter()
            list(pool.map(lambda matrix: matrix @ vector, matrices))
            best_s = min(best_s, time.perf_counter() - begun_s)
    return len(matrices) * READ_BYTES / best_s / 1e9
