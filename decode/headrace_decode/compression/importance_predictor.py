"""The predictor: small networks that predict a token's score from its own key and value.

`scores` uses queries that stand for later ones, and for these the engine reads a context again. The
score that such a reading gives a token can mostly be predicted from the token's KV, since the KV
encodes the token and those before it. A small network for each KV head learns this prediction, once
for a model, from contexts that were read again:

    log s = w2 . relu(W1 x + b1) + w . x + b2        x = (key at position 0, value)

With a predictor, no context need be read again, and a part of a context is scored as well as the
whole. Source: Fast KVzip (arXiv 2601.17668) and KVzap (arXiv 2601.07891), whose networks take a
layer's input. This one takes KV, which an engine always has, also when it was loaded from
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headrace_engine.rope import Rope

ROWS_AT_ONCE = 1024


def to_position_zero(rope: Rope, keys: Tensor, begin: int = 0) -> Tensor:
    """Turn a context's rotated keys from position `begin` on, [tokens, kv_heads, head_dim], to
    position 0, where a predictor takes them: [kv_heads, tokens, head_dim]."""
    positions = torch.arange(begin, begin + len(keys), device=keys.device)
    return rope.shift(keys, -positions).transpose(0, 1)


@dataclass(frozen=True)
class ImportancePredictor:
    """The networks of all heads, fp32.

    Attributes:
        into: W1, [layers, kv_heads, 2 head_dim, width].
        shift: b1, [layers, kv_heads, width].
        out: w2, [layers, kv_heads, width].
        straight: w, [layers, kv_heads, 2 head_dim].
        level: b2, [layers, kv_heads].
    """

    into: Tensor
    shift: Tensor
    out: Tensor
    straight: Tensor
    level: Tensor

    def to(self, device: torch.device) -> ImportancePredictor:
        """Return the networks on a device."""
        return ImportancePredictor(*(getattr(self, f.name).to(device) for f in fields(self)))

    def scores(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """Predict the scores that repeating rows would give one layer's tokens, plus the floor of
        the training loss.

        Args:
            keys, values: [kv_heads, tokens, head_dim], of any float dtype; keys from
                `to_position_zero`.

        Returns:
            fp32 [kv_heads, tokens].
        """
        into, shift = self.into[layer], self.shift[layer][:, None]
        out, straight = self.out[layer][..., None], self.straight[layer][..., None]
        found = []
        for k, v in zip(keys.split(ROWS_AT_ONCE, 1), values.split(ROWS_AT_ONCE, 1), strict=True):
            x = torch.cat([k, v], -1).float()
            found.append(((x @ into + shift).relu() @ out + x @ straight)[..., 0])
        return (torch.cat(found, 1) + self.level[layer][:, None]).exp()
