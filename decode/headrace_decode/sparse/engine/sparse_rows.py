"""Decides which rows of a step attend sparsely, on any device.

A row is sparse if its request asks for it, it computes one token after the prompt, it has many
pages, and their summaries are up to date. Other rows are dense: rows of prompts, rows with drafts,
rows of exact or short requests, and rows whose summaries are still being made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_decode.attention.batch import BatchRow
from headrace_decode.attention.page_counts import selected_page_count

STEP_WORK = 256
"""Budget of `PageSummaryTable.refresh` in a step: 10 ms at pages of 32 tokens, 3 KV heads of 64."""
READY_STEPS = 32
"""Maximum number of steps in which all pages of a request get their summaries, however many it has.
Such a step takes less than twice as long as a dense one: at 32,768 tokens and 3 KV heads of 64, a
32nd of a row's pages takes 1 to 2 ms a layer (28 to 60 us a page), and its dense attention 7 ms."""
RefreshSummaries = Callable[[int, int, int, int], tuple[int, int]]
"""(row, first, last, budget) -> (done, cost): bring the summaries of a row's pages from `first` to
before `last` up to date, in order. `done` is their number, and `cost` the work. The last page may
exceed the budget."""


@dataclass(frozen=True)
class RowPlan:
    """Number of pages that a sparse row attends to.

    Attributes:
        row: index in the batch.
        full: number of its full pages before the newest.
        fill: number of tokens in the newest page, this step's included.
        chosen: number of pages that it attends to, the newest included.
    """

    row: int
    full: int
    fill: int
    chosen: int


def min_pages(full: int) -> int:
    """Return the minimum number of a request's full pages to summarise in a step."""
    return -(-full // READY_STEPS)


def plan_of(
    row: BatchRow, number: int, queries: int, kv_tokens: int, page_tokens: int
) -> RowPlan | None:
    """Return the plan of a row whose full pages have up-to-date summaries; None if it is dense.

    Args:
        number: index of the row in the batch.
        queries, kv_tokens: as for `SparseRows.select_rows`.
    """
    if row.keep_ratio is None or queries != 1 or kv_tokens <= row.prompt_tokens:
        return None
    chosen = selected_page_count(kv_tokens, page_tokens, row.keep_ratio)
    if chosen is None:
        return None
    full = (kv_tokens - 1) // page_tokens
    return RowPlan(number, full, kv_tokens - full * page_tokens, chosen)


class SparseRows:
    """Sparse rows of an engine's requests.

    Args:
        layers: number of layers in which a page's summaries are counted as work.
        page_tokens: tokens of a page.
        step_work: work of a step, in addition to that for pages which its own tokens fill.
    """

    def __init__(self, layers: int, page_tokens: int, step_work: int = STEP_WORK) -> None:
        self._layers, self._page_tokens, self._step_work = layers, page_tokens, step_work
        self._right: dict[str, int] = {}
        """By request: the number of its first pages whose summaries are up to date."""
        self._moved: frozenset[str] = frozenset()

    def begin_step(self, moved: Collection[str]) -> None:
        """Begin a step of the scheduler.

        Args:
            moved: requests whose blocks are new or were taken away. KV may still be copied into
                new blocks until the step ends, so these requests are dense in this step.
        """
        self._moved = frozenset(moved)
        for name in moved:
            self._right.pop(name, None)

    def select_rows(
        self,
        rows: Sequence[BatchRow],
        queries: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        refresh: RefreshSummaries,
    ) -> list[RowPlan]:
        """Return the sparse rows of a step, and make summaries within the step's work.

        Args:
            rows: the batch.
            queries: int [rows], number of tokens that each row computes.
            kv_tokens: int [rows], tokens of each row's KV after the step.
            refresh: makes the summaries.
        """
        wanting: list[tuple[int, int, int]] = []
        for number, row in enumerate(rows):
            if row.keep_ratio is None or row.request_id in self._moved:
                continue
            before = int(kv_tokens[number] - queries[number])
            full = before // self._page_tokens
            right = self._right.get(row.request_id, 0)
            if right > full:  # KV that could not be loaded is computed again
                right = 0
            wanting.append((full - right, number, full))
        # Rows that lack the fewest pages come first, so a row that only filled up a page stays
        # sparse. No row waits longer because of other rows, or because the model has many layers.
        budget = self._step_work + self._layers * (int(queries.sum()) // self._page_tokens)
        found = []
        for lacking, number, full in sorted(wanting):
            row = rows[number]
            right = full - lacking
            if lacking > 0:
                own = min_pages(full) * (self._layers + 1)
                done, cost = refresh(number, right, full, max(budget, own))
                self._right[row.request_id] = right = right + done
                budget -= cost
            if right >= full:
                plan = plan_of(
                    row, number, int(queries[number]), int(kv_tokens[number]), self._page_tokens
                )
                found.extend([] if plan is None else [plan])
        return sorted(found, key=lambda each: each.row)
