"""Attention of offloaded rows on a device; `offloaded_requests` says which rows these are.

Copies run beside the computation:

    sparse rows    pages are scored, chosen and fetched in a side stream while vLLM and others
                   compute the rows whose KV is in the cache, and the staged ones
    staged rows    pages of the next row or layer are copied into one buffer while the pages in the
                   other are attended to, and while the model's other layers run
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.device_copy import copy_to_device, padded
from headrace_decode.attention.offload.footprint import SLOTS
from headrace_decode.sparse.engine.cuda_step import ROWS_AT_ONCE, CudaLayer
from headrace_decode.sparse.kernels.attention import DecodeRows, Kernel, attend_to
from headrace_decode.sparse.kernels.page_selection import positions
from headrace_decode.sparse.kernels.residency import OffloadedPages, copy_pages, place_pages
from headrace_decode.sparse.offload.device_memory import DeviceTieredMemory
from headrace_decode.sparse.offload.offloaded_requests import OffloadedPlan, StagedPlan


@dataclass(frozen=True)
class _Part:
    """Rows that are computed together.

    Attributes:
        tokens: int64, their tokens among the step's.
        rows: the rows; `pages` are indices of summaries.
        pages: where their pages lie.
    """

    tokens: Tensor
    rows: DecodeRows
    pages: OffloadedPages


class OffloadedStep:
    """A step's sparse rows of offloaded requests, for all layers.

    Args:
        rows: at least one.
        starts, table, kernel: as for `CudaStep`; blocks of pages that left the cache are stale.
    """

    def __init__(
        self,
        rows: Sequence[OffloadedPlan],
        memory: DeviceTieredMemory,
        starts: NDArray[np.integer],
        table: Tensor,
        kernel: Kernel,
    ) -> None:
        self._memory, self._kernel = memory, kernel
        memory.step += 1
        self._step = memory.step
        self._parts = [
            _part(rows[first : first + ROWS_AT_ONCE], memory, starts, table)
            for first in range(0, len(rows), ROWS_AT_ONCE)
        ]
        self._tables: list[Tensor] = []

    def fetch(self, layer: CudaLayer, query: Tensor, scale: float) -> None:
        """Begin to choose the rows' pages in one layer, and to bring them into the cache.

        Args:
            query: [tokens, heads, head_dim], of all rows of the step.
            scale: scale of the logits.
        """
        memory, number = self._memory, layer.number
        with memory.fetching.fork():
            self._tables = []
            for part in self._parts:
                rows = part.rows
                chosen = positions(
                    *(layer.summaries, query.index_select(0, part.tokens)),
                    *(rows.pages, rows.counts, rows.chosen, scale, rows.most),
                )
                table = place_pages(
                    memory.residency[number],
                    part.pages,
                    *(chosen, rows.chosen, rows.newest),
                    *(memory.host_pages.layer(number), memory.cache_pages.layer(number)),
                    memory.layout,
                    *(layer.cache.heads_apart, self._step),
                )
                self._tables.append(table)

    def attend(self, layer: CudaLayer, query: Tensor, output: Tensor, scale: float) -> None:
        """Write the rows' attention in one layer, when `fetch` is done; arguments as for
        `CudaStep.attend`."""
        self._memory.fetching.join()
        for part, table in zip(self._parts, self._tables, strict=True):
            mine = query.index_select(0, part.tokens)
            found = attend_to(table, layer.cache, mine, part.rows, scale, self._kernel)
            output.index_copy_(0, part.tokens, found)


def _part(
    plans: Sequence[OffloadedPlan],
    memory: DeviceTieredMemory,
    starts: NDArray[np.integer],
    table: Tensor,
) -> _Part:
    width = min(padded(max(each.plan.full for each in plans)), table.shape[1])
    numbers = np.zeros((7, ROWS_AT_ONCE), np.int32)
    host = np.full((len(plans), padded(width)), -1, np.int32)
    slots = np.zeros((len(plans), padded(max(len(each.held.slots) for each in plans))), np.int32)
    for number, (plan, held) in enumerate((each.plan, each.held) for each in plans):
        token, known = starts[plan.row], min(held.copied, width)
        counts = plan.full, plan.fill, plan.chosen
        numbers[:, number] = plan.row, token, *counts, held.gone, len(held.slots)
        host[number, :known] = held.pages[:known]
        slots[number, : len(held.slots)] = held.slots
    device = table.device
    row, token, full, fill, chosen, gone, slot_counts = copy_to_device(numbers, device)[
        :, : len(plans)
    ]
    host_pages, blocks = copy_to_device(host, device), table[:, :width].index_select(0, row)
    here = host_pages[:, :width]
    rows = DecodeRows(
        pages=torch.where(here >= 0, here + memory.first_host, blocks),
        counts=full,
        chosen=chosen,
        newest=table[row.long(), full.long()],
        fill=fill,
        most=padded(max(each.plan.chosen for each in plans)),
    )
    pages = OffloadedPages(blocks, host_pages, gone, copy_to_device(slots, device), slot_counts)
    return _Part(token.long(), rows, pages)


class StagedStep:
    """A step's staged rows, which are computed one after another.

    Args:
        rows: at least one.
        table: int32 [rows, most pages], blocks of the batch's rows, on the device.
        metadata: vLLM's metadata of each row alone, over a buffer.
    """

    def __init__(
        self,
        rows: Sequence[StagedPlan],
        memory: DeviceTieredMemory,
        table: Tensor,
        metadata: Sequence[Any],
    ) -> None:
        self._rows, self._memory, self._metadata = rows, memory, metadata
        self._host: list[tuple[Tensor, Tensor]] = []
        self._own: list[tuple[Tensor, Tensor]] = []
        order = memory.order[0].long()
        for row in rows:
            gone, n = row.held.gone, -(-row.kv_tokens // memory.page_tokens)
            pages = copy_to_device(row.held.pages[:gone], table.device)
            self._host.append((pages, order[:gone]))
            self._own.append((table[row.row, gone:n].long(), order[gone:n]))
        self._filled = -1
        """Number of the last buffer that is being filled: of row r in layer l,
        `l * rows + r`."""

    def attend(self, layer: int, compute: Callable[[slice, Tensor, Any], None]) -> None:
        """Have the rows' attention in one layer computed.

        Args:
            compute: (tokens, cache, metadata): writes the attention of a row to a cache.
        """
        memory, count = self._memory, len(self._rows)
        for number, row in enumerate(self._rows):
            at = layer * count + number
            if self._filled != at:
                self._fill(at)
            memory.staging.join()
            buffer = at % len(memory.buffers)
            from_, to = self._own[number]
            cache = memory.cache_pages.layer(layer)
            copy_pages(cache, from_, memory.buffer_pages[buffer], to, memory.layout)
            if at + 1 < count * memory.layer_count:
                self._fill(at + 1)
            compute(row.tokens, memory.buffers[buffer], self._metadata[number])

    def _fill(self, at: int) -> None:
        """Begin to copy the pages of host memory of one row and layer into its buffer."""
        memory, (layer, number) = self._memory, divmod(at, len(self._rows))
        from_, to = self._host[number]
        buffer = memory.buffer_pages[at % len(memory.buffers)]
        with memory.staging.fork():
            copy_pages(memory.host_pages.layer(layer), from_, buffer, to, memory.layout)
        self._filled = at


def warm(memory: DeviceTieredMemory, most: int) -> None:
    """Run the kernels that place and copy pages with each size that a row may have.

    Args:
        most: maximum places of a row's table.
    """
    device, heads = memory.order.device, memory.layout.kv_heads
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    places, slots = 16, padded(math.ceil(SLOTS * most))
    while True:
        places = min(places, slots)
        wide = torch.zeros((1, places), dtype=torch.int32, device=device)
        place_pages(
            memory.residency[0],
            OffloadedPages(wide, wide, zeros, wide, zeros),
            *(wide[:, None].expand(1, heads, places).contiguous(), zeros + 1, zeros),
            *(memory.host_pages.layer(0), memory.cache_pages.layer(0)),
            memory.layout,
            *(memory.caches[0].heads_apart, 0),
        )
        if places == slots:
            break
        places *= 2
    first, last = memory.order[0, :1].long(), memory.buffer_pages
    copy_pages(memory.cache_pages.layer(0), first, last[0], first, memory.layout)
