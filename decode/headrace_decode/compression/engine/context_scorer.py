"""Scores of a context's keys, from the queries of rows that read the context again.

Internal requests of the scheduler read a context again. Their prompt is the context, whose KV is in
the cache, and then a part of the context once more. Two kinds of their rows count
(`headrace_decode.compression.scores`):

    repeating   rows of the repeated part, without the tokens that lead to it
    earlier     the context's last rows, which the first of these requests computes again, turned to
                positions after the context

With a predictor (`headrace_decode.compression.importance_predictor`) no rows repeat: the predictor
predicts the scores that they would give, and one request computes the context's last rows.

The retained KV is fitted to the queries of the context's last rows
(`headrace_decode.compression.refit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_decode.compression.engine.head_pages import HeadPages
from headrace_decode.compression.importance_predictor import ImportancePredictor, to_position_zero
from headrace_decode.compression.refit import FITTED_ROWS, HeadKV, fit_layer
from headrace_decode.compression.scores import AttentionReceived, combined_scores, later_offsets
from headrace_decode.compression.selection import select_token_pages
from headrace_engine.rope import Rope


class RereadRows(NamedTuple):
    """Rows that count in a request that reads a context again.

    Attributes:
        request_id: id of the request whose context is read.
        tokens: number of tokens of the context, whole blocks.
        earlier: first position of the context's own rows that count, which end with it.
        repeating: first position of the repeating rows that count.
    """

    request_id: str
    tokens: int
    earlier: int
    repeating: int

    @property
    def begins(self) -> bool:
        """Whether this is the first request that reads the context."""
        return self.earlier < self.tokens


class ContextScorer:
    """One context that is read again. Queries come with the steps of the engine. They score the
    keys later, a layer at a time.

    Args:
        rereads: rows of any request that reads it.
        pages: int64 [n], pages of the context.
        head_pages: head pages of the cache. scale: scale of the logits. rope: the model's rotary
            embedding.
        predictor: predictor that replaces repeating rows; None: rows repeat.
    """

    def __init__(
        self,
        rereads: RereadRows,
        pages: Tensor,
        head_pages: HeadPages,
        scale: float,
        rope: Rope,
        predictor: ImportancePredictor | None = None,
    ) -> None:
        def of_layers() -> list[AttentionReceived]:
            return [
                AttentionReceived(head_pages.kv_heads, rereads.tokens, scale, head_pages.device)
                for _ in range(head_pages.layers)
            ]

        self._pages, self._head_pages, self.device = pages, head_pages, head_pages.device
        self._scale, self._rope, self._predictor = scale, rope, predictor
        self._repeating, self._earlier = of_layers(), of_layers()
        self._predicted: dict[int, Tensor] = {}
        self._came: list[list[tuple[Tensor, Tensor | None]]] = [
            [] for _ in range(head_pages.layers)
        ]
        self._asked: list[list[Tensor]] = [[] for _ in range(head_pages.layers)]
        """By layer: queries of every `_step`th earlier row, turned."""
        self._turned = [0] * head_pages.layers
        self._step = max(1, (rereads.tokens - rereads.earlier) // FITTED_ROWS)
        self._next = 0
        self._stays: Tensor | None = None
        self._kept: list[list[HeadKV]] = []

    def add_queries(self, layer: int, queries: Tensor, turn: Tensor | None) -> None:
        """Keep queries until the layer is scored.

        Args:
            queries: [rows, heads, head_dim], rotated.
            turn: int64 [rows], positions that earlier rows are turned by; None for repeating rows.
        """
        self._came[layer].append((queries.clone(), turn))

    def score(self, layers: int) -> None:
        """Score so many layers, one after the other, with the queries that came for them."""
        for _ in range(layers):
            layer, self._next = self._next, (self._next + 1) % len(self._came)
            came, self._came[layer] = self._came[layer], []
            if not came:
                continue
            keys, values = self._head_pages.read(layer, self._pages)
            keys = keys.float()
            if self._predictor is not None and layer not in self._predicted:
                begun = to_position_zero(self._rope, keys.transpose(0, 1))
                self._predicted[layer] = self._predictor.scores(layer, begun, values)
            for queries, turn in came:
                if turn is not None:
                    turned = self._rope.shift(queries.float(), turn)
                    self._earlier[layer].add(turned, keys)
                    first = -self._turned[layer] % self._step
                    self._asked[layer].append(turned[first :: self._step].clone())
                    self._turned[layer] += len(turned)
            repeating = [queries for queries, turn in came if turn is None]
            if repeating:
                self._repeating[layer].add(torch.cat(repeating).float(), keys)

    def scores(self) -> Tensor:
        """Score with all queries that came, and return the scores: fp32 [layers, kv_heads, tokens].

        Raises:
            ValueError: rows of a kind are missing.
        """
        self.score(len(self._came))
        if self._predictor is None:
            both = zip(self._repeating, self._earlier, strict=True)
            return torch.stack([combined_scores(parts) for parts in both])
        earlier = torch.stack([one.root_mean_square() for one in self._earlier])
        predicted = torch.stack([self._predicted[layer] for layer in range(len(self._earlier))])
        return torch.hypot(predicted, earlier)

    def fit(self, pages: int, layers: int) -> None:
        """Choose the tokens to keep, if that is not done, and fit so many more layers.

        Args:
            pages: number of pages to keep, the same in each call.
            layers: number of layers to fit.
        """
        if self._stays is None:
            self._stays = select_token_pages(self.scores(), pages, self._head_pages.page_tokens)
        for layer in range(len(self._stays))[len(self._kept) :][:layers]:
            both, asked = self._head_pages.read(layer, self._pages), torch.cat(self._asked[layer])
            self._kept.append(fit_layer(*both, self._stays[layer], asked, self._scale))

    def kept(self, pages: int) -> tuple[Tensor, list[list[HeadKV]]]:
        """Return the kept tokens, bool [layers, kv_heads, tokens], and their K and V by layer.

        Args:
            pages: as for `fit`.
        """
        self.fit(pages, len(self._came))
        assert self._stays is not None
        return self._stays, self._kept


@dataclass(frozen=True)
class ScoringRow:
    """Rows of a step whose queries score a context's keys.

    Attributes:
        scorer: the scorer of the context.
        earlier, repeating: slices of the step's tokens; may be empty.
        turn: as for `ContextScorer.add_queries`, for the rows of `earlier`.
    """

    scorer: ContextScorer
    earlier: slice
    repeating: slice
    turn: Tensor

    def record_queries(self, layer: int, queries: Tensor) -> None:
        """Count the rows' queries in one layer.

        Args:
            queries: [tokens, heads, head_dim], of all rows of the step, rotated.
        """
        if len(self.turn):
            self.scorer.add_queries(layer, queries[self.earlier], self.turn)
        if self.repeating.stop > self.repeating.start:
            self.scorer.add_queries(layer, queries[self.repeating], None)


def scoring_row(
    rereads: RereadRows,
    scorer: ContextScorer,
    first_token: int,
    first: int,
    rows: int,
    seen: int = 0,
) -> ScoringRow | None:
    """Return which tokens of a request's row count; None if none does.

    Args:
        first_token: index of its first token among the step's tokens.
        first: position of this token. rows: number of its tokens.
        seen: positions below this have counted. The request was preempted then, and is computed
            again.
    """

    def within(begin: int, end: int) -> slice:
        begin, end = max(begin, first, seen), min(end, first + rows)
        return slice(first_token + begin - first, first_token + max(begin, end) - first)

    earlier = within(rereads.earlier, rereads.tokens)
    repeating = within(rereads.repeating, first + rows)
    if earlier.start == earlier.stop and repeating.start == repeating.stop:
        return None
    tokens = torch.arange(earlier.start, earlier.stop, device=scorer.device)
    at = first + tokens - first_token
    return ScoringRow(
        scorer, earlier, repeating, later_offsets(at, rereads.earlier, rereads.tokens)
    )
