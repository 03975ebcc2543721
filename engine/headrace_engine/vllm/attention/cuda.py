"""vLLM's Triton attention on GPUs: its backend and its kernel.

`tests/unit/test_contracts_sparse_device.py` and `test_contracts_cross_layer.py` pin what is used
here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from headrace_engine.vllm.attention.layers import (
    CommonAttentionMetadata,
    renumbered_metadata,
    unsupported_model,
)

__all__ = [
    "AttentionCGSupport",
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadata",
    "TritonAttentionMetadataBuilder",
]

MIN_CAPABILITY = 80
MIN_HEAD_DIM = 32


def register_cuda_backend(config: VllmConfig, path: str) -> None:
    """Make the backend at this path vLLM's attention, in this process. Must be called before the
    model is loaded."""
    register_backend(AttentionBackendEnum.CUSTOM, path)
    config.attention_config.backend = AttentionBackendEnum.CUSTOM


def unsupported_cuda_engine(config: VllmConfig, page_tokens: int, max_pages: int) -> str | None:
    """Return why attention to pages does not work in an engine on a CUDA GPU, according to its
    configuration; None if it works.

    Args:
        max_pages: maximum number of pages of a request.
    """
    if (why := unsupported_model(config, heads_divided=True)) is not None:
        return why
    if not current_platform.has_device_capability(MIN_CAPABILITY):
        return "its GPU has a compute capability below 8.0"
    attention, cache = config.attention_config, config.cache_config
    if attention.backend not in (None, AttentionBackendEnum.TRITON_ATTN):
        return f"the engine has attention_backend {attention.backend.name}"
    if attention.backend_per_kind:
        return "the engine has an attention backend for each kind of KV cache"
    if cache.user_specified_block_size and cache.block_size != page_tokens:
        return f"block_size {cache.block_size} is not the page, {page_tokens}"
    dim = config.model_config.get_head_size()
    if dim & (dim - 1) or dim < MIN_HEAD_DIM:
        return f"heads of {dim} channels: there is no kernel for these"
    longest = config.model_config.max_model_len
    if longest > max_pages * page_tokens:
        return f"max_model_len {longest} is above {max_pages} pages of {page_tokens} tokens"
    speculative = config.speculative_config
    if speculative is not None and speculative.method != "custom_class":
        return f"{speculative.method} drafts: the host does not know how long rows are"
    if config.parallel_config.enable_dbo:
        return "enable_dbo splits batches"
    graphs = config.compilation_config.cudagraph_mode
    if graphs is not None and graphs.mixed_mode() == CUDAGraphMode.FULL:
        return f"cudagraph_mode is {graphs.name}: attention must stay outside of CUDA graphs"
    return None


def attend(
    impl: TritonAttentionImpl,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    metadata: TritonAttentionMetadata,
    output: Tensor,
) -> Tensor:
    """Run a layer's Triton attention over K and V, which may be from two layers.

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
class RenumberedMetadata(TritonAttentionMetadata):
    """Metadata whose block table numbers the blocks of this batch, not those of the cache.

    Attributes:
        blocks: int64 [n], each block's number in the cache.
    """

    blocks: Tensor | None = None


class RenumberedMetadataBuilder(TritonAttentionMetadataBuilder):
    """Builder that numbers the blocks that a batch attends to. Their number changes from step to
    step, so attention stays outside of CUDA graphs."""

    _cudagraph_support = AttentionCGSupport.NEVER

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
