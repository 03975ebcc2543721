"""vLLM's Triton attention with blocks of a page, for sparse, offloaded and compressed rows.

Chosen decode rows attend to chosen pages, rows of offloaded requests also to pages of host memory,
and rows whose context has dropped KV to what each KV head keeps. The scheduler's block is a page,
too. A step without such rows is computed by vLLM alone. In other steps, vLLM's dense kernel
computes the dense rows. The others are in its batch with the length of their own tokens, which
costs little, and their results are overwritten. The kernel derives no size from a row's length, so
the results of dense rows are bit-identical.

`cuda_runtime` registers the backend as `CUSTOM`, only in engines whose configuration has sparse
attention or compression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from headrace_decode.attention.device_copy import copy_to_device
from headrace_decode.attention_backend.runtime import RUNTIME
from headrace_decode.compression.engine.compressed_attention import CompressedRow, CompressedStep
from headrace_decode.compression.engine.context_scorer import ScoringRow
from headrace_decode.compression.engine.incremental import IncrementalRow
from headrace_decode.sparse.engine.cuda_step import CudaLayer, CudaStep, DuePages
from headrace_decode.sparse.engine.sparse_rows import RowPlan
from headrace_decode.sparse.offload.device_memory import DeviceTieredMemory
from headrace_decode.sparse.offload.device_rows import OffloadedStep, StagedStep
from headrace_decode.sparse.offload.offloaded_requests import OffloadedPlan, StagedPlan
from headrace_engine.vllm.attention.cuda import (
    AttentionCGSupport,
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from headrace_engine.vllm.attention.layers import CommonAttentionMetadata
from headrace_engine.vllm.attention.paged_kernels import (
    triton_attention,
    triton_causal_attention,
)


@dataclass
class SparseMetadata(TritonAttentionMetadata):
    """vLLM's metadata of a step, with the step's rows that attend in another way.

    Attributes:
        sparse: the step's sparse rows and due summaries; None if there are none.
        offloaded, staged: rows of offloaded requests; None if there are none.
        dropped: rows whose contexts have dropped KV; None if there are none.
        read: rows whose queries score a context's keys, among all rows.
        vllms: whether the step has other rows.
    """

    sparse: CudaStep | None = None
    offloaded: OffloadedStep | None = None
    staged: StagedStep | None = None
    dropped: CompressedStep | None = None
    read: Sequence[ScoringRow | IncrementalRow] = ()
    vllms: bool = True


class SparseBackend(TritonAttentionBackend):
    """Backend with sparse, offloaded and compressed rows.

    Its name is its key in vLLM's registry, and part of connectors' handshake.
    """

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [RUNTIME.page_tokens]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size == RUNTIME.page_tokens

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseBuilder]:
        return SparseBuilder


@dataclass(frozen=True)
class StepRows:
    """A step's rows that vLLM does not compute, or whose queries are recorded.

    Attributes:
        plans, due: sparse rows, and pages whose summaries are made.
        offloaded, staged: rows of offloaded requests.
        dropped, read: as for `SparseMetadata`.
    """

    plans: Sequence[RowPlan]
    due: DuePages
    offloaded: Sequence[OffloadedPlan]
    staged: Sequence[StagedPlan]
    dropped: Sequence[CompressedRow]
    read: Sequence[ScoringRow | IncrementalRow]

    @classmethod
    def of(cls, common: CommonAttentionMetadata) -> StepRows:
        """Select them among a step's rows."""
        # Exact, since `unsupported_cuda_engine` refuses settings under which it is only a bound.
        # Without it, rows would attend to KV that their requests do not have any more.
        known = common.seq_lens_cpu_upper_bound
        assert known is not None
        due, step = DuePages(), (common.num_reqs, _starts(common), known.numpy())
        offloaded, staged = RUNTIME.offloaded_rows(*step, due.refresh)
        dropped, read = RUNTIME.compressed_rows(*step)
        plans = RUNTIME.sparse_rows(*step, due.refresh)
        return cls(plans, due, offloaded, staged, dropped, read)

    @property
    def numbers(self) -> list[int]:
        """Indices of the rows that vLLM does not compute."""
        return [
            *(each.row for each in self.plans),
            *(each.plan.row for each in self.offloaded),
            *(each.row for each in self.staged),
            *(each.row for each in self.dropped),
        ]

    def __bool__(self) -> bool:
        """Whether the step is not vLLM's alone."""
        return bool(self.numbers or self.due.rows or self.read)


class SparseBuilder(TritonAttentionMetadataBuilder):
    """Finds a step's sparse, offloaded and compressed rows, once for all layers.

    These rows change from step to step. Attention therefore stays outside of CUDA graphs, and
    vLLM records the pieces of the model in between.
    """

    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        """Build a step's metadata like vLLM. With `fast_build` (metadata that drafters make for
        their rows) it is dense."""
        common = common_attn_metadata
        if fast_build or not RUNTIME.in_step or not (rows := StepRows.of(common)):
            return super().build(common_prefix_len, common, fast_build)
        ours = rows.numbers
        of_vllm = replace(common, seq_lens=_lengths_without(ours, common))
        dense = super().build(common_prefix_len, of_vllm, fast_build)
        plain = {each.name: getattr(dense, each.name) for each in fields(dense)}
        made = SparseMetadata(**plain, read=rows.read, vllms=len(ours) < common.num_reqs)
        starts, table = _starts(common), common.block_table_tensor
        if rows.plans or rows.due.rows:
            made.sparse = CudaStep(rows.plans, rows.due, starts, table, triton_attention)
        if rows.offloaded:
            given = rows.offloaded, _memory(), starts, table
            made.offloaded = OffloadedStep(*given, triton_attention)
        if rows.staged:
            alone = [self._alone(each, common) for each in rows.staged]
            made.staged = StagedStep(rows.staged, _memory(), table, alone)
        if rows.dropped:
            assert RUNTIME.compression is not None
            head_pages = RUNTIME.compression.head_pages
            made.dropped = CompressedStep(rows.dropped, table, head_pages, triton_causal_attention)
        return made

    def _alone(self, row: StagedPlan, common: CommonAttentionMetadata) -> TritonAttentionMetadata:
        """Return vLLM's metadata of one row whose pages lie in order."""
        count, ranges = row.tokens.stop - row.tokens.start, common.mm_req_doc_ranges
        begins = copy_to_device(np.array([0, count], np.int32), common.seq_lens.device)
        one = replace(
            common,
            query_start_loc=begins,
            seq_lens=common.seq_lens[row.row : row.row + 1],
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=row.kv_tokens,
            block_table_tensor=_memory().order,
            mm_req_doc_ranges=None if ranges is None else {0: ranges.get(row.row, [])},
        )
        return super().build(0, one)


def _starts(common: CommonAttentionMetadata) -> np.ndarray[Any, Any]:
    """Return the first token of each row, on the host: int32 [rows + 1]."""
    starts: np.ndarray[Any, Any] = common.query_start_loc_cpu.numpy()
    return starts


def _memory() -> DeviceTieredMemory:
    """Return the memory of offloaded requests."""
    assert RUNTIME.offloading is not None
    memory = RUNTIME.offloading.memory
    assert isinstance(memory, DeviceTieredMemory)
    return memory


def _lengths_without(rows: Sequence[int], common: CommonAttentionMetadata) -> Tensor:
    """Return each row's tokens of KV for the dense kernel: int32 [rows]. Rows that it need not
    compute have those of the step alone, so that they cost little."""
    lengths, starts = common.seq_lens, _starts(common)
    if not rows:
        return lengths
    numbers = np.array([(row, starts[row + 1] - starts[row]) for row in rows], np.int32).T
    at, own = copy_to_device(np.ascontiguousarray(numbers), lengths.device)
    return lengths.index_copy(0, at.long(), own.to(lengths.dtype))


class SparseImpl(TritonAttentionImpl):
    """Attention of one layer.

    Attributes:
        sparse: cache and summaries that sparse rows attend over; None until the cache exists, and
            in engines without sparse rows.
        number: index of the layer.
    """

    sparse: CudaLayer | None = None
    number: int = 0

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False, since our rows are written in the model's own dtype."""
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute attention like vLLM, and the rows that attend in another way."""
        ours = attn_metadata if isinstance(attn_metadata, SparseMetadata) else None
        if ours is not None:
            self._begin(ours, query)
        if ours is None or ours.vllms:
            super().forward(
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                *(output_scale, output_block_scale),
            )
        if ours is None:
            return output
        if ours.staged is not None:
            assert self.sparse is not None

            def compute(tokens: slice, cache: Tensor, metadata: Any) -> None:
                given = query[tokens], key[tokens], value[tokens], cache, metadata, output[tokens]
                super(SparseImpl, self).forward(layer, *given, output_scale, output_block_scale)

            ours.staged.attend(self.sparse.number, compute)
        self._finish(ours, query, output)
        return output

    def _begin(self, ours: SparseMetadata, query: Tensor) -> None:
        """Make summaries, and begin to bring chosen pages into the cache."""
        if ours.sparse is not None:
            assert self.sparse is not None
            ours.sparse.refresh(self.sparse)
        if ours.offloaded is not None:
            assert self.sparse is not None
            ours.offloaded.fetch(self.sparse, query, self.scale)

    def _finish(self, ours: SparseMetadata, query: Tensor, output: Tensor) -> None:
        """Write our rows' attention over the cache, and record queries."""
        for step in (ours.sparse, ours.offloaded):
            if step is not None:
                assert self.sparse is not None
                step.attend(self.sparse, query, output, self.scale)
        if ours.dropped is not None:
            ours.dropped.attend(self.number, query, output, self.scale)
        if ours.read:
            assert RUNTIME.compression is not None
            RUNTIME.compression.record_queries(ours.read, self.number, query)
