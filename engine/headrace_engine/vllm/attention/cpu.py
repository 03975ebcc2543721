"""vLLM's attention on CPUs: its backend, its kernel, and the layout of its KV cache.

`tests/unit/test_contracts_sparse.py` and `test_contracts_cross_layer.py` pin what is used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    _get_attn_isa,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from headrace_engine.vllm.attention.layers import (
    Attention,
    CommonAttentionMetadata,
    renumbered_metadata,
    unsupported_model,
)

__all__ = [
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadata",
    "CPUAttentionMetadataBuilder",
]

KNOWN_ISAS = frozenset({"vec", "vec16"})
"""Instruction sets whose order of keys in a block is known to code outside of vLLM."""


def register_cpu_backend(path: str) -> None:
    """Replace vLLM's CPU attention backend by the subclass at this path, in this process."""
    register_backend(AttentionBackendEnum.CPU_ATTN, path)


def unsupported_cpu_engine(config: VllmConfig, page_tokens: int) -> str | None:
    """Return why attention to pages does not work in an engine without a GPU, according to its
    configuration; None if it works."""
    if not current_platform.is_cpu():
        return "it runs neither on a CPU nor on a CUDA GPU"
    if (why := unsupported_model(config, heads_divided=True)) is not None:
        return why
    model, cache = config.model_config, config.cache_config
    if config.use_v2_model_runner:
        return "the second model runner does not show its rows"
    if cache.block_size % page_tokens:
        return f"block_size {cache.block_size} is no multiple of {page_tokens}"
    dim = model.get_head_size()
    if dim % 2 or dim not in CPUAttentionBackend.get_supported_head_sizes():
        return f"heads of {dim} channels are not known"
    isa = _get_attn_isa(model.dtype, page_tokens, dim, cache.cache_dtype)
    if isa not in KNOWN_ISAS:
        return (
            f"the order of keys for {isa} is not known: known are {', '.join(sorted(KNOWN_ISAS))}"
        )
    return None


def schedule(
    starts: Tensor,
    lengths: Tensor,
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    isa: str,
) -> Tensor:
    """Return the kernel's schedule of requests.

    Args:
        starts: int32 [requests + 1], first query of each. lengths: int32 [requests], tokens of KV.
        group: number of query heads of a KV head.
    """
    found: Tensor = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        seq_lens=lengths,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
    )
    return found


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    scheduled: Tensor | None,
    scale: float,
    **options: Any,
) -> None:
    """Run vLLM's CPU attention, which is plain and causal without `options`.

    Args:
        query, output: [rows, heads, D].
        keys, values: as `split_cache` returns them, of equal shapes and strides.
        starts, lengths: as for `schedule`, which returns `scheduled`.
        table: blocks of each request.
        options: the kernel's other arguments.
    """
    plain = {"causal": True, "alibi_slopes": None, "sliding_window": -1, "softcap": 0}
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=scale,
        block_table=table,
        scheduler_metadata=scheduled,
        **{**plain, "s_aux": None, **options},
    )


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
    """Run a layer's CPU attention over K and V, which may be from two layers.

    Args:
        query, keys, values, output: as for `attention`.
    """
    rows = metadata.num_actual_tokens
    attention(
        query[:rows],
        keys,
        values,
        output[:rows],
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        metadata.scheduler_metadata,
        impl.scale,
        causal=metadata.causal,
        alibi_slopes=impl.alibi_slopes,
        sliding_window=impl.sliding_window,
        softcap=impl.logits_soft_cap,
        s_aux=impl.sinks,
        dynamic_causal=metadata.dynamic_causal,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_cache_dtype=impl.kv_cache_dtype,
    )
    return output


def kv_scales(keys: Attention, values: Attention) -> tuple[float, float]:
    """Return the scale of quantised K of one layer, and that of V of another."""
    return keys._k_scale_float, values._v_scale_float


def split_cache(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of a layer's cache [blocks, kv_heads, block, 2 * D], as the kernel takes them.

    Each is [blocks, kv_heads, block, D], without a copy. K's order inside a block is the kernel's
    own."""
    blocks, heads, tokens, _ = kv_cache.shape
    keys, values = kv_cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
    return keys, values


def packed_block(keys: Tensor, values: Tensor, kv_cache: Tensor, isa: str) -> Tensor:
    """Return one block in the kernel's order, all of whose tokens have these K and V.

    Args:
        keys, values: [kv_heads, D].
        kv_cache: gives the layout, [blocks, kv_heads, block, 2 * D].

    Returns:
        [kv_heads, block, 2 * D], in the cache's dtype.
    """
    _, heads, tokens, width = kv_cache.shape
    block = torch.empty(1, heads, tokens, width, dtype=kv_cache.dtype)
    key_cache, value_cache = split_cache(block)
    ops.cpu_attn_reshape_and_cache(
        keys.to(kv_cache.dtype).expand(tokens, -1, -1).contiguous(),
        values.to(kv_cache.dtype).expand(tokens, -1, -1).contiguous(),
        key_cache,
        value_cache,
        torch.arange(tokens),
        isa,
    )
    return block[0]


@dataclass
class RenumberedMetadata(CPUAttentionMetadata):
    """Metadata whose block table numbers the blocks of this batch, not those of the cache.

    Attributes:
        blocks: int64 [n], each block's number in the cache.
    """

    blocks: Tensor | None = None


class RenumberedMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builder that numbers the blocks that a batch attends to from 0, each shared block once."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RenumberedMetadata:
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        renumbered: RenumberedMetadata = renumbered_metadata(
            RenumberedMetadata, found, self.block_size
        )
        return renumbered
