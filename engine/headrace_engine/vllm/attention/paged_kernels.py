"""vLLM's paged attention kernels for GPUs; an upgrade breaks this file first.

`tests/unit/test_contracts_sparse.py` pins what is used here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLAIN: dict[str, Any] = {
    "window_size": (-1, -1),
    "softcap": 0,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
}
"""Arguments of vLLM's Triton kernel for plain attention."""
SEGMENTS = 64
"""Parts of a request's KV that vLLM's Triton kernel attends to in parallel; a power of 2."""


MAX_SEGMENTED = 128
"""Maximum requests of one token whose KV is divided into `SEGMENTS`; more of them fill a GPU."""


def triton_attention(query: Tensor, *rest: Any) -> None:
    """Run vLLM's Triton kernel for requests of one token."""
    _run_segmented(query, _named(query, *rest))


def triton_causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    most_queries: int,
    longest: int,
    scale: float,
) -> None:
    """Run vLLM's Triton kernel for requests of any number of tokens.

    Args:
        most_queries, longest: maximum of a request's tokens, and of its KV, or more.
    """
    named = _named(query, keys, values, output, starts, lengths, table, longest, scale)
    if most_queries == 1 and len(lengths) <= MAX_SEGMENTED:
        _run_segmented(query, named)
        return
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    named["max_seqlen_q"] = most_queries
    unified_attention(**named, **PLAIN)


def _run_segmented(query: Tensor, named: dict[str, Any]) -> None:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    requests, heads, dim = query.shape
    parts = (requests, heads, SEGMENTS)
    fp32 = {"dtype": torch.float32, "device": query.device}
    padded = 1 << (dim - 1).bit_length()
    unified_attention(
        **named,
        **PLAIN,
        seq_threshold_3D=requests,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=torch.empty((*parts, padded), **fp32),
        softmax_segm_max=torch.empty(parts, **fp32),
        softmax_segm_expsum=torch.empty(parts, **fp32),
    )


def flash_attention(*given: Any) -> None:
    """Run FlashAttention as vLLM ships it, in the version that vLLM picks for the GPU."""
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
    )

    flash_attn_varlen_func(**_named(*given), fa_version=get_flash_attn_version())


def _named(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    longest: int,
    scale: float,
) -> dict[str, Any]:
    """Return the arguments of an `attention.Kernel` under vLLM's names."""
    return {
        "q": query,
        "k": keys,
        "v": values,
        "out": output,
        "cu_seqlens_q": starts,
        "max_seqlen_q": 1,
        "seqused_k": lengths,
        "max_seqlen_k": longest,
        "softmax_scale": scale,
        "causal": True,
        "block_table": table,
    }
