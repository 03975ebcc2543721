"""What the keys of a context are worth, from the queries of rows that read it again.

A context is read again by requests of the scheduler's own: their prompt is the context, whose KV is
there, and behind it a part of the context once more. Two kinds of their rows count
(`headrace_decode.bounded.scores`):

    repeating   the part once more, less the tokens that lead to it
    earlier     the context's last rows, which the first of these requests computes anew, turned to
                positions behind it

With a gate (`headrace_decode.bounded.gate`) none repeats: the gate tells what repeating rows would
say, and one request computes the context's last rows.

What stays is fitted to what the last of the context's own rows ask for
(`headrace_decode.bounded.refit`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace_decode.bounded.engine.cells import Cells
from headrace_decode.bounded.gate import Gate, at_start
from headrace_decode.bounded.keeping import keep_units
from headrace_decode.bounded.refit import FITTED_ROWS, Kept, fitted
from headrace_decode.bounded.scores import Received, pooled, turned_by
from headrace_decode.sparse.engine.keys import Ids
from headrace_engine.rope import Rope


class Again(NamedTuple):
    """Which rows of a request that reads again count.

    Attributes:
        request_id: of the request whose context is read.
        tokens: of the context, whole blocks.
        earlier: first position of the context's own rows, which end with it.
        repeating: first position of rows that repeat.
    """

    request_id: str
    tokens: int
    earlier: int
    repeating: int

    @property
    def begins(self) -> bool:
        """Whether no other has read the context before."""
        return self.earlier < self.tokens


class Reading:
    """One context. Queries come with the steps of the engine; keys are scored by them later, a
    layer at a time.

    Args:
        again: of any request that reads it.
        units: int64 [n], of the context.
        cells: of the cache. scale: of the logits. rope: of the model.
        gate: that stands for rows that repeat; None: they come.
    """

    def __init__(
        self,
        again: Again,
        units: Ids,
        cells: Cells,
        scale: float,
        rope: Rope,
        gate: Gate | None = None,
    ) -> None:
        def of_layers() -> list[Received]:
            return [Received(cells.kv_heads, again.tokens, scale) for _ in cells.layers]

        self._units, self._cells, self._rope, self._gate = units, cells, rope, gate
        self._scale = scale
        self._repeating, self._earlier = of_layers(), of_layers()
        self._told: dict[int, Tensor] = {}
        self._came: list[list[tuple[Tensor, Tensor | None]]] = [[] for _ in cells.layers]
        self._asked: list[list[Tensor]] = [[] for _ in cells.layers]
        """Queries of every `_step`th of the earlier rows, turned."""
        self._turned = [0] * len(cells.layers)
        self._step = max(1, (again.tokens - again.earlier) // FITTED_ROWS)
        self._next = 0
        self._stays: Tensor | None = None
        self._kept: list[list[Kept]] = []

    def came(self, layer: int, queries: Tensor, turn: Tensor | None) -> None:
        """Keep queries until the layer is scored.

        Args:
            queries: [rows, heads, head_dim], rotated.
            turn: int64 [rows], positions that earlier rows are turned by; None for repeating ones.
        """
        self._came[layer].append((queries.clone(), turn))

    def score(self, layers: int) -> None:
        """Score so many layers, one after the other, with what came for them."""
        for _ in range(layers):
            layer, self._next = self._next, (self._next + 1) % len(self._came)
            came, self._came[layer] = self._came[layer], []
            if not came:
                continue
            keys = self._cells.layers[layer].read(self._units)
            keys = keys.transpose(0, 1).flatten(1, 2).float()
            if self._gate is not None and layer not in self._told:
                values = self._cells.layers[layer].read_values(self._units)
                values = values.transpose(0, 1).flatten(1, 2)
                begun = at_start(self._rope, keys.transpose(0, 1))
                self._told[layer] = self._gate.scores(layer, begun, values)
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
        """fp32 [layers, kv_heads, tokens], of all that came.

        Raises:
            ValueError: rows of a kind are missing.
        """
        self.score(len(self._came))
        if self._gate is None:
            both = zip(self._repeating, self._earlier, strict=True)
            return torch.stack([pooled(parts) for parts in both])
        earlier = torch.stack([one.root_mean_square() for one in self._earlier])
        told = torch.stack([self._told[layer] for layer in range(len(self._earlier))])
        return torch.hypot(told, earlier)

    def fit(self, units: int, layers: int) -> None:
        """Choose what stays, if that is not done, and fit so many more layers.

        Args:
            units: that stay, the same each time.
        """
        if self._stays is None:
            self._stays = keep_units(self.scores(), units, self._cells.unit_tokens)
        for layer in range(len(self._stays))[len(self._kept) :][:layers]:
            both, asked = self._cells.read(layer, self._units), torch.cat(self._asked[layer])
            self._kept.append(fitted(*both, self._stays[layer], asked, self._scale))

    def kept(self, units: int) -> tuple[Tensor, list[list[Kept]]]:
        """What stays, bool [layers, kv_heads, tokens], and K and V of it by layer; as `fit`."""
        self.fit(units, len(self._came))
        assert self._stays is not None
        return self._stays, self._kept


@dataclass(frozen=True)
class ReadRow:
    """Rows of a step that count.

    Attributes:
        reading: theirs.
        earlier, repeating: of the step's tokens; may be empty.
        turn: as of `Reading.came`, of `earlier`.
    """

    reading: Reading
    earlier: slice
    repeating: slice
    turn: Tensor

    def see(self, layer: int, queries: Tensor) -> None:
        """
        Args:
            queries: [tokens, heads, head_dim], of all rows of the step, rotated.
        """
        if len(self.turn):
            self.reading.came(layer, queries[self.earlier], self.turn)
        if self.repeating.stop > self.repeating.start:
            self.reading.came(layer, queries[self.repeating], None)


def counting(
    again: Again, reading: Reading, first_token: int, first: int, rows: int, seen: int = 0
) -> ReadRow | None:
    """Which of a row's tokens count; None if none does.

    Args:
        first_token: of the row, in the step's.
        first: its position. rows: tokens.
        seen: positions below have counted: the row was preempted, and is computed once more.
    """

    def within(begin: int, end: int) -> slice:
        begin, end = max(begin, first, seen), min(end, first + rows)
        return slice(first_token + begin - first, first_token + max(begin, end) - first)

    earlier = within(again.earlier, again.tokens)
    repeating = within(again.repeating, first + rows)
    if earlier.start == earlier.stop and repeating.start == repeating.stop:
        return None
    at = first + torch.arange(earlier.start, earlier.stop) - first_token
    return ReadRow(reading, earlier, repeating, turned_by(at, again.earlier, again.tokens))
