"""vLLM's CPU attention with blocks of a unit, whose chosen decode rows attend to chosen units.

The kernel's block is a unit, while the scheduler's stays what it is (128): vLLM splits it. So
choosing units is rewriting block tables. In a step without sparse rows all is vLLM's own. In a step
with some, the dense kernel computes the others: sparse rows stand in it with a length of one token,
which costs nothing, and are written over.

Registered in place of `CPU_ATTN` by `worker`, in engines whose configuration has sparse attention
only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headrace_decode.sparse.engine._vllm_compat import (
    CommonAttentionMetadata,
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    attention,
    schedule,
)
from headrace_decode.sparse.engine.attention import SparseLayer, SparseStep
from headrace_decode.sparse.engine.bound import BOUND


@dataclass
class SparseMetadata(CPUAttentionMetadata):
    """vLLM's of a step, with the step's sparse rows."""

    sparse: SparseStep | None = None


class SparseBackend(CPUAttentionBackend):
    """Keeps vLLM's name, which names a place in its registry and its connectors' handshake."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [BOUND.unit_tokens]

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
        """As vLLM's. Metadata that others make for rows of their own (`fast_build`) is dense."""
        common = common_attn_metadata
        step = None if fast_build else self._sparse(common)
        if step is None:
            return super().build(common_prefix_len, common, fast_build)
        lengths = common.seq_lens.clone()
        lengths[torch.tensor([row.row for row in step.rows])] = 1
        dense = super().build(common_prefix_len, replace(common, seq_lens=lengths), fast_build)
        told = {each.name: getattr(dense, each.name) for each in fields(dense)}
        return SparseMetadata(**told, sparse=step)

    def _sparse(self, common: CommonAttentionMetadata) -> SparseStep | None:
        rows = BOUND.sparse_rows(
            common.num_reqs,
            common.query_start_loc.numpy(),
            common.seq_lens.numpy(),
            common.block_table_tensor.numpy(),
        )
        if not rows:
            return None
        group = self.num_heads // self.num_kv_heads
        facts = {"group": group, "head_dim": self.head_dim, "dtype": self.dtype, "isa": self.isa}
        return SparseStep(
            rows,
            tokens=common.query_start_loc.numpy()[[row.row for row in rows]],
            kv_heads=self.num_kv_heads,
            unit_tokens=self.block_size,
            schedule=partial(schedule, **facts),
            kernel=attention,
            dense=len(rows) < common.num_reqs,
        )


class SparseImpl(CPUAttentionBackendImpl):
    """Of one layer.

    Attributes:
        sparse: what sparse rows attend over; None until the cache is there.
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
        """As vLLM's."""
        step = getattr(attn_metadata, "sparse", None)
        if step is None or step.dense:
            super().forward(
                *(layer, query, key, value, kv_cache, attn_metadata, output),
                *(output_scale, output_block_scale),
            )
        if step is not None:
            assert self.sparse is not None
            step.attend(self.sparse, query, output, self.scale)
        return output
