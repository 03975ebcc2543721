"""KV of a context of which each layer and head holds tokens of its own, and attention to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace_decode.compression.refit import fit
from headrace_lab.models.lm import KV, LM, Attend


@dataclass(frozen=True)
class Held:
    """Kept KV, by layer and KV head.

    Attributes:
        keys, values: fp32 [k, head_dim] each, keys rotated for the positions they had.
    """

    keys: list[list[Tensor]]
    values: list[list[Tensor]]

    @classmethod
    def whole(cls, kv: KV, begin: int, end: int) -> Held:
        """Return KV of which all heads keep the same positions, `begin` to `end` - 1."""
        keys, values = (
            [list(layer[begin:end].transpose(0, 1)) for layer in one]
            for one in (kv.keys, kv.values)
        )
        return cls(keys, values)

    @property
    def pairs(self) -> int:
        """(layer, head, token) pairs that are held."""
        return sum(len(head) for layer in self.keys for head in layer)

    def kept(
        self,
        stays: list[list[Tensor]],
        queries: Sequence[Tensor],
        ridge: float | None,
        key_ridge: float | None,
    ) -> Held:
        """Return a part of this KV, with keys and values fitted to compensate for the dropped rest.

        Args:
            stays: int64 [k] by layer and head, indices of the rows to keep.
            queries: queries that both are fitted to, by layer, fp32 [rows, heads, head_dim].
            ridge, key_ridge: as in `fit`.
        """
        found = Held([], [])
        for layer, asked in enumerate(queries):
            heads = self.keys[layer], self.values[layer], stays[layer]
            scaled = asked.unflatten(1, (len(stays[layer]), -1)) * asked.shape[-1] ** -0.5
            both = [
                fit(k, v, at, one.flatten(0, 1), ridge, key_ridge)
                for k, v, at, one in zip(*heads, scaled.unbind(1), strict=True)
            ]
            found.keys.append([k for k, _ in both])
            found.values.append([v for _, v in both])
        return found

    def joined(self, other: Held) -> Held:
        """With what another holds behind what this one does."""
        keys, values = (
            [
                [torch.cat(heads) for heads in zip(*layers, strict=True)]
                for layers in zip(*both, strict=True)
            ]
            for both in ((self.keys, other.keys), (self.values, other.values))
        )
        return Held(keys, values)

    def attend(self, first: int) -> Attend:
        """Attention of rows from position `first` on: to all that is held, and among themselves."""

        def attend(layer: int, q: Tensor, rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            fresh = torch.arange(first, int(rows[-1]) + 1) <= rows[:, None]
            found = []
            for head, asked in enumerate(q.unflatten(1, (keys.shape[1], -1)).unbind(1)):
                held = self.keys[layer][head]
                k, v = (
                    torch.cat([old, new[first : int(rows[-1]) + 1, head]])
                    for old, new in ((held, keys), (self.values[layer][head], values))
                )
                seen = torch.cat([fresh.new_ones(len(rows), len(held)), fresh], 1)
                group = asked.transpose(0, 1)[None]
                k, v = (one.expand(1, group.shape[1], -1, -1) for one in (k, v))
                found.append(scaled_dot_product_attention(group, k, v, attn_mask=seen)[0])
            return torch.cat(found).transpose(0, 1).flatten(1)

        return attend

    def follow(self, lm: LM, tokens: Tensor, first: int) -> Tensor:
        """Return log-probabilities after each token from `first` on: fp32 [tail, vocabulary]."""
        rows = torch.arange(first, len(tokens))
        kv = lm.empty(len(tokens))
        return lm.compute(tokens, kv, rows, attend=self.attend(first)).log_softmax(-1)
