"""Attention of a text's last rows to chosen units alone, in a plain torch model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_decode.sparse.choosing import choose

SINKS, RECENT = 1, 2


@dataclass(frozen=True)
class Layer:
    """What rows of one layer ask, and of what.

    Attributes:
        keys: fp32 [H, n, T, D], all units, the last one filled up with zeros.
        values: likewise.
        queries: fp32 [H, r, G, D], times the scale of the logits.
        rows: int64 [r], positions.
        number: of the layer.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    rows: Tensor
    number: int

    @staticmethod
    def of(
        number: int, q: Tensor, rows: Tensor, keys: Tensor, values: Tensor, unit_tokens: int
    ) -> Layer:
        """From what `LM.compute` hands to `attend`."""
        heads, dim = keys.shape[1:]
        lacking = -(int(rows[-1]) + 1) % unit_tokens

        def parts(one: Tensor) -> Tensor:
            whole = torch.cat([one[: int(rows[-1]) + 1], one.new_zeros(lacking, heads, dim)])
            return whole.transpose(0, 1).unflatten(1, (-1, unit_tokens))

        queries = q.unflatten(1, (heads, -1)).transpose(0, 1) * dim**-0.5
        return Layer(parts(keys), parts(values), queries, rows, number)

    @property
    def unit_tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def counts(self) -> Tensor:
        """Units that each row sees, its own included: int64 [r]."""
        return self.rows // self.unit_tokens + 1

    def visible(self) -> Tensor:
        """Which units lie before each row's own: bool [r, n]."""
        return torch.arange(self.keys.shape[1]) < self.counts[:, None] - 1

    def combined(self, logits: Tensor, softmax: bool = True) -> Tensor:
        """One score for each KV head: [H, r * G, n] -> [H, r, n], summed over the group."""
        each = logits.unflatten(1, self.queries.shape[1:3])
        if softmax:
            each = each.masked_fill(~self.visible()[:, None], -torch.inf).softmax(-1)
        return each.sum(2)

    def attention(self) -> Tensor:
        """fp32 [H, r, G, n * T], exact."""
        flat = self.keys.flatten(1, 2)
        logits = torch.einsum("hrgd,htd->hrgt", self.queries, flat)
        unseen = torch.arange(flat.shape[1]) > self.rows[:, None]
        return logits.masked_fill(unseen[:, None], -torch.inf).softmax(-1)


Score = Callable[[Layer], Tensor]
"""Scores fp32 [H, r, n]; those of a row's own unit and later ones count for nothing."""
Budget = Callable[[Tensor, Layer], Tensor]
"""(scores, layer) -> bool [H, r, n], the units that are chosen."""


@dataclass(frozen=True)
class Share:
    """The same share of the units that a row sees, for every head."""

    share: float

    def __call__(self, scores: Tensor, layer: Layer) -> Tensor:
        chosen = torch.zeros(scores.shape, dtype=torch.bool)
        values, marks = scores.numpy(), chosen.numpy()
        for row, count in enumerate(layer.counts.tolist()):
            found = choose(values[:, row, :count], round(self.share * count), SINKS, RECENT)
            np.put_along_axis(marks[:, row], found, True, axis=-1)
        return chosen


@dataclass(frozen=True)
class Mass:
    """Units until their estimated attention reaches a share of the whole, within bounds.

    Attributes:
        target: share of the attention to units before the row's own.
        floor, cap: shares of the units that are chosen at least and at most.
    """

    target: float
    floor: float = 0.0
    cap: float = 1.0

    def __call__(self, scores: Tensor, layer: Layer) -> Tensor:
        counts = layer.counts[:, None]
        at = torch.arange(scores.shape[-1])
        always = (at < SINKS) | ((at >= counts - RECENT) & (at < counts))
        scores = scores.masked_fill(at >= counts - 1, 0.0)
        order = scores.masked_fill(always, torch.inf).argsort(dim=-1, descending=True, stable=True)
        mass = scores.gather(-1, order)
        before = (mass.cumsum(-1) - mass) / mass.sum(-1, keepdim=True)
        wanted = (before < self.target).sum(-1, keepdim=True)
        few, many = ((share * counts).round() for share in (self.floor, self.cap))
        wanted = wanted.clamp(min=few.clamp(min=SINKS + RECENT), max=many)
        chosen = torch.zeros(scores.shape, dtype=torch.bool)
        return chosen.scatter(-1, order, at.expand_as(order) < wanted) & (at < counts)


def attended(layer: Layer, chosen: Tensor) -> Tensor:
    """Exact attention to the chosen units: fp32 [r, heads * D], as `LM.compute` wants it."""
    flat = layer.keys.flatten(1, 2)
    logits = torch.einsum("hrgd,htd->hrgt", layer.queries, flat)
    seen = chosen.repeat_interleave(layer.unit_tokens, -1)
    seen &= torch.arange(flat.shape[1]) <= layer.rows[:, None]
    weights = logits.masked_fill_(~seen[:, :, None], -torch.inf).softmax(-1)
    return torch.einsum("hrgt,htd->rhgd", weights, layer.values.flatten(1, 2)).flatten(1)
