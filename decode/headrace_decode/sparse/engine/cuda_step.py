"""A step's sparse rows on a device, and the pages whose summaries it makes.

The host decides by counts which rows are sparse (`sparse_rows`). Block tables stay on the device.
Only a few numbers for each row are copied there, once a step. Nothing is read back.

Triton compiles a kernel again for numbers and addresses that are not multiples of 16. Sizes and
places are therefore padded to multiples of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.device_copy import copy_to_device, padded
from headrace_decode.sparse.engine.sparse_rows import RowPlan
from headrace_decode.sparse.kernels.attention import DecodeRows, Kernel, attend
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.kernels.summaries import DeviceSummaries

ROWS_AT_ONCE = 64
"""Maximum rows that are computed together. It bounds the memory of scores and of parts of
attention."""


@dataclass(frozen=True)
class CudaLayer:
    """Summaries and cache that one layer attends over, and the index of the layer."""

    summaries: DeviceSummaries
    cache: HeadCache
    number: int


class DuePages:
    """Pages whose summaries a step brings up to date."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.pages: list[int] = []

    def refresh(self, row: int, first: int, last: int, budget: int) -> tuple[int, int]:
        """Add pages, as a `RefreshSummaries`. A page costs 1, for all layers together."""
        last = min(last, first + budget)
        self.rows += [row] * (last - first)
        self.pages += range(first, last)
        return last - first, last - first


class CudaStep:
    """A step's sparse rows and due summaries, for all layers.

    Args:
        plans, due: the step's sparse rows, and pages to summarise.
        starts: int [rows + 1], first token of each row, on the host.
        table: int32 [rows, most pages], blocks of each row, on the device.
        kernel: a `Kernel`.

    Attributes:
        count: number of sparse rows.
    """

    def __init__(
        self,
        plans: Sequence[RowPlan],
        due: DuePages,
        starts: NDArray[np.integer],
        table: Tensor,
        kernel: Kernel,
    ) -> None:
        self.count, self._kernel = len(plans), kernel
        at = copy_to_device(np.array([due.rows, due.pages], np.int64), table.device)
        self._due = table[at[0], at[1]].long()
        self._parts = [
            _part(plans[first : first + ROWS_AT_ONCE], starts, table)
            for first in range(0, len(plans), ROWS_AT_ONCE)
        ]

    def refresh(self, layer: CudaLayer) -> None:
        """Make summaries in one layer."""
        layer.summaries.refresh(layer.cache, self._due)

    def attend(self, layer: CudaLayer, query: Tensor, output: Tensor, scale: float) -> None:
        """Write the sparse rows' attention in one layer, when its summaries are made.

        Args:
            query, output: [tokens, heads, head_dim], of all rows of the step.
            scale: scale of the logits.
        """
        for tokens, rows in self._parts:
            mine = query.index_select(0, tokens)
            found = attend(layer.summaries, layer.cache, mine, rows, scale, self._kernel)
            output.index_copy_(0, tokens, found)


def _part(
    plans: Sequence[RowPlan], starts: NDArray[np.integer], table: Tensor
) -> tuple[Tensor, DecodeRows]:
    """Return the indices of the rows' tokens among the step's, and the rows."""
    numbers = np.zeros((5, ROWS_AT_ONCE), np.int32)
    numbers[:, : len(plans)] = np.array(
        [(plan.row, starts[plan.row], plan.full, plan.fill, plan.chosen) for plan in plans]
    ).T
    row, token, full, fill, chosen = copy_to_device(numbers, table.device)[:, : len(plans)]
    width = min(padded(max(plan.full for plan in plans)), table.shape[1])
    rows = DecodeRows(
        pages=table[:, :width].index_select(0, row),
        counts=full,
        chosen=chosen,
        newest=table[row.long(), full.long()],
        fill=fill,
        most=padded(max(plan.chosen for plan in plans)),
    )
    return token.long(), rows
