"""vLLM's CPU attention with blocks of a page, whose chosen decode rows attend to chosen pages.

The kernel's block is a page. The scheduler's block is larger (128), and vLLM splits it. To choose
pages is therefore to rewrite block tables. A step without sparse rows is computed by vLLM alone. In
other steps, vLLM's dense kernel computes the dense rows. Sparse rows are in its batch with a length
of one token, which costs nothing, and their results are overwritten.

`worker` registers the backend in place of `CPU_ATTN`, only in engines whose configuration has
sparse attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from headrace_decode.attention_backend.runtime import RUNTIME
from headrace_decode.compression.engine.compressed_attention import CompressedStep
from headrace_decode.compression.engine.context_scorer import ScoringRow
from headrace_decode.compression.engine.incremental import IncrementalRow
from headrace_decode.sparse.engine.attention import SelectingRow, SparseLayer, SparseRow, SparseStep
from headrace_decode.sparse.offload.cpu_memory import CpuTieredMemory
from headrace_decode.sparse.offload.cpu_rows import OffloadedRow, StagedStep
from headrace_decode.sparse.offload.offloaded_requests import StagedPlan
from headrace_engine.vllm.attention.cpu import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    attention,
    schedule,
)
from headrace_engine.vllm.attention.layers import CommonAttentionMetadata


@dataclass
class SparseMetadata(CPUAttentionMetadata):
    """vLLM's metadata of a step, with the step's sparse rows.

    Attributes:
        sparse, staged, dropped: rows that attend in this way; None if there are none.
        read: rows whose queries score a context's keys, among the rows that vLLM computes.
        vllms: whether vLLM computes any rows of the step.
    """

    sparse: SparseStep | None = None
    staged: StagedStep | None = None
    dropped: CompressedStep | None = None
    read: Sequence[ScoringRow | IncrementalRow] = ()
    vllms: bool = True


class SparseBackend(CPUAttentionBackend):
    """Backend with sparse rows.

    It keeps the name of vLLM's backend, which its registry and its connectors' handshake use.
    """

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [RUNTIME.page_tokens]

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseBuilder]:
        return SparseBuilder


class SparseBuilder(CPUAttentionMetadataBuilder):
    """Finds a step's sparse rows, once for all layers."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Build a step's metadata like vLLM. With `fast_build` (metadata that drafters make for
        their rows) it is dense."""
        common = common_attn_metadata
        if fast_build:
            return super().build(common_prefix_len, common, fast_build)
        step = _step_arrays(common)
        rows, staged = self._rows(*step)
        dropped, read = RUNTIME.compressed_rows(*step[:3])
        ours = [
            *(each.row for each in rows),
            *(each.row for each in staged),
            *(each.row for each in dropped),
        ]
        if not ours and not read:
            return super().build(common_prefix_len, common, fast_build)
        lengths, starts = common.seq_lens.clone(), common.query_start_loc
        for row in ours:
            lengths[row] = starts[row + 1] - starts[row]
        dense = super().build(common_prefix_len, replace(common, seq_lens=lengths), fast_build)
        plain = {each.name: getattr(dense, each.name) for each in fields(dense)}
        group = self.num_heads // self.num_kv_heads
        facts = {"group": group, "head_dim": self.head_dim, "dtype": self.dtype, "isa": self.isa}
        made = SparseMetadata(**plain, read=read, vllms=len(ours) < common.num_reqs)
        if rows:
            made.sparse = SparseStep(
                rows,
                tokens=starts.numpy()[[row.row for row in rows]],
                kv_heads=self.num_kv_heads,
                page_tokens=self.block_size,
                schedule=partial(schedule, kv_heads=1, **facts),
                kernel=attention,
            )
        if staged:
            assert RUNTIME.offloading is not None
            memory = RUNTIME.offloading.memory
            assert isinstance(memory, CpuTieredMemory)
            call = partial(schedule, kv_heads=self.num_kv_heads, **facts)
            made.staged = StagedStep(staged, memory, step[-1], call, attention)
        if dropped:
            assert RUNTIME.compression is not None
            call = partial(scheduled_attention, partial(schedule, kv_heads=1, **facts))
            tables, head_pages = common.block_table_tensor, RUNTIME.compression.head_pages
            made.dropped = CompressedStep(dropped, tables, head_pages, call)
        return made

    def _rows(
        self, count: int, starts: Any, lengths: Any, tables: Any
    ) -> tuple[list[SelectingRow], list[StagedPlan]]:
        """Return the sparse and the staged rows.

        Args:
            count, starts, lengths: as for `AttentionRuntime.sparse_rows`.
            tables: int [rows, most pages], blocks of the kernel.
        """

        def refresh(row: int, first: int, last: int, budget: int) -> tuple[int, int]:
            assert RUNTIME.summary_table is not None
            return RUNTIME.summary_table.refresh(tables[row, first:last].astype(np.int64), budget)

        sparse, staged = RUNTIME.offloaded_rows(count, starts, lengths, refresh)
        plans = RUNTIME.sparse_rows(count, starts, lengths, refresh)
        rows: list[SelectingRow] = [
            *(SparseRow.of(plan, tables[plan.row]) for plan in plans),
            *(OffloadedRow.of(each, tables[each.plan.row]) for each in sparse),
        ]
        return sorted(rows, key=lambda each: each.row), staged


def scheduled_attention(
    make_schedule: Callable[[Tensor, Tensor], Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    most_queries: int,
    longest: int,
    scale: float,
) -> None:
    """Run the kernel of CPUs as a `compressed_attention.Kernel`."""
    scheduled = make_schedule(starts, lengths)
    attention(query, keys, values, output, starts, lengths, table, scheduled, scale)


def _step_arrays(common: CommonAttentionMetadata) -> tuple[int, Any, Any, Any]:
    """Return the number of rows, their starts, KV and blocks, as
    `AttentionRuntime.compressed_rows` takes them."""
    starts, lengths = common.query_start_loc.numpy(), common.seq_lens.numpy()
    return common.num_reqs, starts, lengths, common.block_table_tensor.numpy()


class SparseImpl(CPUAttentionBackendImpl):
    """Attention of one layer.

    Attributes:
        sparse: keys and summaries that sparse rows attend over; None until the cache exists.
    """

    sparse: SparseLayer | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute attention like vLLM, then the rows that attend in another way."""
        ours = attn_metadata if isinstance(attn_metadata, SparseMetadata) else None
        if ours is None or ours.vllms:
            super().forward(
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                *(output_scale, output_block_scale),
            )
        if ours is not None:
            assert self.sparse is not None
            if ours.staged is not None:
                ours.staged.attend(self.sparse.number, query, output, self.scale)
            if ours.sparse is not None:
                ours.sparse.attend(self.sparse, query, output, self.scale)
            if ours.dropped is not None:
                ours.dropped.attend(self.sparse.number, query, output, self.scale)
            if ours.read:
                assert RUNTIME.compression is not None
                RUNTIME.compression.record_queries(ours.read, self.sparse.number, query)
        return output
