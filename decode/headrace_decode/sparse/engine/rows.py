"""Which rows of a step attend sparsely, on any device.

A row is sparse if its request asks for it, it computes one token and not of the prompt, it has
many units, and their summaries are right. Rows of prompts, of drafts, of exact requests and short
ones are dense, as is a row whose summaries are still being made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.engine.counts import chosen_units

STEP_WORK = 256
"""Of `Book.bring_up`, in a step: 10 ms at units of 32 tokens, 3 KV heads of 64."""
READY_STEPS = 32
"""Steps in which all units of a request get their summaries, however many it has. So a step takes
less than twice as long as a dense one: at 32,768 tokens and 3 KV heads of 64, a 32nd of a row's
units takes 1 to 2 ms a layer (28 to 60 us a unit), and its dense attention 7 ms."""
BringUp = Callable[[int, int, int, int], tuple[int, int]]
"""(row, first, last, budget) -> (done, cost): make the summaries of a row's units from `first` to
before `last` right, in order; how many are, and what that cost. The last may exceed the budget."""


@dataclass(frozen=True)
class BatchRow:
    """A request's row in a step.

    Attributes:
        request_id: vLLM's.
        share: that it attends to (`techniques.share_in`); None for an exact request.
        prompt_tokens: of its prompt.
    """

    request_id: str
    share: float | None
    prompt_tokens: int


@dataclass(frozen=True)
class RowPlan:
    """How many units a sparse row attends to.

    Attributes:
        row: in the batch.
        full: its full units before the newest.
        fill: tokens in the newest, this step's included.
        chosen: units that it attends to, the newest included.
    """

    row: int
    full: int
    fill: int
    chosen: int


def least_units(full: int) -> int:
    """Return how many of a request's full units are summarised in a step, at least."""
    return -(-full // READY_STEPS)


def plan_of(
    row: BatchRow, number: int, queries: int, kv_tokens: int, unit_tokens: int
) -> RowPlan | None:
    """A row's plan, if the summaries of its full units are right; None if it is dense even then.

    Args:
        number: of the row in the batch.
        queries, kv_tokens: as of `SparseRows.of_step`.
    """
    if row.share is None or queries != 1 or kv_tokens <= row.prompt_tokens:
        return None
    chosen = chosen_units(kv_tokens, unit_tokens, row.share)
    if chosen is None:
        return None
    full = (kv_tokens - 1) // unit_tokens
    return RowPlan(number, full, kv_tokens - full * unit_tokens, chosen)


class SparseRows:
    """Follows the requests of an engine.

    Args:
        layers: that a unit has summaries in.
        unit_tokens: of a unit.
        step_work: that a step may do beside what its own tokens make necessary.
    """

    def __init__(self, layers: int, unit_tokens: int, step_work: int = STEP_WORK) -> None:
        self._layers, self._unit_tokens, self._step_work = layers, unit_tokens, step_work
        self._right: dict[str, int] = {}
        """By request: its first units whose summaries are right."""
        self._moved: frozenset[str] = frozenset()

    def step_begins(self, moved: Collection[str]) -> None:
        """A step of the scheduler begins.

        Args:
            moved: requests whose blocks are new or no longer theirs. KV may still be on its way
                into new ones until the step ends, so nothing of them is looked at in it.
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
        """The sparse rows of a step; has summaries made within the step's work.

        Args:
            rows: the batch.
            queries: int [rows], tokens that each computes.
            kv_tokens: int [rows], KV of each when it has.
        """
        wanting: list[tuple[int, int, int]] = []
        for number, row in enumerate(rows):
            if row.share is None or row.request_id in self._moved:
                continue
            before = int(kv_tokens[number] - queries[number])
            full = before // self._unit_tokens
            right = self._right.get(row.request_id, 0)
            if right > full:  # KV that did not come is computed again
                right = 0
            wanting.append((full - right, number, full))
        # Those that lack least come first: a row that only filled a unit up stays sparse. No row
        # waits longer because others come, or because the model has many layers.
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
