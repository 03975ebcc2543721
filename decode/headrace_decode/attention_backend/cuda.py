"""vLLM's Triton attention with blocks of a page, whose chosen decode rows attend to chosen pages.

The scheduler's block is a page, too. A step without sparse rows is computed by vLLM alone. In other
steps, vLLM's dense kernel computes the dense rows. Sparse rows are in its batch with a length of
one token, which costs nothing, and their results are overwritten. The kernel derives no size from a
row's length, so the results of dense rows are bit-identical.

`cuda_runtime` registers the backend as `CUSTOM`, only in engines whose configuration has sparse
attention.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from headrace_decode.attention_backend.runtime import RUNTIME
from headrace_decode.sparse.engine.cuda_step import CudaLayer, CudaStep, DuePages
from headrace_engine.vllm.attention.cuda import (
    AttentionCGSupport,
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from headrace_engine.vllm.attention.layers import CommonAttentionMetadata
from headrace_engine.vllm.attention.paged_kernels import triton_attention


@dataclass
class SparseMetadata(TritonAttentionMetadata):
    """vLLM's metadata of a step, with the step's sparse rows.

    Attributes:
        sparse: the step's sparse rows and due summaries; None if there are none.
        vllms: whether the step has other rows.
    """

    sparse: CudaStep | None = None
    vllms: bool = True


class SparseBackend(TritonAttentionBackend):
    """Backend with sparse rows.

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
    """Finds a step's sparse rows, once for all layers.

    The sparse rows change from step to step. Attention therefore stays outside of CUDA graphs, and
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
        step = None if fast_build else _step(common)
        if step is None:
            return super().build(common_prefix_len, common, fast_build)
        lengths = step.lengths_of_others(common.seq_lens)
        dense = super().build(common_prefix_len, replace(common, seq_lens=lengths), fast_build)
        plain = {each.name: getattr(dense, each.name) for each in fields(dense)}
        return SparseMetadata(**plain, sparse=step, vllms=step.count < common.num_reqs)


def _step(common: CommonAttentionMetadata) -> CudaStep | None:
    """Return a step's work for sparse rows; None if there is none."""
    # Exact, since `unsupported_cuda_engine` refuses the settings under which it is only a bound.
    lengths = common.seq_lens_cpu_upper_bound
    if lengths is None:
        return None
    due, starts = DuePages(), common.query_start_loc_cpu.numpy()
    plans = RUNTIME.sparse_rows(common.num_reqs, starts, lengths.numpy(), due.refresh)
    if not plans and not due.rows:
        return None
    return CudaStep(plans, due, starts, common.block_table_tensor, triton_attention)


class SparseImpl(TritonAttentionImpl):
    """Attention of one layer.

    Attributes:
        sparse: cache and summaries that sparse rows attend over; None until the cache exists.
    """

    sparse: CudaLayer | None = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False, since sparse rows are written in the model's own dtype."""
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
        """Compute attention like vLLM, then the sparse rows."""
        ours = attn_metadata if isinstance(attn_metadata, SparseMetadata) else None
        if ours is None or ours.vllms:
            super().forward(
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                *(output_scale, output_block_scale),
            )
        if ours is not None and ours.sparse is not None:
            assert self.sparse is not None
            ours.sparse.attend(self.sparse, query, output, self.scale)
        return output
