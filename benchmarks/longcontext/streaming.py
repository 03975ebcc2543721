"""A context that is never in memory as a whole: it is prefilled block by block under the budget.

`Streaming`: each block is computed over the KV kept of the blocks before it. It is
repeated once, so that its tokens and the older ones are ranked by the same attention. Tokens that
do not fit are dropped, and the others are fitted. The retained KV never exceeds the budget and one
block. Positions do not change.

`ByEntropy`: the same by blocks, with tokens dropped by entropy.

`WithPredictor`: streaming with a predictor, as in an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.longcontext.arms import LEFT, PAGE_TOKENS, VALUES, Ridges, entropy_budgets
from benchmarks.longcontext.context import SAMPLED_ROWS, WINDOW_TOKENS
from benchmarks.longcontext.held import Held
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_decode.compression.scores import LEAD_TOKENS, AttentionReceived
from headrace_decode.compression.selection import AlwaysKept, select_tokens
from headrace_lab.compression.streaming import Streamed
from headrace_lab.models.lm import LM

ABSENT = -1.0
SHALLOW_WHOLE = AlwaysKept(whole_layers=2)


@dataclass(frozen=True)
class Streaming:
    """
    Attributes:
        blocks: that a context is cut into.
        ridges: as of `Arm`.
    """

    blocks: int
    ridges: Ridges = VALUES

    def held(self, lm: LM, tokens: Tensor, total: int) -> tuple[Held, int]:
        """Return the KV kept of the context in the end, and the maximum number of kept pairs."""
        held, at, most = *nothing(lm), 0
        squares = torch.full((lm.layers, lm.kv_heads, len(tokens)), ABSENT)
        size = -(-len(tokens) // self.blocks)
        for begin in range(0, len(tokens), size):
            end = min(len(tokens), begin + size)
            kv = lm.empty(end)
            own: list[Tensor] = []

            def watch(
                layer: int, rows: Tensor, q: Tensor, own: list[Tensor] = own, end: int = end
            ) -> None:
                step = max(1, -(-len(rows) // SAMPLED_ROWS))
                later = torch.arange(len(rows[::step])) % WINDOW_TOKENS
                own.append(lm.rope.shift(q[::step], end + later - rows[::step]))

            rows = torch.arange(begin, end)
            lm.compute(tokens, kv, rows, attend=held.attend(begin), watch=watch)
            held, at = held.joined(Held.whole(kv, begin, end)), with_all(at, begin, end)
            squares[..., begin:end] = 0.0
            most = max(most, held.pairs)
            asked = self._repeated(lm, tokens[:end], held, at, squares, begin)
            if held.pairs > total:
                scores = squares[..., :end] / end
                for layer, queries in enumerate(own):
                    for head, one in enumerate(_mean_squares(held.keys[layer], queries)):
                        scores[layer, head, at[layer][head]] += one
                kept = select_tokens(scores, total, AlwaysKept())
                both = [torch.cat(pair) for pair in zip(asked, own, strict=True)]
                stays, at = of_these(at, kept)
                held = held.kept(stays, both, *self.ridges)
                squares[..., :end].masked_fill_(~kept, ABSENT)
        return held, most

    def _repeated(
        self,
        lm: LM,
        tokens: Tensor,
        held: Held,
        at: list[list[Tensor]],
        squares: Tensor,
        begin: int,
    ) -> list[Tensor]:
        """Repeat the newest block: adds to `squares`, returns queries by layer."""
        end, lead = len(tokens), max(0, begin - LEAD_TOKENS)
        again, asked = torch.cat([tokens, tokens[lead:]]), list[Tensor]()

        def watch(layer: int, rows: Tensor, q: Tensor) -> None:
            asked.append(q[begin - lead :])
            for head, one in enumerate(_mean_squares(held.keys[layer], asked[-1])):
                squares[layer, head, at[layer][head]] += one * len(asked[-1])

        rows = torch.arange(end, len(again))
        lm.compute(again, lm.empty(len(again)), rows, watch=watch, attend=held.attend(end))
        step = max(1, -(-len(asked[0]) // SAMPLED_ROWS))
        return [one[::step] for one in asked]


@dataclass(frozen=True)
class ByEntropy:
    """Streaming by blocks, without repetition.

    Tokens are ranked by the attention of a block's last rows, heads have budgets by the entropy of
    that attention, and two layers stay whole."""

    blocks: int

    def held(self, lm: LM, tokens: Tensor, total: int) -> tuple[Held, int]:
        """Return the same as `Streaming.held`."""
        held, at, most = *nothing(lm), 0
        size = -(-len(tokens) // self.blocks)
        for begin in range(0, len(tokens), size):
            end = min(len(tokens), begin + size)
            kv, last = lm.empty(end), list[Tensor]()

            def watch(layer: int, rows: Tensor, q: Tensor, last: list[Tensor] = last) -> None:
                last.append(q[-WINDOW_TOKENS:] * lm.dim**-0.5)

            lm.compute(tokens, kv, torch.arange(begin, end), attend=held.attend(begin), watch=watch)
            held, at = held.joined(Held.whole(kv, begin, end)), with_all(at, begin, end)
            most = max(most, held.pairs)
            if held.pairs <= total:
                continue
            scores = torch.full((lm.layers, lm.kv_heads, end), ABSENT)
            entropy = torch.empty(scores.shape[:2])
            for layer, queries in enumerate(last):
                by_head = queries.unflatten(1, (lm.kv_heads, -1)).unbind(1)
                for head, (keys, asked) in enumerate(zip(held.keys[layer], by_head, strict=True)):
                    weights = (asked.flatten(0, 1) @ keys.T).softmax(-1)
                    scores[layer, head, at[layer][head]] = weights.mean(0)
                    entropy[layer, head] = torch.special.entr(weights).sum(-1).mean()
            budgets = entropy_budgets(entropy, total, end, SHALLOW_WHOLE)
            stays, at = of_these(at, select_tokens(scores, total, SHALLOW_WHOLE, budgets))
            held = held.kept(stays, last, *LEFT)
        return held, most


Positions = list[list[Tensor]]
"""Positions of the kept tokens, by layer and head: int64 [k], ascending."""


def nothing(lm: LM) -> tuple[Held, Positions]:
    """Return the retained KV and positions before the first block: none."""
    empty = [[torch.empty(0, lm.dim)] * lm.kv_heads for _ in range(lm.layers)]
    at = [[torch.empty(0, dtype=torch.int64)] * lm.kv_heads for _ in range(lm.layers)]
    return Held(empty, empty), at


def with_all(at: Positions, begin: int, end: int) -> Positions:
    """Return the positions with all positions of a block appended."""
    fresh = torch.arange(begin, end)
    return [[torch.cat([one, fresh]) for one in layer] for layer in at]


def of_these(at: Positions, kept: Tensor) -> tuple[Positions, Positions]:
    """Return the indices of the rows to keep, as `Held.kept` takes them, and their positions."""
    stays = [
        [kept[layer, head, one].nonzero()[:, 0] for head, one in enumerate(heads)]
        for layer, heads in enumerate(at)
    ]
    left = [
        [one[stay] for one, stay in zip(*pair, strict=True)] for pair in zip(at, stays, strict=True)
    ]
    return stays, left


@dataclass(frozen=True)
class WithPredictor:
    """
    Attributes:
        predictor: of the model.
        turns: shares of the context that earlier prompts had.
    """

    predictor: ImportancePredictor
    turns: tuple[float, ...] = ()

    def held(self, lm: LM, tokens: Tensor, total: int) -> tuple[Held, int] | None:
        """Return the same as `Streaming.held`; None if the context is too short for an
        engine to stream it."""
        share = total / (lm.layers * lm.kv_heads * len(tokens))
        turns = [int(part * len(tokens)) for part in self.turns]
        found = Streamed.of(lm, lm.rope, tokens, self.predictor, share, PAGE_TOKENS, turns)
        if found is None:
            return None
        held = Held([], [])
        for lists, one in ((held.keys, found.keys), (held.values, found.values)):
            lists += [
                [of_head[at] for of_head, at in zip(layer.unbind(1), kept, strict=True)]
                for layer, kept in zip(one, found.kept, strict=True)
            ]
        return held, found.most


def _mean_squares(keys: list[Tensor], queries: Tensor) -> list[Tensor]:
    """Return the mean squares of the attention of queries [rows, heads, head_dim] to each head's
    keys."""
    found = []
    for one, asked in zip(keys, queries.unflatten(1, (len(keys), -1)).unbind(1), strict=True):
        received = AttentionReceived(1, len(one), one.shape[-1] ** -0.5)
        received.add(asked, one[None])
        found.append(received.root_mean_square()[0].square())
    return found
