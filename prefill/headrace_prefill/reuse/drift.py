"""Tells from the tokens of a run that are computed again how far off its other tokens' KV is.

A run's KV was stored behind other text. It is off by a part that all tokens of the run share: keys
of a whole run point a little elsewhere, so the run as a whole gets too much or too little
attention. Each token that is computed again shows that part, and what is its own. For one layer and
KV head, with the n tokens of the run that the layer computes,

    d_j = K_fresh,j - K_placed,j                  K turned to position 0; V likewise, as it is
    D   = n / (n + 8) * (sum_j d_j / |d_j|) / (sum_j 1 / |d_j|)

and D is added to K (V) of the tokens that the layer does not compute. The weights 1 / |d_j| are the
first step, from 0, towards the spatial median (Weiszfeld 1937; Vardi and Zhang, PNAS 97(4), 2000).
A mean follows the few that are far off, and tokens were chosen for what is special about them. The
first factor is for runs of which few tokens are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_engine.rope import Rope, turn

DOUBT_ROWS = 8
"""As many tokens of no drift count besides those of a run that are computed."""
LEAST = 1e-6
"""A drift below this is none."""


class Drift:
    """One run's.

    Args:
        rope: of the model. layers, kv_heads, head_dim: likewise.
        first: position of the run's first token.
        depths: int64 [length], in how many leading layers each of its tokens is computed.
    """

    def __init__(
        self, rope: Rope, layers: int, kv_heads: int, head_dim: int, first: int, depths: Tensor
    ) -> None:
        self._depths = depths[:, None, None]
        self._cos, self._sin = rope.turns(first + torch.arange(len(depths)), depths.device)
        shape = layers, 2 * kv_heads, head_dim
        self._sums, self._given = (torch.zeros(shape, device=depths.device) for _ in range(2))
        self._weights = torch.zeros(*shape[:2], 1, device=depths.device)
        self._rows = [0] * layers

    def saw(
        self, layer: int, tokens: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A layer has computed some more of the run's tokens.

        Args:
            tokens: int64 [n], from 0; n above 0.
            keys, values: fresh less placed, fp32 [n, kv_heads, head_dim]; keys rotated.

        Returns:
            What is to be added to K, rotated, and to V, besides what earlier calls said: fp32
            [length, kv_heads, head_dim], 0 for tokens that the layer computes.
        """
        both = torch.cat([turn(keys, (self._cos[tokens], -self._sin[tokens])), values], 1)
        weights = both.norm(dim=-1, keepdim=True).clamp(min=LEAST).reciprocal()
        self._sums[layer] += (both * weights).sum(0)
        self._weights[layer] += weights.sum(0)
        self._rows[layer] += len(both)
        trusted = self._rows[layer] / (self._rows[layer] + DOUBT_ROWS)
        found = trusted * self._sums[layer] / self._weights[layer]
        by_key, by_value = (found - self._given[layer]).chunk(2)
        self._given[layer] = found
        left = self._depths <= layer
        return turn(by_key[None], (self._cos * left, self._sin * left)), by_value * left
