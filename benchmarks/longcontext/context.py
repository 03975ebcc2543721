"""A context computed exactly, once for all arms, with the queries that arms choose by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.longcontext.judge import judged_rows
from benchmarks.longcontext.texts import Case
from headrace_decode.compression.scores import AttentionReceived, to_later_positions
from headrace_lab.compression.reading import repeat
from headrace_lab.models.lm import KV, LM

BLOCK_TOKENS = 2048
LAST_TOKENS = 256
WINDOW_TOKENS = 64
SAMPLED_ROWS = 512
"""Number of rows of each layer to whose queries values are fitted."""


class Looked(AttentionReceived):
    """Received attention that also has the largest weight of each key, as in KVzip."""

    def __init__(self, heads: int, tokens: int, scale: float) -> None:
        super().__init__(heads, tokens, scale)
        self.largest = torch.zeros(heads, tokens)

    def add_weights(self, weights: Tensor) -> None:
        torch.maximum(self.largest, weights.amax(1), out=self.largest)
        super().add_weights(weights)


@dataclass(frozen=True)
class Context:
    """A context with its exact KV, and the queries and attention by which rules score.

    Attributes:
        kv: exact KV of the context.
        exact: log-probabilities after the judged rows, fp32 [judged, vocabulary].
        last: queries of the last rows, by layer, fp32 [rows, heads, head_dim].
        sampled: queries of some repeating rows, in the same form.
        earlier: queries of some of the context's rows, rotated to positions after it.
        repeated, expected, latest: attention to keys from repeating rows, from `earlier`, and from
            `last`, the latter rotated in the same way.
    """

    case: Case
    kv: KV
    exact: Tensor
    last: list[Tensor]
    sampled: list[Tensor]
    earlier: list[Tensor]
    repeated: list[Looked]
    expected: list[AttentionReceived]
    latest: list[AttentionReceived]

    @property
    def window(self) -> list[Tensor]:
        """The last of `last`, as many as presses look at."""
        return [queries[-WINDOW_TOKENS:] for queries in self.last]


def computed(lm: LM, case: Case) -> Context:
    """Prefill, the exact tail, and the repetition."""
    tokens, n = torch.tensor(case.tokens), case.first
    kv, last = lm.empty(len(tokens)), [torch.empty(0, lm.heads, lm.dim)] * lm.layers
    rng = torch.Generator().manual_seed(0)
    some = torch.randperm(n, generator=rng)[:SAMPLED_ROWS].sort().values
    later = n + torch.randint(WINDOW_TOKENS, (len(some),), generator=rng)
    parts: list[list[Tensor]] = [[] for _ in range(lm.layers)]

    def watch(layer: int, rows: Tensor, q: Tensor) -> None:
        here = (some >= rows[0]) & (some <= rows[-1])
        at = some[here] - int(rows[0])
        parts[layer].append(lm.rope.shift(q[at], later[here] - some[here]))
        last[layer] = torch.cat([last[layer], q])[-LAST_TOKENS:]

    for begin in range(0, n, BLOCK_TOKENS):
        lm.compute(tokens, kv, torch.arange(begin, min(n, begin + BLOCK_TOKENS)), watch=watch)
    earlier = [torch.cat(each) for each in parts]
    exact = lm.compute(tokens, kv, torch.arange(n, len(tokens))).log_softmax(-1)
    keys = kv.keys[:, :n].transpose(1, 2)
    shape = lm.kv_heads, n, lm.dim**-0.5
    repeated = [Looked(*shape) for _ in range(lm.layers)]
    expected, latest = ([AttentionReceived(*shape) for _ in range(lm.layers)] for _ in range(2))
    for layer, own in enumerate(keys):
        expected[layer].add(earlier[layer], own)
        latest[layer].add(to_later_positions(last[layer], lm.rope), own)
    sampled = repetition(lm, tokens[:n], kv.part(0, n), repeated, some)
    seen = repeated, expected, latest
    return Context(case, kv.part(0, n), exact[judged_rows(case)], last, sampled, earlier, *seen)


def repetition(
    lm: LM, tokens: Tensor, kv: KV, repeated: Sequence[AttentionReceived], some: Tensor
) -> list[Tensor]:
    """Compute the context a second time after itself; return the queries of `some` of the repeated
    rows, by layer."""
    parts: list[list[Tensor]] = [[] for _ in range(lm.layers)]

    def watch(layer: int, begin: int, q: Tensor) -> None:
        at = some[(some >= begin) & (some < begin + len(q))] - begin
        parts[layer].append(q[at])

    repeat(lm, tokens, kv.keys, kv.values, repeated, watch)
    return [torch.cat(each) for each in parts]
