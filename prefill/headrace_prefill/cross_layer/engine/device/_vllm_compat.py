"""The fusion models' uses of vLLM's GPU attention beyond its documented API; an upgrade breaks this
file first. `tests/unit/test_contracts_fusion.py` checks each of these uses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from headrace_prefill.cross_layer.engine.renumber import renumbered

__all__ = [
    "MixedMetadata",
    "MixedMetadataBuilder",
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadata",
    "attend",
]


def attend(
    impl: TritonAttentionImpl,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: TritonAttentionMetadata,
    output: Tensor,
) -> Tensor:
    """Run vLLM's Triton attention over K and V, which may be from two layers.

    Args:
        query, output: [rows, heads, D].
        keys, values: [blocks, block, kv_heads, D].
    """
    rows = metadata.num_actual_tokens
    unified_attention(
        q=query[:rows],
        k=keys,
        v=values,
        out=output[:rows],
        cu_seqlens_q=metadata.query_start_loc,
        max_seqlen_q=metadata.max_query_len,
        seqused_k=metadata.seq_lens,
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=impl.scale,
        causal=metadata.causal,
        window_size=impl.sliding_window,
        block_table=metadata.block_table,
        softcap=impl.logits_soft_cap,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=metadata.seq_threshold_3D,
        num_par_softmax_segments=metadata.num_par_softmax_segments,
        softmax_segm_output=metadata.softmax_segm_output,
        softmax_segm_max=metadata.softmax_segm_max,
        softmax_segm_expsum=metadata.softmax_segm_expsum,
    )
    return output


@dataclass
class MixedMetadata(TritonAttentionMetadata):
    """Metadata whose block table numbers the blocks of this batch, not those of the cache.

    Attributes:
        blocks: int64 [n], each block's number in the cache.
    """

    blocks: Tensor | None = None


class MixedMetadataBuilder(TritonAttentionMetadataBuilder):
    """Builder that numbers the blocks that a batch attends to. Their number changes from step to
    step, so attention stays outside of CUDA graphs."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MixedMetadata:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        blocks, own = renumbered(found.block_table, found.seq_lens, self.block_size)
        taken: dict[str, Any] = {f.name: getattr(found, f.name) for f in fields(found)}
        return MixedMetadata(**{**taken, "block_table": own, "blocks": blocks})
