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

With tensor parallelism, each rank has a pass of its own. The model's layers add up their parts over
the ranks, so all ranks must compute the same rows in the same calls. What decides this is the same
on all of them: requests, cancellations and budgets come from the scheduler, the probe's attention
is averaged over the ranks before the choice, and work that one rank alone may fail at (reading
stored blocks, a choice, memory) counts against the budget whether it fails or not. Before the first
row that depends on such work, the ranks compare which requests have failed on any of them, and all
drop these. A rank that is late is waited for. An error in the model's own layers ends the engine,
as it does in vLLM's steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

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
        self._names: dict[str, None] = {}
        """Requests in order of their start, the same on all ranks. One that could not be started on
        this rank has no entry in `_passes`, and leaves in the next step."""
        self._errors: dict[str, Exception] = {}
        """By request: its error on this rank, until the ranks have compared theirs."""
        self.rows_computed = 0

    def __len__(self) -> int:
        return len(self._names)

    def start(self, request_id: str, make: Callable[[], RecomputeRequest]) -> None:
        """Begin with a request; `step` continues with it.

        Args:
            make: returns the request. If it fails, the request fails on all ranks.
        """
        self._names[request_id] = None
        with self._keeps_error(request_id):
            self._passes[request_id] = _RequestProgress(self._engine, self._scatter.rope, make())

    def cancel(self, request_id: str) -> bool:
        """Stop working on a request; return False if it is not, or no longer, in the pass."""
        if request_id not in self._names:
            return False
        del self._names[request_id]
        self._passes.pop(request_id, None)
        self._errors.pop(request_id, None)
        return True

    def step(self, budget_rows: int) -> Stepped:
        """Continue with the oldest requests, within a budget of rows (at least one).

        All ranks call this with the same requests and the same budget."""
        stepped, left = Stepped(), max(1, budget_rows)
        while left > 0 and self._names:
            self._drop_failed(stepped)
            left -= self._compute(left)
            left -= self._prepare(left)
            for name in [name for name, each in self._passes.items() if each.is_done]:
                stepped.finished.append(name)
                self.cancel(name)
        return stepped

    @contextmanager
    def _keeps_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._errors[name] = error

    def _drop_failed(self, stepped: Stepped) -> None:
        """Drop requests that failed on any rank, so that the engine computes their prompts. All
        others that are prepared may compute rows."""
        unsure = [n for n in self._names if n not in self._passes or not self._passes[n].is_ready]
        if not unsure:
            return
        for name in self._engine.ranks.union(self._errors, unsure):
            error = self._errors.get(name)
            unforeseen = None if isinstance(error, LostKV) else error
            why = "it failed on another rank" if error is None else error
            logger.warning("%s is computed, not reused: %s", name, why, exc_info=unforeseen)
            stepped.failed.append(name)
            self.cancel(name)
        for each in self._passes.values():
            each.is_ready = each.is_prepared

    def _compute(self, budget: int) -> int:
        """Compute the next rows of requests that have some, and return their cost."""
        left, parts = budget, list[tuple[_RequestProgress, Rows]]()
        for each in self._passes.values():
            if left > 0 and each.is_ready and not each.is_done:
                parts.append((each, each.next_rows(left)))
                left -= each.cost_rows(parts[-1][1])
        if not parts:
            return 0
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
            each.on_computed(len(rows.positions), hidden[:end])
        return budget - left

    def _prepare(self, budget: int) -> int:
        """Prepare the next rows of requests that have none, and return the cost."""
        left = budget
        for name, each in self._passes.items():
            if left <= 0:
                break
            if each.is_prepared:
                continue
            pieces, cost = each.take_pieces(left)
            left -= cost
            with self._keeps_error(name):
                for piece in pieces:
                    self._scatter.place(piece, each.request.table)
                each.prepare()
        return budget - left


class _RequestProgress:
    """The state of one request in the pass.

    Attributes:
        is_ready: whether all ranks have prepared its next rows, or its end.
        probe: computed by the next rows; None if they are none of a probe.
        correction: of runs, by the next rows; None if they are none of runs.
    """

    def __init__(self, engine: RowEngine, rope: Rope, request: RecomputeRequest) -> None:
        self.request, self._engine, self._rope = request, engine, rope
        tokens = engine.kv.block_tokens
        self._unplaced = [piece for run in request.runs for piece in run.pieces(tokens)]
        self.probe: Probe | None = None
        self.correction: RequestCorrection | None = None
        self._lead = request.lead() if request.last is not None else np.empty(0, np.int64)
        self._drafting = False
        self._unprepared: Callable[[], None] | None = self._begin
        """Work of this rank alone that comes before the next rows."""
        self._rows: Rows | None = None
        """The next rows, once they are prepared; None if there are no more."""
        self._at = 0
        self.is_ready = False

    @property
    def is_prepared(self) -> bool:
        """Whether this rank has prepared the next rows, or the request's end."""
        return self._unprepared is None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.is_ready and self._rows is None

    def take_pieces(self, budget_rows: int) -> tuple[list[Piece], int]:
        """Return the next pieces to place, at least one if there are any, until they cost
        `budget_rows` rows; and their cost."""
        taken, cost = 0, 0.0
        while taken < len(self._unplaced) and cost < budget_rows:
            cost += self._unplaced[taken].length / PLACED_PER_ROW
            taken += 1
        pieces, self._unplaced = self._unplaced[:taken], self._unplaced[taken:]
        return pieces, math.ceil(cost)

    def prepare(self) -> None:
        """Prepare the next rows, once all pieces are placed."""
        if self._unprepared is not None and not self._unplaced:
            self._unprepared()
            self._unprepared = None

    def next_rows(self, most: int) -> Rows:
        """Return the next rows, `most` at most."""
        assert self._rows is not None
        return self._rows.part(slice(self._at, self._at + most))

    def cost_rows(self, rows: Rows) -> int:
        """Return the cost of computing these rows, in rows of a batch."""
        return DRAFTED_AS_ROWS if self._drafting else len(rows.positions)

    def on_computed(self, rows: int, hidden: Tensor) -> None:
        """Record that `rows` of the rows were computed. The last row of `hidden` is the last of
        them that went through all layers."""
        self._at += rows
        if self._rows is None or self._at < len(self._rows.positions):
            return
        if self.probe is not None and self.probe.drafts:
            self.probe.draft(self._engine.likeliest(hidden[-1:]))
            self._rows, self._at, self._drafting = self.probe.rows, 0, True
        elif self.probe is not None:
            mass = self._engine.ranks.mean(self.probe.finish())
            self.probe, self._drafting = None, False
            self._prepare_next(partial(self._choose, mass))
        elif self.correction is None:
            self._prepare_next(self._begin_probe)
        else:
            self._rows = None

    def _prepare_next(self, work: Callable[[], None]) -> None:
        self._rows, self._unprepared, self.is_ready = None, work, False

    def _begin(self) -> None:
        request = self.request
        if request.last is None:
            self._choose(None)
        elif len(self._lead):
            depths = np.full(len(self._lead), self._engine.layers)
            ids = request.token_ids[self._lead]
            self._rows, self._at = Rows(request.table, self._lead, ids, depths), 0
        else:
            self._begin_probe()

    def _begin_probe(self) -> None:
        request = self.request
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
        if len(positions):
            ids = request.token_ids[positions]
            self._rows = Rows(request.table, positions, ids, depths[positions])
            self._at = 0
