"""Predicted seconds to compute a KV block at its depth, and to load it. Pure.

The engine's fitted models predict both. Until something is measured, a block is taken to load at
`PRIOR_BYTES_S` and to take `PRIOR_RATIO` times as long to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

PRIOR_BYTES_S = 8e9
PRIOR_RATIO = 16.0
"""A 512-token block of an 8B model on one A100: 52 ms to compute, 3.4 ms over PCIe 4.0 x16."""


class Costs(Protocol):
    """An engine's fitted models."""

    def compute_s(self, first_token: int, last_token: int) -> float | None:
        """Predicted seconds that these tokens of a prompt, `last_token` not included, add to a
        step; None before anything was measured."""
        ...

    def load_s(self, medium: str, blocks: int) -> float | None:
        """Predicted seconds of a load; None for a medium that nobody measured."""
        ...


def block_seconds(
    costs: Costs | None, depths: Sequence[int], block_tokens: int, block_bytes: int
) -> tuple[list[float], list[float]]:
    """Seconds to compute blocks, and to load each from DRAM.

    Args:
        depths: how many blocks stand before each in its prompt.
    """
    prior_s = block_bytes / PRIOR_BYTES_S
    load_s = costs.load_s("dram", 1) if costs is not None else None
    compute_s = []
    for depth in depths:
        first = depth * block_tokens
        seconds = costs.compute_s(first, first + block_tokens) if costs is not None else None
        compute_s.append(PRIOR_RATIO * prior_s if seconds is None else seconds)
    return compute_s, [prior_s if load_s is None else load_s] * len(compute_s)
