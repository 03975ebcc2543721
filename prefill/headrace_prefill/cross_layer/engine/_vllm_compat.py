"""The fusion models' uses of vLLM beyond its documented API; an upgrade breaks this file first.

`tests/unit/test_contracts_fusion.py` checks each of these uses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import KVSharingFastPrefillMetadata

from headrace_prefill.cross_layer.engine.renumber import renumbered

__all__ = [
    "Attention",
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadata",
    "MixedMetadata",
    "MixedMetadataBuilder",
    "attend",
    "halves",
    "on_cpu",
    "on_gpu",
    "packed",
    "rows_with_logits",
]


def on_cpu() -> bool:
    """Return whether this engine computes on the CPU."""
    return bool(current_platform.is_cpu())


def on_gpu() -> bool:
    """Return whether this engine computes on a GPU for which vLLM has its Triton attention."""
    return bool(current_platform.is_cuda_alike())


def rows_with_logits(layer_name: str) -> Tensor | None:
    """Return the rows of this step's batch whose logits are needed, int64 [r].

    Return None if all rows must run: the engine was not started with `kv_sharing_fast_prefill`, the
    layer has a KV cache of its own, or this is a dummy run, such as one that records a CUDA graph.
    """
    by_layer = get_forward_context().attn_metadata
    if not isinstance(by_layer, dict):
        return None
    metadata = by_layer.get(layer_name)
    if not isinstance(metadata, KVSharingFastPrefillMetadata):
        return None
    rows = metadata.logits_indices_padded
    return None if rows is None else rows[: metadata.num_logits_indices].long()


def halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of a layer's cache [blocks, kv_heads, block, 2 * D], as the kernel takes them.

    Each is [blocks, kv_heads, block, D], without a copy. K's order inside a block is the kernel's
    own."""
    blocks, heads, tokens, _ = kv_cache.shape
    keys, values = kv_cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    return keys, values


def packed(keys: Tensor, values: Tensor, kv_cache: Tensor, isa: str) -> Tensor:
    """Return one block in the kernel's order, all of whose tokens have these K and V.

    Args:
        keys, values: [kv_heads, D].
        kv_cache: gives the layout, [blocks, kv_heads, block, 2 * D].

    Returns:
        [kv_heads, block, 2 * D], in the cache's dtype.
    """
    _, heads, tokens, width = kv_cache.shape
    block = torch.empty(1, heads, tokens, width, dtype=kv_cache.dtype)
    key_cache, value_cache = halves(block)
    ops.cpu_attn_reshape_and_cache(
        keys.to(kv_cache.dtype).expand(tokens, -1, -1).contiguous(),
        values.to(kv_cache.dtype).expand(tokens, -1, -1).contiguous(),
        key_cache,
        value_cache,
        torch.arange(tokens),
        isa,
    )
    return block[0]


def attend(
    impl: CPUAttentionBackendImpl,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: CPUAttentionMetadata,
    output: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Run vLLM's CPU attention over K and V, which may be from two layers.

    Args:
        query, output: [rows, heads, D].
        keys, values: as `halves` returns them, of equal shapes and strides.
    """
    rows = metadata.num_actual_tokens
    ops.cpu_attention_with_kv_cache(
        query=query[:rows],
        key_cache=keys,
        value_cache=values,
        output=output[:rows],
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens,
        scale=impl.scale,
        causal=metadata.causal,
        alibi_slopes=impl.alibi_slopes,
        sliding_window=impl.sliding_window,
        block_table=metadata.block_table,
        softcap=impl.logits_soft_cap,
        scheduler_metadata=metadata.scheduler_metadata,
        s_aux=impl.sinks,
        dynamic_causal=metadata.dynamic_causal,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_dtype=impl.kv_cache_dtype,
    )
    return output


@dataclass
class MixedMetadata(CPUAttentionMetadata):
    """Metadata whose block table numbers the blocks of this batch, not those of the cache.

    Attributes:
        blocks: [n], each block's number in the cache.
    """

    blocks: NDArray[np.int64] | None = None


class MixedMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builder that numbers the blocks that a batch attends to from 0, each shared block once."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MixedMetadata:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        blocks, own = renumbered(found.block_table, found.seq_lens, self.block_size)
        taken: dict[str, Any] = {f.name: getattr(found, f.name) for f in fields(found)}
        return MixedMetadata(**{**taken, "block_table": own, "blocks": blocks.numpy()})
