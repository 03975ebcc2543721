"""vLLM's Triton attention with blocks of a page, for sparse and compressed rows.

Chosen decode rows attend to chosen pages, and rows whose context has dropped KV to what each KV
head keeps. The scheduler's block is a page, too. A step without such rows is computed by vLLM
alone. In other steps, vLLM's dense kernel computes the dense rows. The others are in its batch with
the length of their own tokens, which costs little, and their results are overwritten. The kernel
derives no size from a row's length, so the results of dense rows are bit-identical.

`cuda_runtime` registers the backend as `CUSTOM`, only in engines whose configuration has sparse
attention or compression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from headrace_decode.attention_backend.runtime import RUNTIME
from headrace_decode.compression.engine.compressed_attention import CompressedStep
from headrace_decode.compression.engine.context_scorer import ScoringRow
from headrace_decode.compression.engine.incremental import IncrementalRow
from headrace_decode.sparse.engine.cuda_step import CudaLayer, CudaStep, DuePages
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
    """vLLM's metadata of a step, with the step's sparse and compressed rows.

    Attributes:
        sparse: the step's sparse rows and due summaries; None if there are none.
        dropped: rows whose contexts have dropped KV; None if there are none.
        read: rows whose queries score a context's keys, among all rows.
        vllms: whether the step has other rows.
    """

    sparse: CudaStep | None = None
    dropped: CompressedStep | None = None
    read: Sequence[ScoringRow | IncrementalRow] = ()
    vllms: bool = True


class SparseBackend(TritonAttentionBackend):
    """Backend with sparse and compressed rows.

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


class SparseBuilder(TritonAttentionMetadataBuilder):
    """Finds a step's sparse and compressed rows, once for all layers.

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
        if fast_build or not RUNTIME.in_step:
            return super().build(common_prefix_len, common, fast_build)
        # Exact, since `unsupported_cuda_engine` refuses settings under which it is only a bound.
        # Without it, rows would attend to KV that their requests do not have any more.
        known = common.seq_lens_cpu_upper_bound
        assert known is not None
        starts, lengths, count = common.query_start_loc_cpu.numpy(), known.numpy(), common.num_reqs
        due, tables = DuePages(), common.block_table_tensor
        dropped, read = RUNTIME.compressed_rows(count, starts, lengths)
        plans = RUNTIME.sparse_rows(count, starts, lengths, due.refresh)
        if not (plans or due.rows or dropped or read):
            return super().build(common_prefix_len, common, fast_build)
        made: dict[str, Any] = {"read": read, "vllms": len(plans) + len(dropped) < count}
        of_others = common.seq_lens
        if plans or due.rows:
            made["sparse"] = step = CudaStep(plans, due, starts, tables, triton_attention)
            of_others = step.lengths_of_others(of_others)
        if dropped:
            assert RUNTIME.compression is not None
            head_pages = RUNTIME.compression.head_pages
            held = CompressedStep(dropped, tables, head_pages, triton_causal_attention)
            made["dropped"], of_others = held, held.lengths_of_others(of_others)
        dense = super().build(common_prefix_len, replace(common, seq_lens=of_others), fast_build)
        plain = {each.name: getattr(dense, each.name) for each in fields(dense)}
        return SparseMetadata(**plain, **made)


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
        """Compute attention like vLLM, then the sparse and the compressed rows."""
        ours = attn_metadata if isinstance(attn_metadata, SparseMetadata) else None
        if ours is None or ours.vllms:
            super().forward(
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                *(output_scale, output_block_scale),
            )
        if ours is None:
            return output
        if ours.sparse is not None:
            assert self.sparse is not None
            ours.sparse.attend(self.sparse, query, output, self.scale)
        if ours.dropped is not None:
            ours.dropped.attend(self.number, query, output, self.scale)
        if ours.read:
            assert RUNTIME.compression is not None
            RUNTIME.compression.record_queries(ours.read, self.number, query)
        return output
