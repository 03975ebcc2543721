"""Attention of offloaded rows in a step.

    sparse    rows that are sparse by the rules of `sparse_rows`. Pages are scored by their
              summaries, wherever they lie, and chosen pages are brought into the working set
    staged    all other rows with KV that left the cache: rows of prompts, rows with drafts, rows
              that attend densely. All pages of a layer are copied in order to a buffer of one
              layer, and vLLM's kernel attends to them there: its result is the dense one

vLLM computes the rows whose KV is still all in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.batch import BatchRow
from headrace_decode.attention.cpu_cache import Ids, Kernel
from headrace_decode.attention.page_counts import RECENT, SINKS
from headrace_decode.sparse.engine.sparse_rows import STEP_WORK, min_pages, plan_of
from headrace_decode.sparse.offload.offloaded_request import OffloadedRequest, TieredCache
from headrace_decode.sparse.page_scores import score_pages
from headrace_decode.sparse.page_selection import select_pages


@dataclass(frozen=True)
class OffloadedRow:
    """A sparse row.

    Attributes:
        row, newest, fill, chosen: as for `SparseRow`.
        held: the request.
        table: int64 [n], blocks of its full pages before the newest; entries of pages that left
            the cache are stale.
    """

    row: int
    newest: int
    fill: int
    chosen: int
    held: OffloadedRequest
    table: Ids

    def select(
        self, layer: Any, queries: NDArray[np.float32], scale: float
    ) -> NDArray[np.integer[Any]]:
        """Choose pages like `SparseRow.select`, and bring them into the cache."""
        held = self.held
        summaries = np.concatenate([held.scored(), self.table[held.copied :]])
        scores = score_pages(layer.summaries, summaries, queries, scale)
        chosen = select_pages(scores, self.chosen - 1, SINKS, RECENT - 1)
        return held.place(layer.number, scores, chosen, self.table)


@dataclass(frozen=True)
class StagedRow:
    """A row that attends to all its pages.

    Attributes:
        row: index in the batch.
        tokens: slice of the step's tokens.
        kv_tokens: number of tokens of its KV, this step's included.
        held: the request.
        table: int64 [n], blocks of its pages, the newest included.
    """

    row: int
    tokens: slice
    kv_tokens: int
    held: OffloadedRequest
    table: Ids


class StagedStep:
    """A step's staged rows, which are computed one after another.

    Args:
        rows: at least one.
        memory: memory with the buffer.
        schedule: (starts, lengths) -> the kernel's schedule of these requests.
        kernel: a `Kernel`.
    """

    def __init__(
        self,
        rows: Sequence[StagedRow],
        memory: TieredCache,
        schedule: Callable[[Tensor, Tensor], Any],
        kernel: Kernel,
    ) -> None:
        self.rows, self._memory, self._kernel = rows, memory, kernel
        self._calls = []
        for row in rows:
            starts = torch.tensor([0, row.tokens.stop - row.tokens.start], dtype=torch.int32)
            lengths = torch.tensor([row.kv_tokens], dtype=torch.int32)
            table = torch.arange(len(row.table), dtype=torch.int32)[None]
            self._calls.append((starts, lengths, table, schedule(starts, lengths)))

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float) -> None:
        """Write the rows' attention in one layer.

        Args:
            query, output: [tokens, heads, head_dim], of all rows of the step.
        """
        keys, values = self._memory.staging.as_kernel()
        for row, call in zip(self.rows, self._calls, strict=True):
            row.held.stage(layer, row.table)
            mine, found = query[row.tokens], output[row.tokens]
            self._kernel(mine, keys, values, found, *call, scale)


class OffloadedRequests:
    """Offloaded requests of an engine.

    Args:
        memory: the engine's memory.
        block_tokens: tokens of a block of the scheduler.
    """

    def __init__(self, memory: TieredCache, block_tokens: int) -> None:
        self.memory, self._block_tokens = memory, block_tokens
        self._page_tokens = memory.layers[0].page_tokens
        self._held: dict[str, OffloadedRequest] = {}
        self.sparse = self.staged = self.asked = self.missed = self.cold = 0
        """Numbers of sparse and staged rows so far; then the counts of `OffloadedRequest`, over
        requests that ended."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def follows(self, request_id: str) -> bool:
        """Return whether a step with this offloaded request has been seen."""
        return request_id in self._held and self._held[request_id].seen

    def begin_step(self, left: Collection[str], new: Mapping[str, Sequence[int]]) -> None:
        """Begin a step of the scheduler.

        Args:
            left: requests that ended or are preempted.
            new: the scheduler's blocks of the working set, by request that is offloaded from this
                step on.
        """
        for name in (*left, *new):
            held = self._held.pop(name, None)
            if held is not None:
                self.asked += held.asked
                self.missed += held.missed
                self.cold += held.cold
                held.end()
        for name, slots in new.items():
            self._held[name] = OffloadedRequest(self.memory, slots)

    def save(self, final: Mapping[str, int], blocks: Callable[[str], Sequence[int]]) -> None:
        """Copy full blocks that have not been copied.

        Args:
            final: by request of the step: number of tokens whose KV is final.
            blocks: returns a request's blocks of the scheduler.
        """
        for name, tokens in final.items():
            if (held := self._held.get(name)) is not None:
                held.save_up_to(tokens, blocks(name))

    def select_rows(
        self,
        rows: Sequence[BatchRow],
        starts: NDArray[np.integer],
        kv_tokens: NDArray[np.integer],
        tables: NDArray[np.integer],
    ) -> tuple[list[OffloadedRow], list[StagedRow]]:
        """Return a step's sparse and staged rows, and make summaries within the step's work.

        Args:
            rows: the batch.
            starts: int [rows + 1], first token of each row.
            kv_tokens: as for `SparseRows.select_rows`.
            tables: int [rows, most pages], blocks of the kernel.
        """
        sparse, staged = [], []
        pages = self._page_tokens
        budget = STEP_WORK // len(self.memory.layers) + int(starts[-1]) // pages
        for number, row in enumerate(rows):
            held = self._held.get(row.request_id)
            if held is None:
                continue
            length = int(kv_tokens[number])
            if row.keep_ratio is not None and held.slots:
                budget -= held.summarise(max(budget, min_pages(held.copied)))
            n = -(-length // pages)
            table = tables[number, :n].astype(np.int64)
            one = self._sparse(number, row, held, length, starts, table)
            if one is not None:
                sparse.append(one)
            elif held.gone:
                tokens = slice(int(starts[number]), int(starts[number + 1]))
                staged.append(StagedRow(number, tokens, length, held, table))
        self.sparse += len(sparse)
        self.staged += len(staged)
        return sparse, staged

    def _sparse(
        self,
        number: int,
        row: BatchRow,
        held: OffloadedRequest,
        kv_tokens: int,
        starts: NDArray[np.integer],
        table: Ids,
    ) -> OffloadedRow | None:
        queries = int(starts[number + 1] - starts[number])
        plan = plan_of(row, number, queries, kv_tokens, self._page_tokens)
        if plan is None or held.summarised < held.copied or plan.chosen - 1 > held.slots:
            return None
        window = table[held.copied : -1]
        if self.memory.summary_table.refresh(window, STEP_WORK)[0] < len(window):
            return None
        newest = int(table[plan.full])
        return OffloadedRow(number, newest, plan.fill, plan.chosen, held, table[: plan.full])
