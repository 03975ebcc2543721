"""Streaming of contexts in plain torch, as `compression.engine.incremental` does it in an engine.

Dropped tokens stay in the arrays and are masked, so nothing here saves memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace_decode.compression.engine.compression_job import EARLIER_TOKENS, IncrementalJob
from headrace_decode.compression.importance_predictor import ImportancePredictor, to_position_zero
from headrace_decode.compression.refit import fit_layer
from headrace_decode.compression.scores import ABSENT, predicted_scores, to_later_positions
from headrace_decode.compression.selection import select_token_pages
from headrace_engine.rope import Rope
from headrace_lab.models.lm import LM

BLOCK_TOKENS, STEP_TOKENS = 128, 512
"""Tokens of an engine's block, and tokens of a prompt that one step computes."""


class Newest(dict[int, Tensor]):
    """Queries of the newest rows, by layer, recorded from `LM.compute`."""

    def record(self, layer: int, rows: Tensor, q: Tensor) -> None:
        before = [self[layer]] if layer in self else []
        self[layer] = torch.cat([*before, q])[-EARLIER_TOKENS:]


class Masked:
    """Attention of a model's rows to the tokens that heads keep.

    Args:
        kept: bool [layers, kv_heads, positions]; may change between calls.
    """

    def __init__(self, kept: Tensor) -> None:
        self._kept = kept

    def attend(self, layer: int, q: Tensor, rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute attention; the signature is that of `LM.compute`'s `attend`."""
        end = int(rows[-1]) + 1
        causal = torch.arange(end) <= rows[:, None]
        seen = (self._kept[layer, :, None, :end] & causal)[:, None]
        asked = q.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
        k, v = (
            one[:end].transpose(0, 1)[:, None].expand(-1, asked.shape[1], -1, -1)
            for one in (keys, values)
        )
        mixed = scaled_dot_product_attention(asked, k, v, attn_mask=seen)
        return mixed.permute(2, 0, 1, 3).flatten(1)


@dataclass(frozen=True)
class Streamed:
    """A context that was streamed.

    Attributes:
        keys, values: fp32 [layers, n, kv_heads, head_dim], after the refit.
        kept: bool [layers, kv_heads, n], the tokens kept in the end.
        most: maximum number of (layer, head, token) triples kept at a time.
    """

    keys: Tensor
    values: Tensor
    kept: Tensor
    most: int

    @classmethod
    def of(
        cls,
        model: LM,
        rope: Rope,
        tokens: Tensor,
        predictor: ImportancePredictor,
        keep_ratio: float,
        page_tokens: int,
        turns: Sequence[int] = (),
    ) -> Streamed | None:
        """Compress a context incrementally.

        Return None if, besides the tokens after the last whole block, the ratio leaves fewer pages
        than there are heads.

        Args:
            tokens: int64 [n].
            keep_ratio: part of all (layer, head, token) triples that is kept in the end.
            page_tokens: tokens of a page that heads keep.
            turns: lengths in tokens of earlier prompts, which are prefixes of `tokens`, ascending.
                Each continues from the tokens kept of the one before. Prompts that are too short
                in the same sense are skipped.
        """
        n, heads = len(tokens), model.layers * model.kv_heads

        def pages(end: int) -> int:
            return int(heads * (keep_ratio * end - end % BLOCK_TOKENS)) // page_tokens

        if pages(n) < heads:
            return None
        kv, most, chosen = model.empty(n), 0, 0
        kept = torch.zeros(model.layers, model.kv_heads, n, dtype=torch.bool)
        predicted = torch.zeros(kept.shape)
        for last in [*(end for end in turns if pages(end) >= heads), n]:
            job, newest = IncrementalJob(last, keep_ratio, BLOCK_TOKENS), Newest()
            job.begin_at(chosen // BLOCK_TOKENS, 0)
            for begin in range(chosen, last, STEP_TOKENS):
                rows = torch.arange(begin, min(last, begin + STEP_TOKENS))
                kept[..., rows] = True
                most = max(most, int(kept.sum()))
                model.compute(tokens, kv, rows, attend=Masked(kept).attend, watch=newest.record)
                due = job.due(int(rows[-1]) + 1, 0)
                if due is None:
                    continue
                job.dropped = due
                new, whole = slice(chosen, due * BLOCK_TOKENS), slice(due * BLOCK_TOKENS)
                found, asked = list[Tensor](), list[Tensor]()
                for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
                    turned = to_position_zero(rope, keys[new], chosen)
                    predicted[layer, :, new] = predictor.scores(
                        layer, turned, values[new].transpose(0, 1)
                    )
                    here, there = predicted[layer, :, whole], keys[whole].transpose(0, 1)
                    asked.append(to_later_positions(newest[layer], rope))
                    found.append(predicted_scores(here, asked[-1], there, model.dim**-0.5))
                stays = select_token_pages(torch.stack(found), pages(last), page_tokens)
                for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
                    k, v = (one[whole].transpose(0, 1) for one in (keys, values))
                    there, scale = kept[layer, :, whole], model.dim**-0.5
                    of_heads = fit_layer(k, v, stays[layer], asked[layer], scale, there)
                    for head, (moved, changed) in enumerate(of_heads):
                        at = stays[layer, head].nonzero()[:, 0]
                        keys[at, head], values[at, head] = moved, changed
                kept[..., whole] = stays
                predicted[..., whole].masked_fill_(~stays, ABSENT)
                chosen = due * BLOCK_TOKENS
        return cls(kv.keys, kv.values, kept, most)
