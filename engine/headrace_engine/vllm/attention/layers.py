"""vLLM's attention layers on any device, and the reasons why an engine's attention is not plain.

`tests/unit/test_contracts_sparse.py` and `test_contracts_cross_layer.py` pin what is used here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

__all__ = ["Attention", "CommonAttentionMetadata"]

SPLIT_BY = ("tensor", "pipeline", "prefill_context", "decode_context")
"""Kinds of parallelism that split a model or a context over several workers."""
HEADS_DIVIDED_BY = "tensor"


def unsupported_model(config: VllmConfig, heads_divided: bool = False) -> str | None:
    """Return why an engine's attention is not plain, on any device; None if it is.

    Plain attention is full causal attention of one worker over KV that is not quantised.

    Args:
        heads_divided: whether several workers may have some of the heads each.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    for kind in SPLIT_BY:
        if heads_divided and kind == HEADS_DIVIDED_BY:
            continue
        if getattr(parallel, f"{kind}_parallel_size", 1) > 1:
            return f"{kind}_parallel_size is above 1"
    if model.use_mla or model.is_hybrid or model.is_encoder_decoder:
        return "the model's attention is not plain (MLA, hybrid or with an encoder)"
    if model.get_sliding_window() is not None:
        return "the model has a sliding window"
    if is_quantized_kv_cache(cache.cache_dtype):
        return f"KV is quantised ({cache.cache_dtype})"
    return None


def kv_heads_of_worker(config: VllmConfig, kv_heads: int) -> range:
    """Return which of the model's KV heads this worker has. If there are more workers than heads,
    several have the same one.

    Args:
        kv_heads: number of the model's KV heads.
    """
    ranks = config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return range(kv_heads)
    first = get_tensor_model_parallel_rank() * kv_heads // ranks
    return range(first, first + max(1, kv_heads // ranks))


def unsupported_kv_cache(
    cache: KVCacheConfig, kind: type[FullAttentionSpec] | None = None
) -> str | None:
    """Return why an engine's KV cache is not one group of full attention; None if it is.

    Args:
        kind: the exact class of spec that the group must have; None for any full attention.
    """
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if len(specs) == 1 and (
        isinstance(specs[0], FullAttentionSpec) if kind is None else type(specs[0]) is kind
    ):
        return None
    return f"its KV cache groups are {[type(spec).__name__ for spec in specs]}"


def unsupported_layers(layers: Iterable[Any]) -> str | None:
    """Return why attention modules are not plain; None if they are."""
    for layer in layers:
        name, impl = layer.layer_name, layer.impl
        if layer.attn_type != AttentionType.DECODER or layer.sliding_window is not None:
            return f"{name} has a sliding window, or is no decoder"
        if layer.kv_sharing_target_layer_name is not None:
            return f"{name} shares another layer's KV"
        if any(
            getattr(impl, part, None) is not None for part in ("sinks", "alibi_slopes")
        ) or getattr(impl, "logits_soft_cap", None):
            return f"{name} has a sink, slopes or a soft cap"
        if layer.head_size != layer.head_size_v:
            return f"{name} has K of {layer.head_size} and V of {layer.head_size_v} channels"
        dtype = getattr(layer, "kv_cache_dtype", "auto")
        if is_quantized_kv_cache(dtype):
            return f"{name} keeps quantised KV ({dtype})"
    return None


def attention_layers(config: VllmConfig, cache: KVCacheConfig) -> list[Any]:
    """Return the attention modules of the only cache group, in order."""
    [group] = cache.kv_cache_groups
    found: dict[str, Any] = get_layers_from_vllm_config(config, Attention, group.layer_names)
    return [found[name] for name in group.layer_names]


def attention_modules(config: VllmConfig, names: Iterable[str]) -> list[Any]:
    """Return attention modules by name."""
    found: dict[str, Any] = get_layers_from_vllm_config(config, Attention, list(names))
    return list(found.values())


def model_fields(config: VllmConfig) -> dict[str, Any]:
    """Return the model's `config.json`, as `transformers` has it."""
    found: dict[str, Any] = config.model_config.hf_text_config.to_dict()
    return found


def renumber_blocks(table: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Number the blocks that a batch attends to from 0; blocks that requests share count once.

    On a GPU the host waits for their number, once a step.

    Args:
        table: blocks of each request, int32 [requests, maximum blocks]; entries after a request's
            last block are arbitrary.
        seq_lens: tokens of each request.

    Returns:
        The blocks, int64 [n], and a table of their new numbers.
    """
    used = (seq_lens + block_size - 1) // block_size
    is_read = torch.arange(table.shape[1], device=table.device) < used[:, None]
    blocks, numbers = torch.unique(table[is_read], return_inverse=True)
    renumbered = torch.zeros_like(table)
    renumbered[is_read] = numbers.to(renumbered.dtype)
    return blocks.long(), renumbered


def renumbered_metadata(kind: Any, metadata: Any, block_size: int) -> Any:
    """Return a backend's metadata with its blocks renumbered.

    Args:
        kind: subclass of the metadata's class with a field `blocks` of each block's number in the
            cache.
    """
    blocks, table = renumber_blocks(metadata.block_table, metadata.seq_lens, block_size)
    values = {field.name: getattr(metadata, field.name) for field in fields(metadata)}
    return kind(**{**values, "block_table": table, "blocks": blocks})
