"""Estimate of the error of a run's placed KV from those of its tokens that are computed again.

A run's KV was stored after other text. Its error has a part that all tokens of the run share: the
keys of the whole run point in a slightly different direction, so the run gets too much or too
little attention. A token that is computed again shows this part plus an error of its own. For one
layer and KV head, with the n tokens of the run that the layer computes,

    d_j = K_fresh,j - K_placed,j                  K rotated to position 0; V without rotation
    D   = n / (n + 8) * (sum_j d_j / |d_j|) / (sum_j 1 / |d_j|)

and D is added to K (V) of the tokens that the layer does not compute. The weights 1 / |d_j| are the
first step, from 0, towards the spatial median (Weiszfeld 1937; Vardi and Zhang, PNAS 97(4), 2000).
A mean would follow the few tokens with a large error, and the chosen tokens are not typical ones.
The first factor makes D small for a run of which few tokens are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_engine.rope import Rope

PRIOR_ROWS = 8
"""Number of imaginary tokens without drift that are counted with a run's computed tokens."""
MIN_NORM = 1e-6
"""Lower limit of |d_j|, so that no weight is infinite."""


class KvCorrection:
    """The shared error of one run, D, in each layer and KV head.

    Args:
        rope, layers, kv_heads, head_dim: of the model.
        first: position of the run's first token.
        depths: int64 [length], number of leading layers that compute each of its tokens.
    """

    def __init__(
        self, rope: Rope, layers: int, kv_heads: int, head_dim: int, first: int, depths: Tensor
    ) -> None:
        self._rope, self._depths = rope, depths[:, None, None]
        self._cos, self._sin = rope.turns(first + torch.arange(len(depths)), depths.device)
        shape = layers, 2 * kv_heads, head_dim
        self._sums, self._given = (torch.zeros(shape, device=depths.device) for _ in range(2))
        self._weights = torch.zeros(*shape[:2], 1, device=depths.device)
        self._rows = [0] * layers

    def update(
        self, layer: int, tokens: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Record that a layer has computed some more of the run's tokens.

        Args:
            tokens: int64 [n], indices within the run, from 0; n above 0.
            keys, values: fresh minus placed, fp32 [n, kv_heads, head_dim]; keys rotated.

        Returns:
            The amounts to add to K (rotated) and to V, in addition to those that earlier calls
            returned: fp32 [length, kv_heads, head_dim], 0 for tokens that the layer computes.
        """
        both = torch.cat(
            [self._rope.turn(keys, (self._cos[tokens], -self._sin[tokens])), values], 1
        )
        weights = both.norm(dim=-1, keepdim=True).clamp(min=MIN_NORM).reciprocal()
        self._sums[layer] += (both * weights).sum(0)
        self._weights[layer] += weights.sum(0)
        self._rows[layer] += len(both)
        trusted = self._rows[layer] / (self._rows[layer] + PRIOR_ROWS)
        found = trusted * self._sums[layer] / self._weights[layer]
        by_key, by_value = (found - self._given[layer]).chunk(2)
        self._given[layer] = found
        left = self._depths <= layer
        turns = self._cos * left, self._sin * left
        return self._rope.turn(by_key[None], turns), by_value * left
