"""A context computed exactly, once for all arms, with the queries that arms choose by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.longcontext.judge import judged_rows
from benchmarks.longcontext.texts import Case
from headrace_decode.bounded.scores import Received, repeats
from headrace_prefill.reuse.offline.lm import KV, LM

BLOCK_TOKENS = 2048
WINDOW_TOKENS = 64
SAMPLED_ROWS = 512
"""Of each layer, whose queries values are fitted to."""


@dataclass(frozen=True)
class Context:
    """
    Attributes:
        kv: of the context, exact.
        exact: log-probabilities behind the judged rows, fp32 [judged, vocabulary].
        window: queries of the last rows, by layer, fp32 [rows, heads, head_dim].
        sampled: queries of some repeating rows, likewise.
        earlier: queries of some of the context's rows, turned to positions behind it.
        repeated, expected: attention that keys get from repeating rows, and from `earlier`.
    """

    case: Case
    kv: KV
    exact: Tensor
    window: list[Tensor]
    sampled: list[Tensor]
    earlier: list[Tensor]
    repeated: list[Received]
    expected: list[Received]


def computed(lm: LM, case: Case) -> Context:
    """Prefill, the exact tail, and the repetition."""
    tokens, n = torch.tensor(case.tokens), case.first
    kv, window = lm.empty(len(tokens)), [lm.rope.speeds.new_empty(0)] * lm.layers
    rng = torch.Generator().manual_seed(0)
    some = torch.randperm(n, generator=rng)[:SAMPLED_ROWS].sort().values
    later = n + torch.randint(WINDOW_TOKENS, (len(some),), generator=rng)
    parts: list[list[Tensor]] = [[] for _ in range(lm.layers)]

    def watch(layer: int, rows: Tensor, q: Tensor) -> None:
        here = (some >= rows[0]) & (some <= rows[-1])
        at = some[here] - int(rows[0])
        parts[layer].append(lm.rope.shift(q[at], later[here] - some[here]))
        window[layer] = q[-WINDOW_TOKENS:].clone()

    for begin in range(0, n, BLOCK_TOKENS):
        lm.compute(tokens, kv, torch.arange(begin, min(n, begin + BLOCK_TOKENS)), watch=watch)
    earlier = [torch.cat(each) for each in parts]
    exact = lm.compute(tokens, kv, torch.arange(n, len(tokens))).log_softmax(-1)
    keys = kv.keys[:, :n].transpose(1, 2).contiguous()
    repeated, expected = ([Received(one, lm.dim**-0.5) for one in keys] for _ in range(2))
    for received, queries in zip(expected, earlier, strict=True):
        received.add(queries)
    sampled = repetition(lm, tokens[:n], kv.part(0, n), repeated, some)
    kv = kv.part(0, n)
    return Context(case, kv, exact[judged_rows(case)], window, sampled, earlier, repeated, expected)


def repetition(
    lm: LM, tokens: Tensor, kv: KV, repeated: list[Received], some: Tensor
) -> list[Tensor]:
    """Repeat the context behind itself; queries of `some` of the repeating rows, by layer."""
    n = len(tokens)
    parts: list[list[Tensor]] = [[] for _ in range(lm.layers)]
    for lead, begin, end in repeats(n, BLOCK_TOKENS):
        again = torch.cat([tokens, tokens[lead:end]])
        longer = lm.empty(len(again))
        longer.keys[:, :n], longer.values[:, :n] = kv.keys, kv.values
        at = some[(some >= begin) & (some < end)] - begin

        def watch(
            layer: int, rows: Tensor, q: Tensor, skip: int = begin - lead, at: Tensor = at
        ) -> None:
            repeated[layer].add(q[skip:])
            parts[layer].append(q[skip:][at])

        lm.compute(again, longer, torch.arange(n, len(again)), watch=watch)
    return [torch.cat(each) for each in parts]
