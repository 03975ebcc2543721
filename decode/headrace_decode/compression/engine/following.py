"""Follows the bounded requests of an engine in its worker.

The scheduler says which requests read a context again, and when a request drops KV (`Told`). The
worker copies the kept KV at the beginning of that step, before anything is overwritten.

The scheduler gives the context's other blocks to other requests in the same step. If the copy
fails, the request's KV is therefore lost. Only this request ends, with an error
(`sparse.engine.lost`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.compression.engine.cells import Cells
from headrace_decode.compression.engine.description import describe, described
from headrace_decode.compression.engine.dropped import Dropped, DroppedRow
from headrace_decode.compression.engine.reading import Again, Reading, ReadRow, counting
from headrace_decode.compression.engine.streaming import Held, StreamedRow, Streaming
from headrace_decode.compression.gate import Gate
from headrace_decode.sparse.engine.keys import Ids
from headrace_decode.sparse.engine.rows import BatchRow
from headrace_engine.rope import Rope

logger = logging.getLogger("headrace.bounded")

TOLD = "headrace_bounded"
"""Attribute of a step's `SchedulerOutput` that holds `Told`."""


class Drop(NamedTuple):
    """KV that a request keeps of its context from now on.

    Attributes:
        tokens: number of tokens of the context; of a streamed context, so far.
        blocks: blocks of the scheduler to keep it in.
        remembered: number of the kept KV in `Remembered`; None if it is not remembered.
        described: number of the first blocks, which describe the others (`description`).
    """

    tokens: int
    blocks: list[int]
    remembered: int | None = None
    described: int = 0


class Fit(NamedTuple):
    """Work of a step ahead of a `Drop`.

    Attributes:
        blocks: number of blocks that the context will be kept in.
        layers: number of layers to fit in this step.
    """

    blocks: int
    layers: int


@dataclass
class Told:
    """Message of the scheduler to the worker, with a step.

    Attributes:
        again: new requests that read a context again, by id.
        streams: new requests whose context is streamed.
        layers: number of layers of the context being read, to score with the queries so far.
        fits: layers to fit, by request whose context was read and scored.
        drops: KV to keep, by request.
        recalls: number of the remembered KV to begin with, by streamed request that begins.
        came: loaded KV (from the store) to begin with, by streamed request that begins.
        forgotten: numbers of kept KV that is not remembered any more.
    """

    again: dict[str, Again] = field(default_factory=dict)
    streams: set[str] = field(default_factory=set)
    layers: int = 0
    fits: dict[str, Fit] = field(default_factory=dict)
    drops: dict[str, Drop] = field(default_factory=dict)
    recalls: dict[str, int] = field(default_factory=dict)
    came: dict[str, Drop] = field(default_factory=dict)
    forgotten: set[int] = field(default_factory=set)


class Following:
    """Bounded requests of an engine.

    Args:
        cells: cells of the cache. scale: scale of the logits. rope: the model's rotary embedding.
        blocks: returns a request's blocks of the scheduler.
        gate: as for `Reading`. Requests can stream only with a gate.

    Attributes:
        read: number of repeating rows that counted so far.
        dropped: number of contexts whose KV was dropped so far.
    """

    def __init__(
        self,
        cells: Cells,
        scale: float,
        rope: Rope,
        blocks: Callable[[str], Sequence[int]],
        gate: Gate | None = None,
    ) -> None:
        self.cells, self._scale, self._rope, self._blocks = cells, scale, rope, blocks
        self._gate = gate
        self._again: dict[str, Again] = {}
        self._seen: dict[str, int] = {}
        """By request that reads again: the first position that has not counted."""
        self._readings: dict[str, Reading] = {}
        self._streams: dict[str, Streaming] = {}
        self._remembered: dict[int, Held] = {}
        self._dropped: dict[str, Dropped] = {}
        self.read = self.dropped = 0

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request has dropped KV of its context."""
        return request_id in self._dropped

    def __bool__(self) -> bool:
        return bool(self._again or self._streams or self._dropped)

    @torch.inference_mode()
    def step_begins(
        self, ended: Collection[str], preempted: Collection[str], told: Told
    ) -> set[str]:
        """Begin a step of the scheduler; return the requests whose KV is lost.

        Args:
            ended, preempted: requests whose blocks the step takes away.
        """
        lost: set[str] = set()
        for name in list(self._readings):  # one, apart from those that are about to end
            with self._giving_up(name):
                self._readings[name].score(told.layers)
        gone = {*ended, *preempted}
        for name in told.fits.keys() & self._readings.keys() - gone:
            fit = told.fits[name]
            with self._giving_up(name):
                self._readings[name].fit(fit.blocks * self.cells.in_block, fit.layers)
        for name in told.drops.keys() - gone:
            with self._giving_up(name, lost):
                self._drop(name, told.drops[name])
        for name in gone:
            self._readings.pop(name, None)
            self._dropped.pop(name, None)
        for name in ended:
            self._again.pop(name, None)
            self._seen.pop(name, None)
            self._streams.pop(name, None)
        for again in told.again.values():
            if again.begins:
                self._readings.pop(again.request_id, None)
        self._again.update(told.again)
        begun = told.recalls.keys() | told.came.keys()
        for name in (told.streams | begun | (self._streams.keys() & gone)) - {*ended}:
            with self._giving_up(name, lost):
                self._begin(name, told)
        for number in told.forgotten:
            self._remembered.pop(number, None)
        return lost

    @contextmanager
    def _giving_up(self, name: str, lost: set[str] | None = None) -> Iterator[None]:
        """Stop following a request if an error occurs. Its KV is lost then, if `lost` is given."""
        try:
            yield
        except Exception:
            logger.exception("%s: %s", name, "it keeps all KV" if lost is None else "KV is lost")
            for each in (self._readings, self._streams, self._dropped):
                each.pop(name, None)  # type: ignore[attr-defined]
            if lost is not None:
                lost.add(name)

    def _begin(self, name: str, told: Told) -> None:
        """Follow a request that streams."""
        if self._gate is None:
            raise ValueError("there is no gate")
        held = self._remembered[told.recalls[name]] if name in told.recalls else None
        if name in told.came:
            held = self._opened(told.came[name])
        self._streams[name] = Streaming(self.cells, self._scale, self._rope, self._gate, held)
        if held is not None:
            self._dropped[name] = held.dropped

    def _opened(self, came: Drop) -> Held:
        description = self.cells.read_bytes(came.blocks[: came.described])
        return described(description, came.tokens, came.blocks[came.described :], self.cells)

    def _drop(self, name: str, drop: Drop) -> None:
        room = self.cells.of_blocks(drop.blocks[drop.described :])
        if (stream := self._streams.get(name)) is not None:
            per = self.cells.unit_tokens
            new = self._units(self._blocks(name))[stream.tokens // per : drop.tokens // per]
            kept = stream.drop(drop.tokens, new, room)
            if drop.described:
                self.cells.write_bytes(drop.blocks[: drop.described], describe(kept))
            if drop.remembered is not None:
                self._remembered[drop.remembered] = kept
            held = kept.dropped
        else:
            stays, kept_of = self._readings.pop(name).kept(len(room))
            held = Dropped.of(drop.tokens, stays, kept_of, room, self.cells)
        self.dropped += name not in self._dropped
        self._dropped[name] = held
        logger.info("%s: KV of %d tokens is kept in %d blocks", name, drop.tokens, len(drop.blocks))

    def _units(self, blocks: Sequence[int]) -> Ids:
        """Return the units of blocks of the scheduler."""
        per = self.cells.block_units
        return (np.asarray(blocks, np.int64)[:, None] * per + np.arange(per)).reshape(-1)

    def of_step(
        self,
        rows: Sequence[BatchRow],
        starts: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        tables: NDArray[np.integer],
    ) -> tuple[list[DroppedRow], list[ReadRow | StreamedRow]]:
        """Return a step's rows whose contexts have dropped KV, and the rows whose queries count.

        Args:
            rows: the batch.
            starts: int [rows + 1], first token of each row.
            kv_tokens: int [rows], tokens of each row's KV after the step.
            tables: int [rows, most units], blocks of the kernel.
        """
        dropped: list[DroppedRow] = []
        read: list[ReadRow | StreamedRow] = []
        for number, row in enumerate(rows):
            first, end, length = (int(x) for x in (*starts[number : number + 2], kv_tokens[number]))
            if (again := self._again.get(row.request_id)) is not None:
                reading = self._reading(again)
                seen = self._seen.get(row.request_id, 0)
                one = counting(again, reading, first, length - (end - first), end - first, seen)
                self._seen[row.request_id] = max(seen, length)
                if one is not None:
                    read.append(one)
                    self.read += one.repeating.stop - one.repeating.start
                continue
            if (stream := self._streams.get(row.request_id)) is not None:
                at = length - (end - first)
                mine = stream.rows(first, min(length, row.prompt_tokens) - at)
                read += [] if mine is None else [mine]
            if (held := self._dropped.get(row.request_id)) is not None:
                own = slice(
                    held.tokens // self.cells.unit_tokens, -(-length // self.cells.unit_tokens)
                )
                units = tables[number, own].astype(np.int64)
                dropped.append(DroppedRow(number, slice(first, end), length, held, units))
        return dropped, read

    def see(self, read: Sequence[ReadRow | StreamedRow], layer: int, queries: Tensor) -> None:
        """Count the queries of a step's rows in one layer; queries as for `ReadRow.see`."""
        for row in read:
            row.see(layer, queries)

    def _reading(self, again: Again) -> Reading:
        if again.request_id not in self._readings:
            units = self._units(self._blocks(again.request_id))
            units = units[: again.tokens // self.cells.unit_tokens]
            made = Reading(again, units, self.cells, self._scale, self._rope, self._gate)
            self._readings[again.request_id] = made
        return self._readings[again.request_id]
