"""Rereading of contexts in plain torch, outside of an engine: scores of their keys, and the error
of answers after some keys are dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_decode.compression.importance_predictor import ImportancePredictor, to_position_zero
from headrace_decode.compression.refit import fit_layer
from headrace_decode.compression.scores import AttentionReceived, plan_repeats, to_later_positions
from headrace_decode.compression.selection import select_token_pages
from headrace_engine.rope import Rope
from headrace_lab.compression.streaming import Masked, Newest, Streamed
from headrace_lab.models.lm import LM
from headrace_lab.sparse.calibrate import TAIL_TOKENS

SHARES = 0.5, 0.25, 0.12
BLOCK_TOKENS = 2048
MIN_KL = 1e-9
"""Lower limit of a returned KL: smaller values are rounding errors."""
Watch = Callable[[int, int, Tensor], None]
"""Called with (layer, first of the context's tokens that the rows repeat, their rotated queries
[rows, heads, head_dim])."""


def repeat(
    model: LM,
    tokens: Tensor,
    keys: Tensor,
    values: Tensor,
    repeated: Sequence[AttentionReceived],
    watch: Watch | None = None,
) -> None:
    """Compute a context a second time after itself, part by part.

    Args:
        tokens: int64 [n].
        keys, values: fp32 [layers, n, kv_heads, head_dim], of the context.
        repeated: one for each layer, to which the queries of the repeated rows are added.
        watch: called with the same queries.
    """
    n = len(tokens)
    by_head = keys.transpose(1, 2).contiguous()
    for lead, begin, end in plan_repeats(n):
        again = torch.cat([tokens, tokens[lead:end]])
        longer = model.empty(len(again))
        longer.keys[:, :n], longer.values[:, :n] = keys, values

        def counted(
            layer: int, rows: Tensor, q: Tensor, begin: int = begin, skip: int = begin - lead
        ) -> None:
            repeated[layer].add(q[skip:], by_head[layer])
            if watch is not None:
                watch(layer, begin, q[skip:])

        model.compute(again, longer, torch.arange(n, len(again)), watch=counted)


@dataclass(frozen=True)
class Computed:
    """A context, computed exactly.

    Attributes:
        tokens: int64 [n].
        keys, values: fp32 [layers, n, kv_heads, head_dim].
        turned: keys rotated to position 0, [layers, kv_heads, n, head_dim].
        asked: queries of its last rows as if they came later, [layers, rows, heads, head_dim].
        latest: fp32 [layers, kv_heads, n], the attention of these queries to each token.
    """

    tokens: Tensor
    keys: Tensor
    values: Tensor
    turned: Tensor
    asked: Tensor
    latest: Tensor

    @classmethod
    def of(cls, model: LM, rope: Rope, tokens: Tensor) -> Computed:
        """Compute a context exactly."""
        n, kv = len(tokens), model.empty(len(tokens))
        last = Newest()

        for begin in range(0, n, BLOCK_TOKENS):
            model.compute(
                tokens, kv, torch.arange(begin, min(n, begin + BLOCK_TOKENS)), watch=last.record
            )
        asked = torch.stack(
            [to_later_positions(last[layer], rope) for layer in range(model.layers)]
        )
        latest = []
        for queries, keys in zip(asked, kv.keys, strict=True):
            received = AttentionReceived(model.kv_heads, n, model.dim**-0.5)
            received.add(queries, keys.transpose(0, 1))
            latest.append(received.root_mean_square())
        turned = torch.stack([to_position_zero(rope, keys) for keys in kv.keys])
        return cls(tokens, kv.keys, kv.values, turned, asked, torch.stack(latest))

    def repeated(self, model: LM) -> Tensor:
        """Return the attention of the repeated rows to each key: fp32 [layers, kv_heads, n]."""
        found = [
            AttentionReceived(model.kv_heads, len(self.tokens), model.dim**-0.5)
            for _ in range(model.layers)
        ]
        repeat(model, self.tokens, self.keys, self.values, found)
        return torch.stack([one.root_mean_square() for one in found])

    def scores(self, predictor: ImportancePredictor) -> Tensor:
        """Return the scores that an engine computes: fp32 [layers, kv_heads, n]."""
        pairs = zip(self.turned, self.values, strict=True)
        predicted = [
            predictor.scores(n, keys, v.transpose(0, 1)) for n, (keys, v) in enumerate(pairs)
        ]
        return torch.hypot(torch.stack(predicted), self.latest)

    def fit_layer(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V after an engine's refit of the kept tokens, fp32
        [layers, n, kv_heads, head_dim] each.

        `kept`: bool [layers, kv_heads, n]."""
        keys, values = self.keys.clone(), self.values.clone()
        for layer, (stays, asked) in enumerate(zip(kept, self.asked, strict=True)):
            k, v = (one[layer].transpose(0, 1) for one in (self.keys, self.values))
            of_heads = fit_layer(k, v, stays, asked, k.shape[-1] ** -0.5)
            for head, (moved, changed) in enumerate(of_heads):
                keys[layer, stays[head], head] = moved
                values[layer, stays[head], head] = changed
        return keys, values


def divergences(
    model: LM, rope: Rope, text: Sequence[int], predictor: ImportancePredictor, page_tokens: int
) -> dict[float, float]:
    """Return the mean KL(exact || compressed) over a text's last tokens, nats, by keep ratio of
    `SHARES`.

    It is the larger KL of two: a context that is compressed once, and one that is streamed.

    Args:
        text: the text; its whole pages before the last `TAIL_TOKENS` tokens are the context.
    """
    n = (len(text) - TAIL_TOKENS) // page_tokens * page_tokens
    whole = torch.tensor(text[: n + TAIL_TOKENS])
    context = Computed.of(model, rope, whole[:n])
    scores, rows = context.scores(predictor), torch.arange(n, len(whole))
    tail = torch.ones(*scores.shape[:2], TAIL_TOKENS, dtype=torch.bool)

    def follow(keys: Tensor, values: Tensor, kept: Tensor) -> Tensor:
        kv = model.empty(len(whole))
        kv.keys[:, :n], kv.values[:, :n] = keys, values
        attend = Masked(torch.cat([kept, tail], -1)).attend
        return model.compute(whole, kv, rows, attend=attend).log_softmax(-1)

    all_of = context.keys, context.values
    exact = follow(*all_of, torch.ones(scores.shape, dtype=torch.bool))
    found = {}
    for keep_ratio in SHARES:
        kept = select_token_pages(
            scores, int(keep_ratio * scores.numel()) // page_tokens, page_tokens
        )
        said = [follow(*context.fit_layer(kept), kept)]
        streamed = Streamed.of(model, rope, whole[:n], predictor, keep_ratio, page_tokens)
        if streamed is not None:
            said.append(follow(streamed.keys, streamed.values, streamed.kept))
        kl = [float((exact.exp() * (exact - one)).sum(-1).double().mean()) for one in said]
        found[keep_ratio] = max(*kl, MIN_KL)
    return found
