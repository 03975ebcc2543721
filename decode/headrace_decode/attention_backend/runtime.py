"""State of sparse attention in this process, for backends that vLLM makes without arguments.

The worker sets it: the page before the model is loaded, the rest when the KV cache exists. The
worker also marks the beginning and the end of each step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.attention.batch import BatchRow
from headrace_decode.compression.engine.compressed_attention import CompressedRow
from headrace_decode.compression.engine.compression_worker import CompressionWorker
from headrace_decode.compression.engine.context_scorer import ScoringRow
from headrace_decode.compression.engine.incremental import IncrementalRow
from headrace_decode.sparse.engine.page_summary_table import PageSummaryTable
from headrace_decode.sparse.engine.sparse_rows import RefreshSummaries, RowPlan, SparseRows
from headrace_decode.sparse.offload.offloaded_requests import (
    OffloadedPlan,
    OffloadedRequests,
    StagedPlan,
)

logger = logging.getLogger("headrace.sparse")


class AttentionRuntime:
    """State of one engine.

    Attributes:
        page_tokens: tokens of a page.
        in_step: whether a step of the scheduler is in progress. Dummy runs are not steps.
        sparse_row_count: number of sparse rows of all steps so far.
        summary_table: summaries, in an engine on a CPU.
        offloading: offloaded requests, in an engine that offloads.
        compression: compressed requests, in an engine that compresses contexts.
        lost: requests whose KV was lost, to report to the scheduler (`lost_requests`).
    """

    def __init__(self) -> None:
        self.page_tokens = 32
        self.in_step = False
        self.sparse_row_count = 0
        self.summary_table: PageSummaryTable | None = None
        self.offloading: OffloadedRequests[Any] | None = None
        self.compression: CompressionWorker | None = None
        self.lost: set[str] = set()
        self._rows: SparseRows | None = None
        self._batch: Callable[[], Sequence[BatchRow]] | None = None

    def bind(
        self,
        rows: SparseRows | None,
        batch: Callable[[], Sequence[BatchRow]],
        summary_table: PageSummaryTable | None = None,
    ) -> None:
        """Let rows be sparse or compressed from now on.

        Args:
            rows: decides which rows are sparse; None if none is.
            batch: returns the rows of the step in progress.
        """
        self._rows, self._batch, self.summary_table = rows, batch, summary_table

    def begin_step(self, moved: set[str]) -> None:
        """Begin a step, like `SparseRows.begin_step`; `end_step` follows."""
        self.in_step = True
        if self._rows is not None:
            self._rows.begin_step(moved)

    def end_step(self) -> None:
        """End the step. Runs until the next step are dummy runs."""
        self.in_step = False

    def sparse_rows(
        self,
        count: int,
        starts: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        refresh: RefreshSummaries,
    ) -> list[RowPlan]:
        """Return the sparse rows of the step in progress; none if there is no step.

        Args:
            count: number of rows of the step.
            starts: int [rows + 1], first token of each row.
            kv_tokens, refresh: as for `SparseRows.select_rows`.
        """
        if self._rows is None or self._batch is None or not self.in_step:
            return []
        batch = self._batch()
        if len(batch) != count:
            return []
        if self.offloading is not None:
            batch = [
                replace(row, keep_ratio=None) if row.request_id in self.offloading else row
                for row in batch
            ]
        try:
            rows = self._rows.select_rows(batch, np.diff(starts), kv_tokens, refresh)
        except Exception:
            logger.exception("this engine attends densely from now on")
            self._rows = None
            return []
        self.sparse_row_count += len(rows)
        return rows

    def offloaded_rows(
        self,
        count: int,
        starts: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        refresh: RefreshSummaries,
    ) -> tuple[list[OffloadedPlan], list[StagedPlan]]:
        """Return the offloaded rows of the step in progress; none if there is no step.

        Only `offloading` knows where their KV is, so an error here ends their requests. Arguments
        as for `sparse_rows`.
        """
        if not self.offloading or self._batch is None or not self.in_step:
            return [], []
        batch = self._batch()
        try:
            return self.offloading.select_rows(_whole(batch, count), starts, kv_tokens, refresh)
        except Exception:
            self._lose(row.request_id for row in batch if row.request_id in self.offloading)
            return [], []

    def compressed_rows(
        self,
        count: int,
        starts: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
    ) -> tuple[list[CompressedRow], list[ScoringRow | IncrementalRow]]:
        """Return the rows whose contexts have dropped KV, and the rows whose queries count; errors
        as for `offloaded_rows`. Arguments as for `sparse_rows`.
        """
        if not self.compression or self._batch is None or not self.in_step:
            return [], []
        batch = self._batch()
        try:
            return self.compression.select_rows(_whole(batch, count), starts, kv_tokens)
        except Exception:
            self._lose(row.request_id for row in batch if row.request_id in self.compression)
            return [], []

    def pop_lost(self) -> set[str]:
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


RUNTIME = AttentionRuntime()
"""State of the one engine of this process."""
