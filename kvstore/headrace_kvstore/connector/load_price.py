"""Whether KV in a slow tier is loaded or computed: what takes fewer predicted seconds.

Both sides are fitted online to what this engine measured:

    compute = a + c tokens + d pairs          of a step; pairs = sum over its tokens of the tokens
                                              that each attends to
    load    = l + m blocks                    of a load from one medium

Loading runs under the computation of the tokens behind it (`tail`), but for its first layer, and
the step waits for the rest. So loading a prefix costs the engine

    wait = max(load / layers, load - tail)    instead of    c tokens + d pairs of that prefix

A block costs more to compute the deeper it stands, and all cost about the same to load. The total
over the choices "load the first k, compute the rest" is therefore concave within a medium: its
minimum lies where a medium's blocks end, and only these places are compared.

A tier that nobody measured counts as free, and so is tried. One that lost is tried again with a
single block, as soon as its expected loss is within `PROBE_SHARE` of the seconds that declining
spent on computing; so a disk that has recovered is found, at a bounded price. A load that takes
longer than computing its blocks would have is given up (`Choice.limit_s`): never more than twice
the better of the two (A. Karlin et al., Competitive snoopy caching, Algorithmica 3, 1988).

Pure: no clocks, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

PROBE_SHARE = 0.02
"""Of the seconds spent on computing what a tier could have supplied; goes into trying it again."""
FORGET = 0.9
"""Weight of a sample after one more."""
CHANGED = 4.0
"""A load that the one before makes implausible by this factor tells that the tier has changed: what
it was before is forgotten. Plausible is all from "only blocks cost" to "only the load costs"."""


class NonNegativeFit:
    """seconds = theta . x with theta >= 0: least relative squares with exponential forgetting.

    Args:
        features: how many; where samples do not tell them apart, the first explains most.
    """

    def __init__(self, features: int) -> None:
        self._features = features
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self.samples = 0
        self._normal = np.zeros((self._features, self._features))
        self._moment = np.zeros(self._features)
        self._theta: np.ndarray | None = None

    def learn(self, x: Sequence[float], seconds: float) -> None:
        """Take one sample; one that took no time tells nothing."""
        if not 0.0 < seconds < math.inf:
            return
        row = np.asarray(x, np.float64) / seconds
        self._normal = FORGET * self._normal + np.outer(row, row)
        self._moment = FORGET * self._moment + row
        self._theta = None
        self.samples += 1

    def theta(self) -> np.ndarray | None:
        """Coefficients, or None before the first sample.

        Few enough features that all sets of those above 0 are tried (C. Lawson, R. Hanson, Solving
        Least Squares Problems, ch. 23, does the same in fewer steps).
        """
        if self.samples and self._theta is None:
            best = math.inf
            for size in range(1, self._features + 1):
                for chosen in combinations(range(self._features), size):
                    theta = self._solve(list(chosen))
                    if theta is None:
                        continue
                    left = float(theta @ self._normal @ theta - 2.0 * theta @ self._moment)
                    if left < best - 1e-9:
                        best, self._theta = left, theta
        return self._theta

    def predict(self, x: Sequence[float]) -> float | None:
        """Seconds, or None before the first sample."""
        theta = self.theta()
        return None if theta is None else float(theta @ np.asarray(x, np.float64))

    def _solve(self, chosen: list[int]) -> np.ndarray | None:
        """Least squares over some features, if it has one answer and that is not below 0."""
        normal = self._normal[np.ix_(chosen, chosen)]
        scale = np.sqrt(normal.diagonal())
        if not (scale > 0).all():
            return None
        scaled = normal / np.outer(scale, scale)
        if np.linalg.cond(scaled) > 1e10:
            return None
        part = np.linalg.solve(scaled, self._moment[chosen] / scale) / scale
        if (part < 0).any():
            return None
        theta = np.zeros(self._features)
        theta[chosen] = part
        return theta


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that follow each other and lie in one medium."""

    medium: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What to load.

    Attributes:
        blocks: of those offered, from the first on.
        limit_s: when to give it up; infinite where nothing is known of computing.
    """

    blocks: int
    limit_s: float


class Price:
    """One engine's models, and the decision.

    Args:
        block_tokens: tokens a block.
        layers: of the model.
    """

    def __init__(self, block_tokens: int, layers: int) -> None:
        self._block_tokens, self._layers = block_tokens, layers
        self._step = NonNegativeFit(3)
        self._loads: dict[str, NonNegativeFit] = {}
        self._last: dict[str, tuple[int, float]] = {}
        self._credit_s: dict[str, float] = {}

    def computed(self, tokens: int, pairs: int, seconds: float) -> None:
        """A step computed so many tokens; seconds without any waiting for KV."""
        self._step.learn((tokens, pairs, 1.0), seconds)

    def loaded(self, medium: str, blocks: int, seconds: float) -> None:
        """A load from one medium took so long."""
        fit = self._loads.setdefault(medium, NonNegativeFit(2))
        if medium in self._last:
            last_blocks, last_s = self._last[medium]
            more = blocks / last_blocks
            if not min(1, more) / CHANGED <= seconds / last_s <= max(1, more) * CHANGED:
                fit.forget()
        self._last[medium] = blocks, seconds
        fit.learn((blocks, 1.0), seconds)

    def load_s(self, medium: str, blocks: int) -> float | None:
        """Predicted seconds of a load; None for a medium that nobody measured."""
        return self._loads[medium].predict((blocks, 1.0)) if medium in self._loads else None

    def compute_s(self, first_token: int, last_token: int) -> float | None:
        """Predicted seconds that tokens add to a step, `last_token` not included."""
        theta = self._step.theta()
        if theta is None:
            return None
        return float(theta[:2] @ (last_token - first_token, pairs(first_token, last_token)))

    def block_s(self, first_block: int, blocks: int) -> float | None:
        """Predicted seconds to compute each of these blocks, in the mean: what a pull from a peer
        or an object must beat (`peers.pull_price`)."""
        first = first_block * self._block_tokens
        seconds = self.compute_s(first, first + blocks * self._block_tokens)
        return None if seconds is None else seconds / blocks

    def choose(self, first_block: int, runs: Sequence[Run], tokens: int) -> Choice:
        """How many of the offered blocks to load.

        Args:
            first_block: how many blocks stand before the first one offered.
            runs: what is offered, in the order of the prompt.
            tokens: of the whole prompt; what is not loaded is computed.
        """
        offered = sum(run.blocks for run in runs)
        size = self._block_tokens
        first = first_block * size
        all_s = self.compute_s(first, tokens)
        if not runs or all_s is None:
            return Choice(offered, math.inf)
        best_s, best, loads_s, taken = all_s, 0, 0.0, 0
        for run in runs:
            taken += run.blocks
            loads_s += self.load_s(run.medium, run.blocks) or 0.0
            tail_s = self.compute_s(first + taken * size, tokens) or 0.0
            total_s = tail_s + max(loads_s / self._layers, loads_s - tail_s)
            if total_s <= best_s:
                best_s, best = total_s, taken
        if best == 0 and self._probes(first, runs[0], tokens):
            best = 1
        return self._choice(first, best)

    def _choice(self, first: int, blocks: int) -> Choice:
        return Choice(blocks, self.compute_s(first, first + blocks * self._block_tokens) or 0.0)

    def _probes(self, first: int, run: Run, tokens: int) -> bool:
        """Whether the tier that lost may be tried, on what was saved up for it."""
        declined_s = self.compute_s(first, first + run.blocks * self._block_tokens) or 0.0
        one_s = self.compute_s(first, first + self._block_tokens) or 0.0
        credit_s = self._credit_s.get(run.medium, 0.0) + PROBE_SHARE * declined_s
        loss_s = min(self.load_s(run.medium, 1) or 0.0, one_s)  # it is given up after `one_s`
        if credit_s < loss_s:
            self._credit_s[run.medium] = credit_s
            return False
        self._credit_s[run.medium] = 0.0
        return True


def pairs(first_token: int, last_token: int) -> int:
    """Tokens attended to by the tokens from `first_token` to `last_token`, itself included:
    sum of (t + 1)."""
    return (last_token * (last_token + 1) - first_token * (first_token + 1)) // 2
