"""Measures how fast this machine reads weights and KV, to predict a step of an engine on CPUs."""

from __future__ import annotations

import time

MATRIX_BYTES = 1 << 27
"""Size of the matrix, larger than the caches."""
COLUMNS = 1024
ROUNDS = 20


def measured_gbps(threads: int, rows: int, dtype_bytes: int) -> float:
    """Return the GB of weights a second in a step of `rows` rows: the best of `ROUNDS` rounds.

    With several rows a CPU may compute longer than it reads.

    Args:
        threads: number of threads that compute. dtype_bytes: bytes of a weight; 2 for bfloat16.
    """
    import torch

    dtype, before = torch.bfloat16 if dtype_bytes == 2 else torch.float32, torch.get_num_threads()
    matrix = torch.ones(MATRIX_BYTES // dtype.itemsize // COLUMNS, COLUMNS, dtype=dtype)
    asked, best_s = torch.ones(rows, COLUMNS, dtype=dtype), float("inf")
    torch.set_num_threads(max(1, threads))
    try:
        for _ in range(ROUNDS):
            begun_s = time.perf_counter()
            torch.nn.functional.linear(asked, matrix)
            best_s = min(best_s, time.perf_counter() - begun_s)
    finally:
        torch.set_num_threads(before)
    return MATRIX_BYTES / best_s / 1e9
