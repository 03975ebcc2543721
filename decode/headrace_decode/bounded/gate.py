"""How much each token's key will be attended to, told from its own key and value.

`scores` asks queries that stand for later ones, and reads a context again for that. What such a
reading says of a token can mostly be told from the token's KV: it holds what the model has made of
the token and of those before it. So a small network of each KV head learns to say it, once for a
model, from contexts that were read again:

    log s = w2 . relu(W1 x + b1) + w . x + b2        x = (key at position 0, value)

Then a context need not be read again, and of a part of a context as much can be said as of all.
The idea is Fast KVzip's (arXiv 2601.17668) and KVzap's (arXiv 2601.07891), whose networks look at
a layer's input. KV is what an engine has, wherever it came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_engine.rope import Rope

ROWS_AT_ONCE = 1024


def at_start(rope: Rope, keys: Tensor, begin: int = 0) -> Tensor:
    """A context's rotated keys from position `begin` on, [tokens, kv_heads, head_dim], as a gate
    takes them: at position 0, [kv_heads, tokens, head_dim]."""
    return rope.shift(keys, -torch.arange(begin, begin + len(keys))).transpose(0, 1)


@dataclass(frozen=True)
class Gate:
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

    def scores(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        """Scores of one layer's tokens: what rows that repeat would say, and a floor.

        Args:
            keys, values: [kv_heads, tokens, head_dim], of any float dtype; keys as of `at_start`.

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
