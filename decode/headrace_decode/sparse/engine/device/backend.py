"""vLLM's Triton attention with blocks of a unit, whose chosen decode rows attend to chosen units.

The scheduler's block is a unit, too. In a step without sparse rows all is vLLM's own. In a step
with some, the dense kernel computes the others: sparse rows stand in it with a length of one token,
which costs nothing, and are written over. The kernel takes no size from a row's length, so the
others' results are the same to the bit.

Registered as `CUSTOM` by `card`, in engines whose configuration has sparse attention only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from headrace_decode.sparse.engine.bound import BOUND
from headrace_decode.sparse.engine.device._vllm_compat import (
    AttentionCGSupport,
    CommonAttentionMetadata,
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from headrace_decode.sparse.engine.device.step import DeviceLayer, DeviceStep, Due
from headrace_decode.sparse.kernels._vllm_compat import triton_attention


@dataclass
class SparseMetadata(TritonAttentionMetadata):
    """vLLM's of a step, with the step's sparse rows.

    Attributes:
        sparse: None where nothing is to be done.
        vllms: whether the step has other rows.
    """

    sparse: DeviceStep | None = None
    vllms: bool = True


class SparseBackend(TritonAttentionBackend):
    """Its name is its place in vLLM's registry, and goes into connectors' handshake."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [BOUND.unit_tokens]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size == BOUND.unit_tokens

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseBuilder]:
        return SparseBuilder


class SparseBuilder(TritonAttentionMetadataBuilder):
    """Finds a step's sparse rows, once for all layers.

    Which rows are sparse changes from step to step, so attention stays outside of CUDA graphs, and
    vLLM records the pieces of the model between.
    """

    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TritonAttentionMetadata:
        """As vLLM's. Metadata that others make for rows of their own (`fast_build`) is dense."""
        common = common_attn_metadata
        step = None if fast_build else _step(common)
        if step is None:
            return super().build(common_prefix_len, common, fast_build)
        lengths = step.lengths_of_others(common.seq_lens)
        dense = super().build(common_prefix_len, replace(common, seq_lens=lengths), fast_build)
        told = {each.name: getattr(dense, each.name) for each in fields(dense)}
        return SparseMetadata(**told, sparse=step, vllms=step.count < common.num_reqs)


def _step(common: CommonAttentionMetadata) -> DeviceStep | None:
    """What a step has to do for sparse rows; None if nothing."""
    lengths = common.seq_lens_cpu_upper_bound  # exact: `why_dense` refuses what makes it a bound
    if lengths is None:
        return None
    due, starts = Due(), common.query_start_loc_cpu.numpy()
    plans = BOUND.sparse_rows(common.num_reqs, starts, lengths.numpy(), due.bring_up)
    if not plans and not due.rows:
        return None
    return DeviceStep(plans, due, starts, common.block_table_tensor, triton_attention)


class SparseImpl(TritonAttentionImpl):
    """Of one layer.

    Attributes:
        sparse: what sparse rows attend over; None until the cache is there.
    """

    sparse: DeviceLayer | None = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: sparse rows are written in the model's own numbers."""
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
        """As vLLM's."""
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
