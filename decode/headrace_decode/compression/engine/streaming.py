"""Keeps a context's KV within a budget while its prompt is computed, with a gate.

The engine computes the prompt as usual. Whenever the prompt has grown by a segment, the KV to keep
is chosen from the KV kept before and all of the segment. The request therefore never holds more
than the budget, a segment, and the tokens of a step. Rows of later segments attend to the kept KV.

A token's score has two parts (`headrace_decode.compression.scores`). The gate predicts the score
from repeating rows, once, when the token's segment is complete. The score from the context's own
rows is computed at each choice, from the newest rows, turned to positions after the context so far.
The kept KV is fitted to the queries of the same rows (`headrace_decode.compression.refit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace_decode.compression.engine.cells import Cells
from headrace_decode.compression.engine.course import EARLIER_TOKENS
from headrace_decode.compression.engine.dropped import Dropped
from headrace_decode.compression.gate import Gate, at_start
from headrace_decode.compression.keeping import keep_units
from headrace_decode.compression.refit import Kept, fitted
from headrace_decode.compression.scores import NOWHERE, as_later, with_gate
from headrace_decode.sparse.engine.keys import Ids
from headrace_engine.rope import Rope


class Held(NamedTuple):
    """KV that is kept of the segments so far.

    Attributes:
        dropped: its cells.
        told: the gate's scores of its tokens, fp32 [layers, kv_heads, places] in the order of a
            head's cells, `NOWHERE` after them.
    """

    dropped: Dropped
    told: Tensor


class Streaming:
    """One streamed request in the worker.

    Args:
        cells: cells of the cache. scale: scale of the logits.
        rope, gate: rotary embedding and gate of the model.
        held: kept KV that the request begins with.

    Attributes:
        held: kept KV; None before the first choice.
    """

    def __init__(
        self, cells: Cells, scale: float, rope: Rope, gate: Gate, held: Held | None = None
    ) -> None:
        self._cells, self._scale, self._rope, self._gate = cells, scale, rope, gate
        self.held = held
        self._came: list[Tensor] = [torch.empty(0)] * len(cells.layers)

    @property
    def tokens(self) -> int:
        """Number of the context's first tokens that the kept KV was chosen from."""
        return 0 if self.held is None else self.held.dropped.tokens

    def rows(self, first_token: int, count: int) -> StreamedRow | None:
        """Return a step's newest rows of the prompt, whose queries count; None if there are none.

        Args:
            first_token: index of the request's first row among the step's tokens.
            count: number of the request's rows in the step that are of the prompt.
        """
        if count <= 0:
            return None
        few = min(count, EARLIER_TOKENS)
        return StreamedRow(self, slice(first_token + count - few, first_token + count))

    def came(self, layer: int, queries: Tensor) -> None:
        """Add queries of the rows that follow those before: [rows, heads, head_dim], rotated. The
        newest `EARLIER_TOKENS` are kept."""
        before = self._came[layer]
        both = torch.cat([before, queries]) if len(before) else queries
        self._came[layer] = both[-EARLIER_TOKENS:].clone()

    def drop(self, tokens: int, units: Ids, room: Ids) -> Held:
        """Choose the KV to keep from now on, and return it.

        Args:
            tokens: number of tokens of the context so far, whole blocks.
            units: int64 [n], units that are new since the last choice.
            room: cells to keep it in; the cells that held it before may be among them.
        """
        layers = range(len(self._came))
        before = torch.empty(len(layers), self._cells.kv_heads, 0)
        if self.held is not None:
            before = self.held.told
        old = before.shape[-1]
        all_told, all_scores, asked = list[Tensor](), list[Tensor](), list[Tensor]()
        for layer in layers:
            keys, values = self._both(layer, units)
            turned = at_start(self._rope, keys[:, old:].transpose(0, 1).float(), self.tokens)
            fresh = self._gate.scores(layer, turned, values[:, old:])
            told = torch.cat([before[layer], fresh], 1)
            asked.append(as_later(self._came[layer].float(), self._rope))
            all_scores.append(with_gate(told, asked[-1], keys.float(), self._scale))
            all_told.append(told)
        kept = keep_units(torch.stack(all_scores), len(room), self._cells.unit_tokens)

        def fit(layer: int) -> list[Kept]:
            both, there = self._both(layer, units), all_told[layer] >= 0
            return fitted(*both, kept[layer], asked[layer], self._scale, there)

        dropped = Dropped.of(tokens, kept, map(fit, layers), room, self._cells)
        counts = torch.from_numpy(dropped.counts)[..., None] * self._cells.unit_tokens
        filled = torch.arange(int(counts.max())) < counts
        told = torch.full(filled.shape, NOWHERE)
        told[filled] = torch.stack(all_told)[kept]
        self.held = Held(dropped, told)
        return self.held

    def _both(self, layer: int, units: Ids) -> tuple[Tensor, Tensor]:
        """Return K and V, each [kv_heads, places, head_dim]. The first places are the kept KV, as
        many as the head with most units has. The new units follow."""
        fresh = self._cells.read(layer, units)
        if self.held is None:
            return fresh
        old = self._cells.read_cells(self.held.dropped.cells[layer].astype(np.int64))
        keys, values = (torch.cat(pair, 1) for pair in zip(old, fresh, strict=True))
        return keys, values


@dataclass(frozen=True)
class StreamedRow:
    """Rows of a step whose queries count for a streamed request.

    Attributes:
        stream: the request.
        tokens: slice of the step's tokens.
    """

    stream: Streaming
    tokens: slice

    def see(self, layer: int, queries: Tensor) -> None:
        """Count the rows' queries in one layer, like `ReadRow.see`."""
        self.stream.came(layer, queries[self.tokens])
