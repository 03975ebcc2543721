"""State of sparse attention in this process, for backends that vLLM makes without arguments.

The worker sets it: the unit before the model is loaded, the rest when the KV cache exists. The
worker also marks the beginning and the end of each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace_decode.compression.engine.dropped import DroppedRow
from headrace_decode.compression.engine.following import Following
from headrace_decode.compression.engine.reading import ReadRow
from headrace_decode.compression.engine.streaming import StreamedRow
from headrace_decode.sparse.engine.book import Book
from headrace_decode.sparse.engine.offload.rows import OffloadedRow, Offloading, StagedRow
from headrace_decode.sparse.engine.rows import BatchRow, BringUp, RowPlan, SparseRows

logger = logging.getLogger("headrace.sparse")


class Bound:
    """State of one engine.

    Attributes:
        unit_tokens: tokens of a unit.
        under_way: whether a step of the scheduler is in progress. Dummy runs are not steps.
        found: number of sparse rows of all steps so far.
        book: summaries, in an engine on a CPU.
        offloading: offloaded requests, in an engine that offloads.
        following: bounded requests, in an engine that bounds contexts.
        lost: requests whose KV was lost, to report to the scheduler (`lost`).
    """

    def __init__(self) -> None:
        self.unit_tokens = 32
        self.under_way = False
        self.found = 0
        self.book: Book | None = None
        self.offloading: Offloading | None = None
        self.following: Following | None = None
        self.lost: set[str] = set()
        self._rows: SparseRows | None = None
        self._batch: Callable[[], Sequence[BatchRow]] | None = None

    def bind(
        self,
        rows: SparseRows,
        batch: Callable[[], Sequence[BatchRow]],
        book: Book | None = None,
    ) -> None:
        """Let rows be sparse from now on.

        Args:
            batch: returns the rows of the step in progress.
        """
        self._rows, self._batch, self.book = rows, batch, book

    def step_begins(self, moved: set[str]) -> None:
        """Begin a step, like `SparseRows.step_begins`; `step_ends` follows."""
        self.under_way = True
        if self._rows is not None:
            self._rows.step_begins(moved)

    def step_ends(self) -> None:
        """End the step. Runs until the next step are dummy runs."""
        self.under_way = False

    def sparse_rows(
        self,
        count: int,
        starts: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        bring_up: BringUp,
    ) -> list[RowPlan]:
        """Return the sparse rows of the step in progress; none if there is no step.

        Args:
            count: number of rows of the step.
            starts: int [rows + 1], first token of each row.
            kv_tokens, bring_up: as for `SparseRows.of_step`.
        """
        if self._rows is None or self._batch is None or not self.under_way:
            return []
        batch = self._batch()
        if len(batch) != count:
            return []
        if self.offloading is not None:
            batch = [
                replace(row, share=None) if row.request_id in self.offloading else row
                for row in batch
            ]
        try:
            rows = self._rows.of_step(batch, np.diff(starts), kv_tokens, bring_up)
        except Exception:
            logger.exception("this engine attends densely from now on")
            self._rows = None
            return []
        self.found += len(rows)
        return rows

    def offloaded_rows(
        self,
        count: int,
        starts: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        tables: NDArray[np.integer],
    ) -> tuple[list[OffloadedRow], list[StagedRow]]:
        """Return the offloaded rows of the step in progress; none if there is no step.

        Only `offloading` knows where their KV is, so an error here ends their requests.

        Args:
            count, starts: as for `sparse_rows`.
            kv_tokens, tables: as for `Offloading.of_step`.
        """
        if not self.offloading or self._batch is None or not self.under_way:
            return [], []
        batch = self._batch()
        try:
            return self.offloading.of_step(_whole(batch, count), starts, kv_tokens, tables)
        except Exception:
            self._lose(row.request_id for row in batch if row.request_id in self.offloading)
            return [], []

    def bounded_rows(
        self,
        count: int,
        starts: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        tables: NDArray[np.integer],
    ) -> tuple[list[DroppedRow], list[ReadRow | StreamedRow]]:
        """Return the rows whose contexts have dropped KV, and the rows whose queries count;
        arguments and errors as for `offloaded_rows`."""
        if not self.following or self._batch is None or not self.under_way:
            return [], []
        batch = self._batch()
        try:
            return self.following.of_step(_whole(batch, count), starts, kv_tokens, tables)
        except Exception:
            self._lose(row.request_id for row in batch if row.request_id in self.following)
            return [], []

    def take_lost(self) -> set[str]:
        """Return the requests whose KV was lost since the last time."""
        lost, self.lost = self.lost, set()
        return lost

    def _lose(self, names: Iterable[str]) -> None:
        self.lost.update(names)
        logger.exception("requests end, since their KV cannot be found: %s", sorted(self.lost))


def _whole(batch: Sequence[BatchRow], count: int) -> Sequence[BatchRow]:
    """Return the batch.

    Raises:
        RuntimeError: it has another number of rows.
    """
    if len(batch) != count:
        raise RuntimeError(f"{count} rows are computed, and the batch has {len(batch)}")
    return batch


BOUND = Bound()
"""State of the one engine of this process."""
