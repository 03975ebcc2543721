"""Selective recompute: it fills requests' KV from stored runs and computes the chosen rows.

A request goes through four stages. Each is done in bounded parts, so that an engine step does no
more than its budget of rows, whatever clients send:

    place    stored runs are copied to the request's slots, block by block
    lead     if there is a probe: rows before the first run whose KV is not exact. These rows are
             exact, and models attend to the first of them more than to any other
    probe    optional: the prompt's last rows and a draft of the answer, row by row, to estimate
             which positions they attend to
    compute  chosen rows, in ascending order of position; positions that no run covers are computed
             in all layers. The drift that the rows of a run show is added to its other tokens

Rows of several requests are computed as one batch, oldest request first. A request can be cancelled
between any two steps; the pass writes only to the request's own slots. The pass does not compute
the prompt's last token: the engine computes that one and samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace_engine.rope import Rope
from headrace_prefill.blending.engine.correction import RequestCorrection
from headrace_prefill.blending.engine.kv_scatter import KvScatter, LostKV, Piece, StoredRun
from headrace_prefill.blending.engine.paged import BlockTable
from headrace_prefill.blending.engine.probe import Probe
from headrace_prefill.blending.engine.rows import RowEngine, Rows

logger = logging.getLogger("headrace.blending")

PLACED_PER_ROW = 50
"""Number of placed tokens that cost as much as one computed row. Measured on one core with
SmolLM2-135M in bfloat16: 0.034 ms to place a token, 1.9 ms to compute a row."""

DRAFTED_AS_ROWS = 16
"""Cost of a row that is computed alone, in rows of a batch: it reads all weights for itself."""

ChooseDepths = Callable[[NDArray[np.float32] | None], NDArray[np.int64]]
"""Attention mass [layers, n] of the probe, or None without one -> depths int64 [n], the number of
leading layers that compute each position."""


@dataclass(frozen=True)
class RecomputeRequest:
    """A request to selective recompute.

    Attributes:
        request_id: the engine's.
        token_ids: int64 [n], of positions 0 to n - 1: the prompt without its last token.
        table: the request's blocks.
        start: positions below it have their KV already.
        runs: runs to place, at ascending positions from `start` on, without overlap.
        choose: chooses the rows to compute.
        last: first position of the prompt's last tokens, which the probe computes; None without a
            probe.
        final: the prompt's last token, after `token_ids`, for the probe's draft; None without one.
    """

    request_id: str
    token_ids: NDArray[np.int64]
    table: BlockTable
    start: int
    runs: Sequence[StoredRun]
    choose: ChooseDepths
    last: int | None = None
    final: int | None = None

    def __post_init__(self) -> None:
        at = self.start
        for run in self.runs:
            if run.new < at or run.new + run.length > len(self.token_ids):
                raise ValueError(
                    f"{self.request_id}: a run at {run.new} to {run.new + run.length}, where "
                    f"{at} to {len(self.token_ids)} are to be filled"
                )
            at = run.new + run.length
        if self.last is not None and self.last < at:
            raise ValueError(f"{self.request_id}: the last rows begin within a run")
        if len(self.token_ids) > self.table.capacity:
            raise ValueError(f"{self.request_id}: more tokens than its blocks hold")

    def covered(self) -> NDArray[np.bool_]:
        """Return the positions that have KV before any row is computed, bool [n]."""
        covered = np.zeros(len(self.token_ids), np.bool_)
        covered[: self.start] = True
        for run in self.runs:
            covered[run.new : run.new + run.length] = True
        return covered

    def lead(self) -> NDArray[np.int64]:
        """Return the positions without KV before the first run whose KV is not exact, ascending.
        Rows there depend on exact KV only."""
        moved = [run.new for run in self.runs if run.moved]
        return np.flatnonzero(~self.covered()[: min(moved, default=0)])


@dataclass
class Stepped:
    """Requests that ended in a step: `finished` ones have their KV, `failed` ones do not."""

    finished: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class SelectiveRecompute:
    """All requests of one engine that are being filled.

    Args:
        engine: computes rows.
        scatter: copies runs.

    Attributes:
        rows_computed: times a row went through a layer, since the start.
    """

    def __init__(self, engine: RowEngine, scatter: KvScatter) -> None:
        self._engine, self._scatter = engine, scatter
        self._passes: dict[str, _RequestProgress] = {}
        self.rows_computed = 0

    def __len__(self) -> int:
        return len(self._passes)

    def start(self, request: RecomputeRequest) -> None:
        """Begin with a request; `step` continues with it."""
        self._passes[request.request_id] = _RequestProgress(
            self._engine, self._scatter.rope, request
        )

    def cancel(self, request_id: str) -> bool:
        """Stop working on a request; return False if it is not, or no longer, in the pass."""
        return self._passes.pop(request_id, None) is not None

    def step(self, budget_rows: int) -> Stepped:
        """Continue with the oldest requests, within a budget of rows (at least one)."""
        stepped, left = Stepped(), max(1, budget_rows)
        while left > 0 and self._passes:
            parts: list[tuple[_RequestProgress, Rows]] = []
            before = left
            for name, each in list(self._passes.items()):
                try:
                    left -= each.place(self._scatter, left)
                    rows = each.next_rows(left)
                except Exception as error:
                    self._fail(stepped, name, error)
                    continue
                if rows is not None:
                    parts.append((each, rows))
                    left -= each.cost_rows(rows)
                if left <= 0:
                    break
            self._compute(parts, stepped)
            for name in [name for name, each in self._passes.items() if each.done]:
                stepped.finished.append(name)
                del self._passes[name]
            if left == before:
                break
        return stepped

    def _fail(self, stepped: Stepped, name: str, error: Exception) -> None:
        """Drop one request after an error, so that the engine computes its prompt; keep others."""
        unforeseen = None if isinstance(error, LostKV) else error
        logger.warning("%s is computed, not reused: %s", name, error, exc_info=unforeseen)
        stepped.failed.append(name)
        del self._passes[name]

    def _compute(self, parts: list[tuple[_RequestProgress, Rows]], stepped: Stepped) -> None:
        if not parts:
            return
        ends = np.cumsum([len(rows.positions) for _, rows in parts])
        batch = np.concatenate([rows.positions for _, rows in parts])

        def cut(
            alive: NDArray[np.int64],
        ) -> Iterator[tuple[_RequestProgress, slice, NDArray[np.int64]]]:
            """Yield each request, the slice of these rows that is its own, and their positions."""
            cuts = np.searchsorted(alive, ends)
            for (each, _), first, end in zip(parts, [0, *cuts[:-1]], cuts, strict=True):
                yield each, slice(first, end), batch[alive[first:end]]

        def watch(layer: int, queries: Tensor, output: Tensor, alive: NDArray[np.int64]) -> None:
            self.rows_computed += len(alive)
            for each, part, positions in cut(alive):
                if each.probe is not None:
                    each.probe.watch(layer, queries[part], output[part], positions)

        def fresh(layer: int, keys: Tensor, values: Tensor, alive: NDArray[np.int64]) -> None:
            for each, part, positions in cut(alive):
                if each.correction is not None:
                    each.correction.update(layer, keys[part], values[part], positions)

        hidden = self._engine.compute([rows for _, rows in parts], watch, fresh)
        through = [int((rows.depths >= self._engine.layers).sum()) for _, rows in parts]
        for (each, rows), end in zip(parts, np.cumsum(through), strict=True):
            try:
                each.computed(len(rows.positions), hidden[:end])
            except Exception as error:
                self._fail(stepped, each.request.request_id, error)


class _RequestProgress:
    """The state of one request in the pass."""

    def __init__(self, engine: RowEngine, rope: Rope, request: RecomputeRequest) -> None:
        self.request, self._engine, self._rope = request, engine, rope
        tokens = engine.kv.block_tokens
        pieces = [piece for run in request.runs for piece in run.pieces(tokens)]
        self._pieces: Iterator[Piece] = iter(pieces)
        self._unplaced = len(pieces)
        self.probe: Probe | None = None
        self.correction: RequestCorrection | None = None
        self._lead = request.lead() if request.last is not None else np.empty(0, np.int64)
        self._leads = self._drafting = False
        self._rows: Rows | None = None
        self._at = 0
        self.done = False

    def place(self, scatter: KvScatter, budget_rows: int) -> int:
        """Place pieces until they cost `budget_rows` rows, at least one; return their cost."""
        used = 0.0
        while self._unplaced and used < budget_rows:
            piece = next(self._pieces)
            scatter.place(piece, self.request.table)
            self._unplaced -= 1
            used += piece.length / PLACED_PER_ROW
        return int(np.ceil(used))

    def next_rows(self, most: int) -> Rows | None:
        """Return the next rows; None while runs are being placed, or if none may be computed."""
        if self._unplaced or most <= 0:
            return None
        if self._rows is None:
            self._begin()
        if self.done or self._rows is None:
            return None
        return self._rows.part(slice(self._at, self._at + most))

    def cost_rows(self, rows: Rows) -> int:
        """Return the cost of computing these rows, in rows of a batch."""
        return DRAFTED_AS_ROWS if self._drafting else len(rows.positions)

    def computed(self, rows: int, hidden: Tensor) -> None:
        """Record that `rows` of the rows were computed. The last row of `hidden` is the last of
        them that went through all layers."""
        self._at += rows
        if self._rows is None or self._at < len(self._rows.positions):
            return
        if self.probe is not None and self.probe.drafts:
            self.probe.draft(self._engine.likeliest(hidden[-1:]))
            self._rows, self._at, self._drafting = self.probe.rows, 0, True
        elif self.probe is not None:
            self._drafting = False
            mass, self.probe = self.probe.finish(), None
            self._choose(mass)
        elif self._leads:
            self._begin_probe()
        else:
            self.done = True

    def _begin(self) -> None:
        request = self.request
        if request.last is None:
            self._choose(None)
        elif len(self._lead):
            depths = np.full(len(self._lead), self._engine.layers)
            ids = request.token_ids[self._lead]
            self._rows, self._leads = Rows(request.table, self._lead, ids, depths), True
        else:
            self._begin_probe()

    def _begin_probe(self) -> None:
        request, self._leads = self.request, False
        assert request.last is not None
        there = request.covered()
        there[self._lead] = True
        ids = request.token_ids
        self.probe = Probe(self._engine, request.table, ids, request.last, there, request.final)
        self._rows, self._at = self.probe.rows, 0

    def _choose(self, mass: NDArray[np.float32] | None) -> None:
        request, layers = self.request, self._engine.layers
        depths = np.asarray(request.choose(mass), np.int64)
        if depths.shape != request.token_ids.shape:
            raise ValueError(f"{request.request_id}: depths of shape {depths.shape}")
        depths = np.where(request.covered(), depths.clip(0, layers), layers)
        depths[: request.start] = 0
        depths[self._lead] = 0
        kv = self._engine.kv
        self.correction = RequestCorrection(kv, self._rope, request.table, request.runs, depths)
        positions = np.flatnonzero(depths)
        self._rows = Rows(request.table, positions, request.token_ids[positions], depths[positions])
        self._at, self.done = 0, not len(positions)
