"""Attention of offloaded rows on a CPU; `offloaded_requests` says which rows these are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.cpu_cache import Ids, Kernel
from headrace_decode.attention.page_counts import RECENT, SINKS
from headrace_decode.sparse.offload.cpu_memory import CpuOffloadedRequest, CpuTieredMemory
from headrace_decode.sparse.offload.offloaded_requests import OffloadedPlan, StagedPlan
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
    held: CpuOffloadedRequest
    table: Ids

    @classmethod
    def of(cls, one: OffloadedPlan, table: NDArray[np.integer]) -> OffloadedRow:
        """Return the row of a plan.

        Args:
            table: int [n], the row's blocks.
        """
        plan, held = one.plan, one.held
        assert isinstance(held, CpuOffloadedRequest)
        blocks = table[: plan.full].astype(np.int64)
        return cls(plan.row, int(table[plan.full]), plan.fill, plan.chosen, held, blocks)

    def select(
        self, layer: Any, queries: NDArray[np.float32], scale: float
    ) -> NDArray[np.integer[Any]]:
        """Choose pages like `SparseRow.select`, and bring them into the cache."""
        held = self.held
        summaries = np.concatenate([held.scored(), self.table[held.copied :]])
        scores = score_pages(layer.summaries, summaries, queries, scale)
        chosen = select_pages(scores, self.chosen - 1, SINKS, RECENT - 1)
        return held.place(layer.number, scores, chosen, self.table)


class StagedStep:
    """A step's staged rows, which are computed one after another.

    Args:
        rows: at least one.
        memory: memory with the buffer.
        tables: int [rows, most pages], blocks of the batch's rows.
        schedule: (starts, lengths) -> the kernel's schedule of these requests.
        kernel: a `Kernel`.
    """

    def __init__(
        self,
        rows: Sequence[StagedPlan],
        memory: CpuTieredMemory,
        tables: NDArray[np.integer],
        schedule: Callable[[Tensor, Tensor], Any],
        kernel: Kernel,
    ) -> None:
        self._rows, self._memory, self._kernel = rows, memory, kernel
        self._tables: list[Ids] = []
        self._calls = []
        for row in rows:
            n = -(-row.kv_tokens // memory.page_tokens)
            self._tables.append(tables[row.row, :n].astype(np.int64))
            starts = torch.tensor([0, row.tokens.stop - row.tokens.start], dtype=torch.int32)
            lengths = torch.tensor([row.kv_tokens], dtype=torch.int32)
            table = torch.arange(n, dtype=torch.int32)[None]
            self._calls.append((starts, lengths, table, schedule(starts, lengths)))

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float) -> None:
        """Write the rows' attention in one layer.

        Args:
            query, output: [tokens, heads, head_dim], of all rows of the step.
        """
        keys, values = self._memory.staging.as_kernel()
        for row, table, call in zip(self._rows, self._tables, self._calls, strict=True):
            assert isinstance(row.held, CpuOffloadedRequest)
            row.held.stage(layer, table)
            mine, found = query[row.tokens], output[row.tokens]
            self._kernel(mine, keys, values, found, *call, scale)
