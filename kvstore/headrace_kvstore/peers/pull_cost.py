"""The cost of pulling blocks from a peer, and the choice between pulling and computing. Pure.

    pull_s = latency_s + bytes / bandwidth          both fitted to this node's own pulls

A pull is worth it if pull_s < compute_s, the engine's prediction for the same blocks. If several
peers have blocks, the node asks the one that saves most seconds:

    saved_s = compute_s * blocks - pull_s(blocks)

An engine that cannot price its blocks yet gives compute_s = 0. Then the longest run wins, and among
equal runs the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headrace_kvstore.least_squares import LinearTime

FIRST_LATENCY_S, FIRST_BYTES_PER_S = 2e-3, 1e9
"""Latency and bandwidth assumed before the first pull."""


def pull_cost(
    latency_s: float = FIRST_LATENCY_S, bytes_per_s: float = FIRST_BYTES_PER_S
) -> LinearTime:
    """Return a model of the seconds to pull bytes from one medium, as assumed before the first
    pull. Each part may be 25 times as much."""
    each_s = 1.0 / bytes_per_s
    return LinearTime(latency_s, each_s, 25 * latency_s, 25 * each_s, unit=2**26)


class PullChoice(NamedTuple):
    """A run of blocks to pull from one peer."""

    peer: str
    blocks: int
    pull_s: float


@dataclass(frozen=True)
class PeerRun:
    """The leading blocks that one peer holds, by medium, with the cost of pulling them."""

    peer: str
    media: tuple[tuple[str, int, LinearTime], ...]
    """(medium, blocks, cost), in the order of the run."""

    @property
    def blocks(self) -> int:
        return sum(count for _, count, _ in self.media)

    def pull_s(self, block_bytes: int) -> float:
        """Return the predicted seconds to pull the whole run."""
        return sum(cost.seconds(count * block_bytes) for _, count, cost in self.media)


def choose_pull(
    runs: Iterable[PeerRun], block_bytes: int, block_compute_s: float, most_s: float
) -> PullChoice | None:
    """Return the pull that saves most seconds. None if computing is predicted to be as fast, or if
    no pull can end within `most_s`."""
    best: tuple[float, PullChoice] | None = None
    for run in runs:
        pull_s = run.pull_s(block_bytes)
        saved_s = block_compute_s * run.blocks - pull_s
        if not run.blocks or pull_s > most_s or (block_compute_s > 0 and saved_s <= 0):
            continue
        worth = saved_s if block_compute_s > 0 else run.blocks - pull_s / most_s
        if best is None or worth > best[0]:
            best = worth, PullChoice(run.peer, run.blocks, pull_s)
    return None if best is None else best[1]
