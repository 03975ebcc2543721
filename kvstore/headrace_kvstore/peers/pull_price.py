"""What pulling blocks from a peer costs, and whether it beats computing them. Pure.

    pull_s = latency_s + bytes / bandwidth          both fitted to this node's own pulls

A pull is worth it where pull_s < compute_s, the engine's prediction for the same blocks. Of several
peers the one that saves most seconds is asked:

    saved_s = compute_s * blocks - pull_s(blocks)

An engine that cannot price its blocks yet gives compute_s = 0: then the longest run wins, and the
cheaper of equals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

FORGET = 0.9
"""Weight of what was known when a new measurement comes."""
FIRST_LATENCY_S, FIRST_BYTES_PER_S = 2e-3, 1e9
"""Assumed before the first pull, with the weight of one."""


class LineFit:
    """seconds = fixed_s + amount * each_s, by least squares that forget; neither is negative.

    Normal equations of weighted least squares with exponential forgetting; while all amounts are
    alike the fixed part stays what it was.
    """

    def __init__(self, fixed_s: float, each_s: float, amount: float) -> None:
        self.fixed_s, self.each_s = fixed_s, each_s
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        for at in (0.0, amount):
            self._add(at, fixed_s + at * each_s)

    def observe(self, amount: float, seconds: float) -> None:
        """Learn from one measurement."""
        for name in ("_n", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, FORGET * getattr(self, name))
        self._add(amount, seconds)
        spread = self._n * self._xx - self._x * self._x
        if spread > 1e-6 * self._n * self._xx:
            self.each_s = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
            self.fixed_s = max(0.0, (self._y - self.each_s * self._x) / self._n)
        if self._x and not (self.each_s and self.fixed_s):
            self.each_s = max(self.each_s, (self._y - self.fixed_s * self._n) / self._x)

    def seconds(self, amount: float) -> float:
        """Predicted seconds."""
        return self.fixed_s + amount * self.each_s

    def _add(self, amount: float, seconds: float) -> None:
        self._n += 1
        self._x += amount
        self._y += seconds
        self._xx += amount * amount
        self._xy += amount * seconds


class PullCost(LineFit):
    """Seconds of pulling bytes from one peer's medium."""

    def __init__(self) -> None:
        super().__init__(FIRST_LATENCY_S, 1 / FIRST_BYTES_PER_S, 2**26)


class Choice(NamedTuple):
    """A run of blocks to pull from one peer."""

    peer: str
    blocks: int
    pull_s: float


@dataclass(frozen=True)
class Run:
    """The leading blocks that one peer holds, by medium, with the seconds that pulling takes."""

    peer: str
    media: tuple[tuple[str, int, LineFit], ...]
    """(medium, blocks, cost), in the order of the run."""

    @property
    def blocks(self) -> int:
        return sum(count for _, count, _ in self.media)

    def pull_s(self, block_bytes: int) -> float:
        """Predicted seconds for all of it."""
        return sum(cost.seconds(count * block_bytes) for _, count, cost in self.media)


def choose(
    runs: Iterable[Run], block_bytes: int, block_compute_s: float, most_s: float
) -> Choice | None:
    """The pull that saves most seconds; None where computing is predicted to be as fast, or where
    nothing can come within `most_s`."""
    best: tuple[float, Choice] | None = None
    for run in runs:
        pull_s = run.pull_s(block_bytes)
        saved_s = block_compute_s * run.blocks - pull_s
        if not run.blocks or pull_s > most_s or (block_compute_s > 0 and saved_s <= 0):
            continue
        worth = saved_s if block_compute_s > 0 else run.blocks - pull_s / most_s
        if best is None or worth > best[0]:
            best = worth, Choice(run.peer, run.blocks, pull_s)
    return None if best is None else best[1]
