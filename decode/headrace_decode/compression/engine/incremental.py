"""Keeps a context's KV within a budget while its prompt is computed, with a predictor.

The engine computes the prompt as usual. Whenever the prompt has grown by a segment, the KV to keep
is chosen from the KV kept before and all of the segment. The request therefore never holds more
than the budget, a segment, and the tokens of a step. Rows of later segments attend to the retained
KV.

A token's score has two parts (`headrace_decode.compression.scores`). The predictor predicts the
score from repeating rows, once, when the token's segment is complete. The score from the context's
own rows is computed at each choice, from the newest rows, turned to positions after the context so
far. The retained KV is fitted to the queries of the same rows
(`headrace_decode.compression.refit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_decode.compression.engine.compressed_attention import (
    RetainedPages,
    filled_places,
)
from headrace_decode.compression.engine.compression_job import EARLIER_TOKENS
from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.importance_predictor import ImportancePredictor, to_position_zero
from headrace_decode.compression.refit import HeadKV, fit_layer
from headrace_decode.compression.scores import ABSENT, predicted_scores, to_later_positions
from headrace_decode.compression.selection import select_token_pages
from headrace_engine.rope import Rope


class RetainedContext(NamedTuple):
    """KV that is kept of the segments so far.

    Attributes:
        dropped: its head pages.
        predicted: the predictor's scores of its tokens, fp32 [layers, kv_heads, places] in the
            order of a head's head pages, `ABSENT` after them.
    """

    dropped: RetainedPages
    predicted: Tensor


class IncrementalCompression:
    """One incremental request in the worker.

    Args:
        head_pages: head pages of the cache. scale: scale of the logits.
        rope, predictor: rotary embedding and predictor of the model.
        held: retained KV that the request begins with.

    Attributes:
        held: retained KV; None before the first choice.
    """

    def __init__(
        self,
        head_pages: HeadPages,
        scale: float,
        rope: Rope,
        predictor: ImportancePredictor,
        held: RetainedContext | None = None,
    ) -> None:
        self._head_pages, self._scale = head_pages, scale
        self._rope, self._predictor, self.held = rope, predictor, held
        self._came: list[Tensor] = [torch.empty(0)] * head_pages.layers

    @property
    def tokens(self) -> int:
        """Number of the context's first tokens that the retained KV was chosen from."""
        return 0 if self.held is None else self.held.dropped.tokens

    def rows(self, first_token: int, count: int) -> IncrementalRow | None:
        """Return a step's newest rows of the prompt, whose queries count; None if there are none.

        Args:
            first_token: index of the request's first row among the step's tokens.
            count: number of the request's rows in the step that are of the prompt.
        """
        if count <= 0:
            return None
        few = min(count, EARLIER_TOKENS)
        return IncrementalRow(self, slice(first_token + count - few, first_token + count))

    def add_queries(self, layer: int, queries: Tensor) -> None:
        """Add queries of the rows that follow those before: [rows, heads, head_dim], rotated. The
        newest `EARLIER_TOKENS` are kept."""
        before = self._came[layer]
        both = torch.cat([before, queries]) if len(before) else queries
        self._came[layer] = both[-EARLIER_TOKENS:].clone()

    def end(self) -> None:
        """Free the queries, since the last choice was made."""
        self._came = [torch.empty(0)] * self._head_pages.layers

    def drop(self, tokens: int, pages: Tensor, room: Tensor) -> RetainedContext:
        """Choose the KV to keep from now on, and return it.

        Args:
            tokens: number of tokens of the context so far, whole blocks.
            pages: int64 [n], pages that are new since the last choice.
            room: head pages to keep it in; the head pages that held it before may be among them.
        """
        layers, device = range(len(self._came)), self._head_pages.device
        before = torch.empty(len(layers), self._head_pages.kv_heads, 0, device=device)
        if self.held is not None:
            before = self.held.predicted
        old = before.shape[-1]
        all_predicted, all_scores, asked = list[Tensor](), list[Tensor](), list[Tensor]()
        for layer in layers:
            keys, values = self._both(layer, pages)
            turned = to_position_zero(
                self._rope, keys[:, old:].transpose(0, 1).float(), self.tokens
            )
            fresh = self._predictor.scores(layer, turned, values[:, old:])
            predicted = torch.cat([before[layer], fresh], 1)
            asked.append(to_later_positions(self._came[layer].float(), self._rope))
            all_scores.append(predicted_scores(predicted, asked[-1], keys.float(), self._scale))
            all_predicted.append(predicted)
        kept = select_token_pages(torch.stack(all_scores), len(room), self._head_pages.page_tokens)

        def fit(layer: int) -> list[HeadKV]:
            both, there = self._both(layer, pages), all_predicted[layer] >= 0
            return fit_layer(*both, kept[layer], asked[layer], self._scale, there)

        dropped = RetainedPages.of(tokens, kept, map(fit, layers), room, self._head_pages)
        filled = filled_places(dropped.counts * self._head_pages.page_tokens)[1]
        predicted = torch.full(filled.shape, ABSENT, device=device)
        predicted[filled] = torch.stack(all_predicted)[kept]
        self.held = RetainedContext(dropped, predicted)
        return self.held

    def _both(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V, each [kv_heads, places, head_dim]. The first places are the retained KV,
        as many as the head with most pages has. The new pages follow."""
        fresh = self._head_pages.read(layer, pages)
        if self.held is None:
            return fresh
        old = self._head_pages.read_head_pages(self.held.dropped.head_pages[layer])
        keys, values = (torch.cat(pair, 1) for pair in zip(old, fresh, strict=True))
        return keys, values


@dataclass(frozen=True)
class IncrementalRow:
    """Rows of a step whose queries count for an incremental request.

    Attributes:
        stream: the request.
        tokens: slice of the step's tokens.
    """

    stream: IncrementalCompression
    tokens: slice

    def record_queries(self, layer: int, queries: Tensor) -> None:
        """Count the rows' queries in one layer, like `ScoringRow.record_queries`."""
        self.stream.add_queries(layer, queries[self.tokens])
