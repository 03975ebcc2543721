"""Attention of a text's last rows to chosen pages only, in a plain torch model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.page_scores import score_pages
from headrace_decode.sparse.summaries import Summaries


@dataclass(frozen=True)
class Layer:
    """Queries of some rows of one layer, and the layer's K and V, cut into pages.

    Attributes:
        keys: fp32 [H, n, T, D], all pages, the last one padded with zeros.
        values: in the same shape.
        queries: fp32 [H, r, G, D], times the scale of the logits.
        rows: int64 [r], positions.
        number: the layer's number.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    rows: Tensor
    number: int

    @classmethod
    def of(
        cls, number: int, q: Tensor, rows: Tensor, keys: Tensor, values: Tensor, page_tokens: int
    ) -> Self:
        """Cut the arguments of an `Attend` hook into pages."""
        heads, dim = keys.shape[1:]
        lacking = -(int(rows[-1]) + 1) % page_tokens
        by_page = (
            torch.cat([one[: int(rows[-1]) + 1], one.new_zeros(lacking, heads, dim)])
            .transpose(0, 1)
            .unflatten(1, (-1, page_tokens))
            for one in (keys, values)
        )
        queries = q.unflatten(1, (heads, -1)).transpose(0, 1) * dim**-0.5
        of_keys, of_values = by_page
        return cls(of_keys, of_values, queries, rows, number)

    @property
    def page_tokens(self) -> int:
        return self.keys.shape[2]

    @property
    def counts(self) -> Tensor:
        """Number of pages that each row sees, its own included: int64 [r]."""
        return self.rows // self.page_tokens + 1


def estimated(layer: Layer, basis: Basis | None) -> Tensor:
    """Return scores from summaries, as an engine computes them: fp32 [H, r, n].

    The score is 0 for a row's own page and later ones.

    Args:
        basis: the layer's basis; None for own directions.
    """
    heads, pages, tokens, dim = layer.keys.shape
    summaries = Summaries(pages, heads, tokens, dim, basis=basis)
    summaries.put(np.arange(pages), layer.keys.transpose(0, 1))
    found = torch.zeros(heads, len(layer.rows), pages)
    for row, count in enumerate(layer.counts.tolist()):
        queries = layer.queries[:, row].contiguous().numpy()
        some = score_pages(summaries, np.arange(count - 1), queries, 1.0)
        found[:, row, : count - 1] = torch.from_numpy(some)
    return found


def attended(layer: Layer, chosen: Tensor) -> Tensor:
    """Return exact attention to the chosen pages: fp32 [r, heads * D], as `LM.compute` takes it.

    Args:
        chosen: bool [H, r, n].
    """
    flat = layer.keys.flatten(1, 2)
    logits = torch.einsum("hrgd,htd->hrgt", layer.queries, flat)
    seen = chosen.repeat_interleave(layer.page_tokens, -1)
    seen &= torch.arange(flat.shape[1]) <= layer.rows[:, None]
    weights = logits.masked_fill_(~seen[:, :, None], -torch.inf).softmax(-1)
    return torch.einsum("hrgt,htd->rhgd", weights, layer.values.flatten(1, 2)).flatten(1)
