"""The pages that the last rows of a text attend to, by scores and budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace_decode.sparse.page_selection import select_pages
from headrace_lab.sparse import attention as shared
from headrace_lab.sparse.attention import attended

__all__ = ["Budget", "Layer", "Mass", "Score", "Share", "attended"]

SINKS, RECENT = 1, 2


class Layer(shared.Layer):
    """A layer with the additional functions that other projects' rules need."""

    def visible(self) -> Tensor:
        """Return which pages precede each row's own: bool [r, n]."""
        return torch.arange(self.keys.shape[1]) < self.counts[:, None] - 1

    def combined(self, logits: Tensor, softmax: bool = True) -> Tensor:
        """Return one score for each KV head: [H, r * G, n] -> [H, r, n], summed over the group."""
        each = logits.unflatten(1, self.queries.shape[1:3])
        if softmax:
            each = each.masked_fill(~self.visible()[:, None], -torch.inf).softmax(-1)
        return each.sum(2)

    def attention(self) -> Tensor:
        """Return the exact attention weights, fp32 [H, r, G, n * T]."""
        flat = self.keys.flatten(1, 2)
        logits = torch.einsum("hrgd,htd->hrgt", self.queries, flat)
        unseen = torch.arange(flat.shape[1]) > self.rows[:, None]
        return logits.masked_fill(unseen[:, None], -torch.inf).softmax(-1)


Score = Callable[[Layer], Tensor]
"""Scores fp32 [H, r, n]; those of a row's own page and later ones count for nothing."""
Budget = Callable[[Tensor, Layer], Tensor]
"""(scores, layer) -> bool [H, r, n], the pages that are chosen."""


@dataclass(frozen=True)
class Share:
    """The same share of the pages that a row sees, for every head."""

    share: float

    def __call__(self, scores: Tensor, layer: Layer) -> Tensor:
        chosen = torch.zeros(scores.shape, dtype=torch.bool)
        values, marks = scores.numpy(), chosen.numpy()
        for row, count in enumerate(layer.counts.tolist()):
            found = select_pages(values[:, row, :count], round(self.share * count), SINKS, RECENT)
            np.put_along_axis(marks[:, row], found, True, axis=-1)
        return chosen


@dataclass(frozen=True)
class Mass:
    """Pages until their estimated attention reaches a share of the whole, within bounds.

    Attributes:
        target: share of the attention to pages before the row's own.
        floor, cap: shares of the pages that are chosen at least and at most.
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
