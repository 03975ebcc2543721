"""Bases of a model, learned from some texts, and the error of each keep ratio, measured on others.

A text's prefix is computed exactly. Then its last rows are computed as in decoding, each over the
KV of the rows before it, with attention in all layers to the pages that an engine would select.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace_decode.attention.page_counts import RECENT, SINKS, selected_page_count
from headrace_decode.sparse.basis import COORDINATES, Basis
from headrace_decode.sparse.page_selection import select_pages
from headrace_lab.models.lm import LM
from headrace_lab.sparse.attention import Layer, attended, estimated
from headrace_lab.sparse.moments import Moments

SHARES = (0.05, 0.1, 0.15, 0.2, 0.3)
TAIL_TOKENS = 128
"""Number of a text's last tokens that are measured."""
EVERY = 8
"""In the last layer, one row in this many has its query counted: each costs a row of logits."""


class Learning:
    """Sums over texts from which a model's bases are learned."""

    def __init__(self, model: LM, page_tokens: int) -> None:
        self._model, self._page_tokens = model, page_tokens
        self._moments = [Moments(model.kv_heads, model.dim) for _ in range(model.layers)]

    def add(self, tokens: Sequence[int]) -> None:
        """Count a text, without its tokens after the last whole page."""
        model, whole = self._model, len(tokens) // self._page_tokens * self._page_tokens
        text, kv = torch.tensor(tokens[:whole]), model.empty(whole)

        def keep(layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
            last = layer == model.layers - 1
            return rows % EVERY == 0 if last else torch.ones_like(rows).bool()

        def watch(layer: int, rows: Tensor, q: Tensor) -> None:
            grouped = q.unflatten(1, (model.kv_heads, -1)).transpose(0, 1).flatten(1, 2)
            self._moments[layer].add_queries(grouped.numpy())

        model.compute(text, kv, torch.arange(whole), keep, watch)
        for moments, keys in zip(self._moments, kv.keys, strict=True):
            moments.add_pages(keys.unflatten(0, (-1, self._page_tokens)).transpose(1, 2).numpy())

    def bases(self) -> list[Basis]:
        """Return the basis of each layer."""
        rank = min(COORDINATES, self._model.dim)
        return [moments.basis(rank) for moments in self._moments]


def divergences(
    model: LM, tokens: Sequence[int], bases: Sequence[Basis], page_tokens: int
) -> dict[float, float]:
    """Return the mean KL(exact || sparse) over a text's last tokens, nats, by keep ratio.

    Args:
        tokens: the text, at least as long as an engine needs in order to attend sparsely.
    """
    text, kv = torch.tensor(tokens), model.empty(len(tokens))
    first = len(tokens) - TAIL_TOKENS

    def keep(layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rows >= first if layer == model.layers - 1 else torch.ones_like(rows).bool()

    exact = model.compute(text, kv, torch.arange(len(tokens)), keep).log_softmax(-1)
    found = {}
    for keep_ratio in SHARES:

        def attend(
            layer: int,
            q: Tensor,
            rows: Tensor,
            keys: Tensor,
            values: Tensor,
            keep_ratio: float = keep_ratio,
        ) -> Tensor:
            here = Layer.of(layer, q, rows, keys, values, page_tokens)
            return attended(here, chosen(estimated(here, bases[layer]), here, keep_ratio))

        # Only the tail's KV is written, and each keep ratio writes it again.
        logits = model.compute(text, kv, torch.arange(first, len(tokens)), attend=attend)
        kl = (exact.exp() * (exact - logits.log_softmax(-1))).sum(-1).double()
        found[keep_ratio] = float(kl.mean())
    return found


def chosen(scores: Tensor, layer: Layer, keep_ratio: float) -> Tensor:
    """Return the pages that an engine would select: bool [H, r, n]; all pages for dense rows.

    Args:
        scores: fp32 [H, r, n].
    """
    found = torch.zeros(scores.shape, dtype=torch.bool)
    values, marks = scores.numpy(), found.numpy()
    for row, (at, count) in enumerate(zip(layer.rows.tolist(), layer.counts.tolist(), strict=True)):
        wanted = selected_page_count(at + 1, layer.page_tokens, keep_ratio) or count
        pages = select_pages(values[:, row, :count], wanted, SINKS, RECENT)
        np.put_along_axis(marks[:, row], pages, True, axis=-1)
    return found


def min_share(kl: Mapping[float, float], target_kl: float) -> float | None:
    """Return the smallest keep ratio whose KL is at most the target; None if there is none."""
    return min((keep_ratio for keep_ratio, one in kl.items() if one <= target_kl), default=None)
