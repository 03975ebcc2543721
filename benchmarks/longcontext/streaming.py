"""A context that never is in memory as a whole: prefilled block by block under the budget.

`Streaming`: each block is computed over what is held of those before it. It is repeated once, so
that its tokens and the older ones are ranked by the same attention. What does not fit leaves, and
the values that stay are fitted. Never is more held than the budget and one block. Positions stay as
they are.

`Gated`: as an engine streams with a gate, by its own code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.longcontext.context import SAMPLED_ROWS, WINDOW_TOKENS
from benchmarks.longcontext.held import Held
from headrace_decode.bounded.engine.cells import Cells
from headrace_decode.bounded.engine.course import Stream
from headrace_decode.bounded.engine.streaming import StreamedRow
from headrace_decode.bounded.engine.streaming import Streaming as Chosen
from headrace_decode.bounded.gate import Gate
from headrace_decode.bounded.keeping import Always, keep
from headrace_decode.bounded.refit import RIDGE
from headrace_decode.bounded.scores import LEAD_TOKENS, Received
from headrace_decode.sparse.engine.keys import LayerKeys
from headrace_prefill.reuse.offline.lm import LM

ABSENT = -1.0
BLOCK_TOKENS, UNIT_TOKENS, STEP_TOKENS = 128, 32, 512
"""Of an engine's cache, of what its heads keep, and of its steps."""


@dataclass(frozen=True)
class Streaming:
    """
    Attributes:
        blocks: that a context is cut into.
        refit: the ridge that values are fitted with; None leaves them.
    """

    blocks: int
    refit: float | None = RIDGE

    def held(self, lm: LM, tokens: Tensor, total: int) -> tuple[Held, int]:
        """What is held of the context in the end, and the most pairs that were ever held."""
        shape = lm.layers, lm.kv_heads
        empty = [[torch.empty(0, lm.dim)] * shape[1] for _ in range(shape[0])]
        held, most = Held(empty, empty), 0
        at = [[torch.empty(0, dtype=torch.int64)] * shape[1] for _ in range(shape[0])]
        squares = torch.full((*shape, len(tokens)), ABSENT)
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
            held = held.joined(Held.whole(kv, begin, end))
            fresh = torch.arange(begin, end)
            at = [[torch.cat([one, fresh]) for one in layer] for layer in at]
            squares[..., begin:end] = 0.0
            most = max(most, held.pairs)
            asked = self._repeated(lm, tokens[:end], held, at, squares, begin)
            if held.pairs > total:
                scores = squares[..., :end] / end
                for layer, queries in enumerate(own):
                    for head, one in enumerate(_mean_squares(held.keys[layer], queries)):
                        scores[layer, head, at[layer][head]] += one
                kept = keep(scores, total, Always())
                both = [torch.cat(pair) for pair in zip(asked, own, strict=True)]
                stays = [
                    [kept[layer, head, one].nonzero()[:, 0] for head, one in enumerate(heads)]
                    for layer, heads in enumerate(at)
                ]
                held = held.kept(stays, both, self.refit)
                at = [
                    [one[stay] for one, stay in zip(*pair, strict=True)]
                    for pair in zip(at, stays, strict=True)
                ]
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
class Gated:
    """
    Attributes:
        gate: of the model.
    """

    gate: Gate

    def held(self, lm: LM, tokens: Tensor, total: int) -> tuple[Held, int]:
        """As `Streaming.held`."""
        n, pairs = len(tokens), lm.layers * lm.kv_heads
        course = Stream(n, total / (pairs * n), BLOCK_TOKENS)
        per = BLOCK_TOKENS // UNIT_TOKENS
        blocks = course.blocks + course.kept
        shape = lm.layers, blocks * per, lm.kv_heads, UNIT_TOKENS, 2 * lm.dim
        cells = Cells([LayerKeys(layer) for layer in torch.zeros(shape)], per)
        # What is behind the context's last block counts as held.
        room = cells.of_blocks(range(course.blocks, blocks))
        room = room[: (total - pairs * (n % BLOCK_TOKENS)) // UNIT_TOKENS]
        chosen = Chosen(cells, lm.dim**-0.5, lm.rope, self.gate)
        kv, most, from_ = lm.empty(n), 0, 0
        held = Held.whole(kv, 0, 0)
        for begin in range(0, n, STEP_TOKENS):
            end = min(n, begin + STEP_TOKENS)
            counted = chosen.rows(0, begin, end - begin)
            assert counted is not None

            def watch(layer: int, rows: Tensor, q: Tensor, counted: StreamedRow = counted) -> None:
                counted.see(layer, q)

            here = held.joined(Held.whole(kv, from_, begin))
            lm.compute(tokens, kv, torch.arange(begin, end), attend=here.attend(begin), watch=watch)
            most = max(most, here.pairs + pairs * (end - begin))
            if (due := course.due(end, 0)) is None:
                continue
            new = np.arange(from_ // UNIT_TOKENS, due * per)
            for layer in range(lm.layers):
                both = (one[layer][from_ : due * BLOCK_TOKENS] for one in (kv.keys, kv.values))
                split = (one.unflatten(0, (-1, UNIT_TOKENS)).transpose(1, 2) for one in both)
                cells.layers[layer].write(new, *split)
            chosen.drop(due * BLOCK_TOKENS, new, room)
            held, from_ = _of_cells(cells, chosen), due * BLOCK_TOKENS
        return held.joined(Held.whole(kv, from_, n)), most


def _of_cells(cells: Cells, chosen: Chosen) -> Held:
    found = Held([], [])
    assert chosen.held is not None
    for table, counts in zip(chosen.held.cells, chosen.held.counts, strict=True):
        both = cells.read_cells(table.astype(np.int64))
        for of_layer, lists in zip(both, (found.keys, found.values), strict=True):
            sizes = (int(count) * UNIT_TOKENS for count in counts)
            lists.append([head[:size] for head, size in zip(of_layer, sizes, strict=True)])
    return found


def _mean_squares(keys: list[Tensor], queries: Tensor) -> list[Tensor]:
    """Of the attention that each head's keys get from queries [rows, heads, head_dim]."""
    found = []
    for one, asked in zip(keys, queries.unflatten(1, (len(keys), -1)).unbind(1), strict=True):
        received = Received(1, len(one), one.shape[-1] ** -0.5)
        received.add(asked, one[None])
        found.append(received.root_mean_square()[0].square())
    return found
