"""Decides which tokens of reused chunks are computed again, and in how many leading layers.

A chunk that was prefilled elsewhere has KV that never saw what stands before it here. Its error
does not matter everywhere: it matters at the chunk's first tokens, which drew attention as the
beginning of a text, and where the answer will look. So the score of a token at a layer is

    score(l, i) = (1 + offset_i)^-PRIOR * mean of mass[m, i] over layers m > l

    offset_i    distance from its chunk's first token
    mass[m, i]  attention that the prompt's last tokens and a draft of the answer pay to it at layer
                m, from a probe

Layer l computes the r_l best of those that layer l - 1 computed, r_l proportional to e^(-l/DECAY):
a row needs its own row of the layer before, so the sets are nested, and a token's depth, the
number of leading layers that compute it, says all.

Drift, the change of a token's K and V by what stands before it, is what others choose by (UCM,
CacheBlend, LMCache). Beside offset and probe it gains 3 % of the error (docs/reuse.md), and needs a
choice between all layers; it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PRIOR, DECAY = 0.5, 30.0
LAST_TOKENS = 8
"""Of the prompt, in the probe."""
DRAFT_TOKENS = 8
"""Behind them in the probe: what the model would answer over KV that is not corrected."""

Float = NDArray[np.float32]
Int = NDArray[np.int64]


@dataclass(frozen=True)
class Rule:
    """Weights of the score; those of the module are what measured best on texts for tuning.

    Attributes:
        prior: exponent of the distance from the chunk's start.
        decay: layers after which the share has fallen to 1/e; infinite for the same in each.
    """

    prior: float = PRIOR
    decay: float = DECAY

    def depths(self, offsets: Int, mass: Float | None, layers: int, budget: float) -> Int:
        """How many leading layers compute each token.

        Args:
            offsets: int64 [n], distance of each token from its chunk's first one; negative for a
                token of no chunk.
            mass: float32 [layers, n], of the probe; None chooses without one.
            layers: of the model.
            budget: share of (token of a chunk, layer) pairs that may be computed, 0 to 1.

        Returns:
            int64 [n]; `layers` for tokens of no chunk.

        Raises:
            ValueError: the budget is no share.
        """
        if not 0.0 <= budget <= 1.0:
            raise ValueError(f"budget {budget}: must be 0 to 1")
        chunk = np.flatnonzero(offsets >= 0)
        depths = np.full(len(offsets), layers, np.int64)
        depths[chunk] = 0
        kept = chunk
        for layer, count in enumerate(self.counts(len(chunk), layers, budget)):
            score = self.scores(offsets[kept], None if mass is None else mass[:, kept], layer)
            kept = kept[_best(score, min(count, len(kept)))]
            depths[kept] = layer + 1
        return depths

    def counts(self, tokens: int, layers: int, budget: float) -> Int:
        """Tokens to compute in each layer: the budget, spread as e^(-l/decay), each at most all."""
        shares = np.exp(-np.arange(layers) / self.decay)
        low, high = 0.0, float(np.exp(layers / self.decay)) / shares.mean()
        for _ in range(60):
            middle = (low + high) / 2
            if np.minimum(1.0, shares * middle).mean() < budget:
                low = middle
            else:
                high = middle
        # Downwards: the pairs never exceed the budget.
        return np.floor(np.minimum(1.0, shares * low) * tokens + 1e-6).astype(np.int64)

    def scores(self, offsets: Int, mass: Float | None, layer: int) -> NDArray[np.float64]:
        """Of each token, for the choice of those that a layer computes: float64 [n]."""
        prior = (1.0 + offsets.clip(0)) ** -self.prior
        if mass is None:
            return prior
        later = mass[min(layer + 1, len(mass) - 1) :]
        scores: NDArray[np.float64] = prior * later.mean(0, dtype=np.float64)
        return scores


def offsets_of(n: int, chunks: list[tuple[int, int]]) -> Int:
    """Distances from the chunks' first tokens.

    Args:
        n: tokens of the prompt.
        chunks: (first position, length) of each.

    Returns:
        int64 [n], -1 outside of chunks.
    """
    offsets = np.full(n, -1, np.int64)
    for first, length in chunks:
        offsets[first : first + length] = np.arange(length)
    return offsets


def share_of(depths: Int, offsets: Int, layers: int) -> float:
    """Share of (token of a chunk, layer) pairs that are computed."""
    chunk = offsets >= 0
    return float(depths[chunk].mean() / layers) if chunk.any() else 0.0


def _best(score: NDArray[np.float64], count: int) -> Int:
    """Indices of the highest scores, ascending; the earlier one of equals."""
    order = np.argsort(-score, kind="stable")[:count]
    return np.sort(order)
