"""Every use that sparse attention on a CUDA GPU makes of vLLM beyond its documented API; an upgrade
breaks this file first. `tests/unit/test_contracts_sparse_device.py` pins the parts that are used
here.
"""

from __future__ import annotations

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from headrace_decode.sparse.engine._vllm_compat import why_model_dense
from headrace_decode.sparse.kernels.choosing import MAX_UNITS

__all__ = [
    "AttentionCGSupport",
    "CommonAttentionMetadata",
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadata",
    "TritonAttentionMetadataBuilder",
]

MIN_CAPABILITY = 80
MIN_HEAD_DIM = 32


def use_backend(config: VllmConfig, path: str) -> None:
    """Make the backend at this path vLLM's attention, in this process. Must be called before the
    model is loaded."""
    register_backend(AttentionBackendEnum.CUSTOM, path)
    config.attention_config.backend = AttentionBackendEnum.CUSTOM


def why_dense(config: VllmConfig, unit_tokens: int) -> str | None:
    """Return why an engine on a CUDA GPU cannot attend sparsely, according to its configuration;
    None if it can."""
    if (why := why_model_dense(config)) is not None:
        return why
    if not current_platform.has_device_capability(MIN_CAPABILITY):
        return "its GPU has a compute capability below 8.0"
    attention, cache = config.attention_config, config.cache_config
    if attention.backend not in (None, AttentionBackendEnum.TRITON_ATTN):
        return f"the engine has attention_backend {attention.backend.name}"
    if attention.backend_per_kind:
        return "the engine has an attention backend for each kind of KV cache"
    if cache.user_specified_block_size and cache.block_size != unit_tokens:
        return f"block_size {cache.block_size} is not the unit, {unit_tokens}"
    dim = config.model_config.get_head_size()
    if dim & (dim - 1) or dim < MIN_HEAD_DIM:
        return f"heads of {dim} channels: there is no kernel for these"
    longest = config.model_config.max_model_len
    if longest > MAX_UNITS * unit_tokens:
        return f"max_model_len {longest} is above {MAX_UNITS} units of {unit_tokens} tokens"
    speculative = config.speculative_config
    if speculative is not None and speculative.method != "custom_class":
        return f"{speculative.method} drafts: the host does not know how long rows are"
    if config.parallel_config.enable_dbo:
        return "enable_dbo splits batches"
    graphs = config.compilation_config.cudagraph_mode
    if graphs is not None and graphs.mixed_mode() == CUDAGraphMode.FULL:
        return f"cudagraph_mode is {graphs.name}: attention must stay outside of CUDA graphs"
    return None
