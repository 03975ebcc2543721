"""Every use that sparse attention makes of vLLM beyond its documented API; an upgrade breaks this
file first. `tests/unit/test_contracts_sparse.py` pins the parts that are used here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    _get_attn_isa,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, replace_as
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from headrace_decode.sparse.engine.rows import BatchRow
from headrace_decode.techniques import SPARSE, share_in

__all__ = [
    "BlockHash",
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadata",
    "CPUAttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "FullAttentionManager",
    "FullAttentionSpec",
    "make_block_hash_with_group_id",
    "register_kv_cache_spec",
    "replace_as",
]

KNOWN_ISAS = frozenset({"vec", "vec16"})
"""Instruction sets whose order of keys in a block `keys.LayerKeys` can read."""


def use_backend(path: str) -> None:
    """Replace vLLM's CPU attention backend by the subclass at this path, in this process."""
    register_backend(AttentionBackendEnum.CPU_ATTN, path)


def runs_on_cuda() -> bool:
    """Return whether this process's engine runs on a CUDA GPU."""
    return bool(current_platform.is_cuda())


def why_model_dense(config: VllmConfig) -> str | None:
    """Return why an engine cannot attend sparsely on any device; None if there is no reason."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    for kind in ("tensor", "pipeline", "prefill_context", "decode_context"):
        if getattr(parallel, f"{kind}_parallel_size", 1) > 1:
            return f"{kind}_parallel_size is above 1"
    if model.use_mla or model.is_hybrid or model.is_encoder_decoder:
        return "the model's attention is not plain (MLA, hybrid or with an encoder)"
    if model.get_sliding_window() is not None:
        return "the model has a sliding window"
    if is_quantized_kv_cache(cache.cache_dtype):
        return f"KV is quantised ({cache.cache_dtype})"
    return None


def why_dense(config: VllmConfig, unit_tokens: int) -> str | None:
    """Return why an engine without a GPU cannot attend sparsely, according to its configuration;
    None if it can."""
    if not current_platform.is_cpu():
        return "it runs neither on a CPU nor on a CUDA GPU"
    if (why := why_model_dense(config)) is not None:
        return why
    model, cache = config.model_config, config.cache_config
    if config.use_v2_model_runner:
        return "the second model runner does not show its rows"
    if cache.block_size % unit_tokens:
        return f"block_size {cache.block_size} is no multiple of {unit_tokens}"
    dim = model.get_head_size()
    if dim % 2 or dim not in CPUAttentionBackend.get_supported_head_sizes():
        return f"heads of {dim} channels are not known"
    isa = _get_attn_isa(model.dtype, unit_tokens, dim, cache.cache_dtype)
    if isa not in KNOWN_ISAS:
        return (
            f"the order of keys for {isa} is not known: known are {', '.join(sorted(KNOWN_ISAS))}"
        )
    return None


def why_layers_dense(
    config: VllmConfig, cache: KVCacheConfig, kind: type[FullAttentionSpec] = FullAttentionSpec
) -> str | None:
    """Return why an engine's layers cannot attend sparsely; None if they can.

    Args:
        kind: kind of KV cache that they must have.
    """
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if len(specs) != 1 or type(specs[0]) is not kind:
        return f"its KV cache groups are {[type(spec).__name__ for spec in specs]}"
    return why_modules_dense(attention_layers(config, cache))


def why_modules_dense(layers: Iterable[Any]) -> str | None:
    """Return why attention modules cannot attend sparsely; None if they can."""
    for layer in layers:
        name, impl = layer.layer_name, layer.impl
        if layer.attn_type != AttentionType.DECODER or layer.sliding_window is not None:
            return f"{name} has a sliding window, or is no decoder"
        if layer.kv_sharing_target_layer_name is not None:
            return f"{name} shares another layer's KV"
        if impl.sinks is not None or impl.alibi_slopes is not None or impl.logits_soft_cap:
            return f"{name} has a sink, slopes or a soft cap"
        if layer.head_size != layer.head_size_v:
            return f"{name} has K of {layer.head_size} and V of {layer.head_size_v} channels"
    return None


def model_fields(config: VllmConfig) -> dict[str, Any]:
    """Return the model's `config.json`, as `transformers` has it."""
    found: dict[str, Any] = config.model_config.hf_text_config.to_dict()
    return found


def attention_layers(config: VllmConfig, cache: KVCacheConfig) -> list[Any]:
    """Return the attention modules of the only cache group, in order."""
    [group] = cache.kv_cache_groups
    found: dict[str, Any] = get_layers_from_vllm_config(config, Attention, group.layer_names)
    return [found[name] for name in group.layer_names]


class RunnerRows:
    """Rows of vLLM's first model runner, for `rows`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def step_begins(self, step: Any) -> None:
        """Do nothing, since the runner follows steps itself."""

    def rows(self) -> list[BatchRow]:
        """Return the batch of the step in progress."""
        return [self._row(name) for name in self._runner.input_batch.req_ids]

    def blocks(self, name: str) -> Sequence[int]:
        """Return a request's blocks of the scheduler."""
        found: Sequence[int] = self._runner.requests[name].block_ids[0]
        return found

    def _row(self, name: str) -> BatchRow:
        request = self._runner.requests[name]
        params = request.sampling_params
        share = share_in(params, SPARSE)
        return BatchRow(name, share, request.num_prompt_tokens)


class FollowedRows:
    """Rows of vLLM's second model runner, in engines without drafts. The runner keeps no sampling
    parameters, so these are taken from the scheduler's steps."""

    def __init__(self) -> None:
        self._known: dict[str, BatchRow] = {}
        self._rows: list[BatchRow] = []

    def step_begins(self, step: Any) -> None:
        """Follow a step of the scheduler. vLLM sends resumed requests as new ones."""
        from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

        for name in requests_gone(step):
            self._known.pop(name, None)
        for new in step.scheduled_new_reqs:
            params = new.sampling_params
            share = share_in(params, SPARSE)
            self._known[new.req_id] = BatchRow(new.req_id, share, new.prompt_len)
        order = sort_batch_req_ids(step.num_scheduled_tokens, {}, 1)
        self._rows = [self._known[name] for name in order]

    def rows(self) -> list[BatchRow]:
        """Return the batch of the step in progress."""
        return self._rows


def requests_moved(step: Any) -> set[str]:
    """Return the requests of a scheduler's step whose blocks are new or were taken away."""
    new = {each.req_id for each in step.scheduled_new_reqs}
    preempted = set(step.preempted_req_ids or ())
    resumed = set(step.scheduled_cached_reqs.resumed_req_ids)
    return new | preempted | resumed | set(step.finished_req_ids)


def requests_gone(step: Any) -> set[str]:
    """Return the requests whose blocks a scheduler's step takes away."""
    return set(step.preempted_req_ids or ()) | set(step.finished_req_ids)


def final_tokens(step: Any) -> dict[str, tuple[int, int]]:
    """Return, for each request of a step, the numbers of tokens whose KV is final before and after
    the step, without drafts."""
    cached = step.scheduled_cached_reqs
    before = {each.req_id: each.num_computed_tokens for each in step.scheduled_new_reqs}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    drafts = step.scheduled_spec_decode_tokens
    return {
        name: (before[name], before[name] + count - len(drafts.get(name, ())))
        for name, count in step.num_scheduled_tokens.items()
    }


def attention_modules(config: VllmConfig, names: Iterable[str]) -> list[Any]:
    """Return attention modules by name."""
    found: dict[str, Any] = get_layers_from_vllm_config(config, Attention, list(names))
    return list(found.values())


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
    scheduled: Tensor,
    scale: float,
) -> None:
    """Run vLLM's CPU attention; arguments as for `attention.Kernel`."""
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=lengths,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=0,
        scheduler_metadata=scheduled,
        s_aux=None,
    )
