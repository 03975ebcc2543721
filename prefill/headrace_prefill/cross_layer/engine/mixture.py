"""The mixing weights of one layer, as a vLLM model loads, shards and packs them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace_engine.vllm.attention.cpu import packed_block
from headrace_engine.vllm.model_layers import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from headrace_prefill.cross_layer.mixing import by_channel


class Mixture(nn.Module):
    """Weights [kv_heads of this rank, D/2] of keys and [kv_heads of this rank, D] of values."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.first_keys, self.last_keys = (_weight(kv_heads, head_dim // 2) for _ in range(2))
        self.first_values, self.last_values = (_weight(kv_heads, head_dim) for _ in range(2))

    def packed(self, kv_cache: Tensor, isa: str) -> tuple[Tensor, Tensor]:
        """Return the weights of the first and of the last layer for each element of a block, each
        [kv_heads, block, 2 * D]."""
        return (
            packed_block(by_channel(self.first_keys), self.first_values, kv_cache, isa),
            packed_block(by_channel(self.last_keys), self.last_values, kv_cache, isa),
        )


def _weight(kv_heads: int, width: int) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(kv_heads, width), requires_grad=False)
    weight.weight_loader = _load  # type: ignore[attr-defined]
    return weight


def _load(weight: nn.Parameter, loaded: Tensor) -> None:
    """Copy the weights of this rank's KV heads; ranks share a head if there are more ranks."""
    kept, ranks = len(weight), get_tensor_model_parallel_world_size()
    copies = max(1, ranks // len(loaded))
    first = get_tensor_model_parallel_rank() // copies * kept
    weight.data.copy_(loaded[first : first + kept])
