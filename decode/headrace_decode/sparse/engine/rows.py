"""Decides which rows of a step attend sparsely, on any device.

A row is sparse if its request asks for it, it computes one token after the prompt, it has many
units, and their summaries are up to date. Other rows are dense: rows of prompts, rows with drafts,
rows of exact or short requests, and rows whose summaries are still being made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.engine.counts import chosen_units

STEP_WORK = 256
"""Budget of `Book.bring_up` in a step: 10 ms at units of 32 tokens, 3 KV heads of 64."""
READY_STEPS = 32
"""Maximum number of steps in which all units of a request get their summaries, however many it has.
Such a step takes less than twice as long as a dense one: at 32,768 tokens and 3 KV heads of 64, a
32nd of a row's units takes 1 to 2 ms a layer (28 to 60 us a unit), and its dense attention 7 ms."""
BringUp = Callable[[int, int, int, int], tuple[int, int]]
"""(row, first, last, budget) -> (done, cost): bring the summaries of a row's units from `first` to
before `last` up to date, in order. `done` is their number, and `cost` the work. The last unit may
exceed the budget."""


@dataclass(frozen=True)
class BatchRow:
    """A request's row in a step.

    Attributes:
        request_id: vLLM's request id.
        share: share of the units that it attends to (`techniques.share_in`); None for an exact
            request.
        prompt_tokens: number of tokens of its prompt.
    """

    request_id: str
    share: float | None
    prompt_tokens: int


@dataclass(frozen=True)
class RowPlan:
    """Number of units that a sparse row attends to.

    Attributes:
        row: index in the batch.
        full: number of its full units before the newest.
        fill: number of tokens in the newest unit, this step's included.
        chosen: number of units that it attends to, the newest included.
    """

    row: int
    full: int
    fill: int
    chosen: int


def least_units(full: int) -> int:
    """Return the minimum number of a request's full units to summarise in a step."""
    return -(-full // READY_STEPS)


def plan_of(
    row: BatchRow, number: int, queries: int, kv_tokens: int, unit_tokens: int
) -> RowPlan | None:
    """Return the plan of a row whose full units have up-to-date summaries; None if it is dense.

    Args:
        number: index of the row in the batch.
        queries, kv_tokens: as for `SparseRows.of_step`.
    """
    if row.share is None or queries != 1 or kv_tokens <= row.prompt_tokens:
        return None
    chosen = chosen_units(kv_tokens, unit_tokens, row.share)
    if chosen is None:
        return None
    full = (kv_tokens - 1) // unit_tokens
    return RowPlan(number, full, kv_tokens - full * unit_tokens, chosen)


class SparseRows:
    """Sparse rows of an engine's requests.

    Args:
        layers: number of layers in which a unit's summaries are counted as work.
        unit_tokens: tokens of a unit.
        step_work: work of a step, in addition to that for units which its own tokens fill.
    """

    def __init__(self, layers: int, unit_tokens: int, step_work: int = STEP_WORK) -> None:
        self._layers, self._unit_tokens, self._step_work = layers, unit_tokens, step_work
        self._right: dict[str, int] = {}
        """By request: the number of its first units whose summaries are up to date."""
        self._moved: frozenset[str] = frozenset()

    def step_begins(self, moved: Collection[str]) -> None:
        """Begin a step of the scheduler.

        Args:
            moved: requests whose blocks are new or were taken away. KV may still be copied into
                new blocks until the step ends, so these requests are dense in this step.
        """
        self._moved = frozenset(moved)
        for name in moved:
            self._right.pop(name, None)

    def of_step(
        self,
        rows: Sequence[BatchRow],
        queries: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        bring_up: BringUp,
    ) -> list[RowPlan]:
        """Return the sparse rows of a step, and make summaries within the step's work.

        Args:
            rows: the batch.
            queries: int [rows], number of tokens that each row computes.
            kv_tokens: int [rows], tokens of each row's KV after the step.
            bring_up: makes the summaries.
        """
        wanting: list[tuple[int, int, int]] = []
        for number, row in enumerate(rows):
            if row.share is None or row.request_id in self._moved:
                continue
            before = int(kv_tokens[number] - queries[number])
            full = before // self._unit_tokens
            right = self._right.get(row.request_id, 0)
            if right > full:  # KV that could not be loaded is computed again
                right = 0
            wanting.append((full - right, number, full))
        # Rows that lack the fewest units come first, so a row that only filled up a unit stays
        # sparse. No row waits longer because of other rows, or because the model has many layers.
        budget = self._step_work + self._layers * (int(queries.sum()) // self._unit_tokens)
        found = []
        for lacking, number, full in sorted(wanting):
            row = rows[number]
            right = full - lacking
            if lacking > 0:
                own = least_units(full) * (self._layers + 1)
                done, cost = bring_up(number, right, full, max(budget, own))
                self._right[row.request_id] = right = right + done
                budget -= cost
            if right >= full:
                plan = plan_of(
                    row, number, int(queries[number]), int(kv_tokens[number]), self._unit_tokens
                )
                found.extend([] if plan is None else [plan])
        return sorted(found, key=lambda each: each.row)
