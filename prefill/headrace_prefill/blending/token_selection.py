"""The choice of the tokens of reused chunks to recompute, and of the layers that do so.

A chunk that was prefilled elsewhere has KV that does not depend on the text before it here. The
error of that KV matters at the chunk's first tokens, which drew attention as the beginning of a
text, and at the tokens that the answer will attend to. Therefore the score of a token at a layer is

    score(l, i) = (1 + offset_i)^-PRIOR * mean of mass[m, i] over layers m > l

    offset_i    distance from its chunk's first token
    mass[m, i]  attention that the prompt's last tokens and a draft of the answer pay to it at layer
                m, from a probe

Layer l computes the r_l tokens with the highest score among those that layer l - 1 computed, where
r_l is proportional to e^(-l/DECAY). A row needs its own row of the layer before, so the sets are
nested, and one number describes a token: its depth, the number of leading layers that compute it.

UCM, CacheBlend and LMCache choose tokens by drift, the change of a token's K and V caused by the
text before it. In addition to offset and probe, drift reduces the error by 3 % (docs/blending.md),
and it needs a choice between all layers. It is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PRIOR, DECAY = 0.5, 30.0
LAST_TOKENS = 8
"""Number of the prompt's last tokens in the probe."""
DRAFT_TOKENS = 8
"""Number of draft tokens after them in the probe: the model's answer over KV without correction."""

Float = NDArray[np.float32]
Int = NDArray[np.int64]


@dataclass(frozen=True)
class SelectionRule:
    """Weights of the score; the defaults measured best on the tuning texts.

    Attributes:
        prior: exponent of the distance from the chunk's start.
        decay: number of layers over which the share of computed tokens falls to 1/e; infinite for
            an equal share in each layer.
    """

    prior: float = PRIOR
    decay: float = DECAY

    def depths(self, offsets: Int, mass: Float | None, layers: int, budget: float) -> Int:
        """Return how many leading layers compute each token.

        Args:
            offsets: int64 [n], distance of each token from its chunk's first one; negative for a
                token of no chunk.
            mass: float32 [layers, n], from the probe; None to choose without a probe.
            layers: number of layers of the model.
            budget: share of (token of a chunk, layer) pairs that may be computed, 0 to 1.

        Returns:
            int64 [n]; `layers` for tokens of no chunk.

        Raises:
            ValueError: the budget is not between 0 and 1.
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
        """Return how many tokens each layer computes, at most `tokens` each: the budget is spread
        in proportion to e^(-l/decay)."""
        shares = np.exp(-np.arange(layers) / self.decay)
        low, high = 0.0, float(np.exp(layers / self.decay)) / shares.mean()
        for _ in range(60):
            middle = (low + high) / 2
            if np.minimum(1.0, shares * middle).mean() < budget:
                low = middle
            else:
                high = middle
        # Round down: the pairs never exceed the budget.
        return np.floor(np.minimum(1.0, shares * low) * tokens + 1e-6).astype(np.int64)

    def scores(self, offsets: Int, mass: Float | None, layer: int) -> NDArray[np.float64]:
        """Return each token's score for being computed in a layer, float64 [n]."""
        prior = (1.0 + offsets.clip(0)) ** -self.prior
        if mass is None:
            return prior
        later = mass[min(layer + 1, len(mass) - 1) :]
        scores: NDArray[np.float64] = prior * later.mean(0, dtype=np.float64)
        return scores


def offsets_of(n: int, chunks: list[tuple[int, int]]) -> Int:
    """Return each position's distance from its chunk's first token.

    Args:
        n: tokens of the prompt.
        chunks: (first position, length) of each chunk.

    Returns:
        int64 [n], -1 outside of chunks.
    """
    offsets = np.full(n, -1, np.int64)
    for first, length in chunks:
        offsets[first : first + length] = np.arange(length)
    return offsets


def _best(score: NDArray[np.float64], count: int) -> Int:
    """Return the indices of the `count` highest scores, ascending; of equal scores, the earlier."""
    order = np.argsort(-score, kind="stable")[:count]
    return np.sort(order)
