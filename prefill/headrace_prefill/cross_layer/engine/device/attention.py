"""Attention of layers without KV to the KV of two storage layers, on vLLM's Triton kernel for GPUs.

It works like `engine.attention` on the CPU: Lite reads K and V where they are, in two layers'
caches; Fused mixes the blocks that this step's rows attend to, then calls the kernel on them.
`benchmarks.gpu` measures the cost of mixing on a GPU (docs/gpu-measurements.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_engine.vllm.attention.cuda import (
    RenumberedMetadata,
    RenumberedMetadataBuilder,
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    attend,
)
from headrace_prefill.cross_layer.engine.mixture import Mixture
from headrace_prefill.cross_layer.engine.sources import FusedSources, LiteSources
from headrace_prefill.cross_layer.engine.triton_mixing import mix_blocks
from headrace_prefill.cross_layer.mixing import by_channel


class LiteImpl(LiteSources, TritonAttentionImpl):
    """Attention to K of one layer and V of another."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # a dummy run
            return output.fill_(0)
        keys, _ = halves(self._keys.kv_cache)
        _, values = halves(self._values.kv_cache)
        return attend(self, query, keys, values, attn_metadata, output)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False: fused output quantisation is not supported."""
        return False


class LiteBackend(TritonAttentionBackend):
    """vLLM's Triton attention with `LiteImpl`."""

    @staticmethod
    def get_impl_cls() -> type[LiteImpl]:
        return LiteImpl


class FusedImpl(FusedSources, TritonAttentionImpl):
    """Attention to a mixture of two layers' K and V."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # a dummy run
            self._memory.prepare(self._first.kv_cache, output.device)
            return output.fill_(0)
        assert isinstance(attn_metadata, RenumberedMetadata) and attn_metadata.blocks is not None
        first, last = self._first.kv_cache, self._last.kv_cache
        by_token = not first[0].is_contiguous()  # in memory, tokens are the outer axis of a block
        if self._weights is None:
            self._weights = weights_of(self._mixture, first, by_token)
        memory = self._memory.of(first)
        if by_token:
            first, last = first.transpose(1, 2), last.transpose(1, 2)
        mixed = mix_blocks(first, last, attn_metadata.blocks, *self._weights, memory)
        keys, values = halves(mixed.transpose(1, 2) if by_token else mixed)
        return attend(self, query, keys, values, attn_metadata, output)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return False: fused output quantisation is not supported."""
        return False


class FusedBackend(TritonAttentionBackend):
    """vLLM's Triton attention with `FusedImpl`."""

    @staticmethod
    def get_impl_cls() -> type[FusedImpl]:
        return FusedImpl

    @staticmethod
    def get_builder_cls() -> type[RenumberedMetadataBuilder]:
        return RenumberedMetadataBuilder


def halves(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V of a cache [blocks, kv_heads, block, 2 * D], each [blocks, block, kv_heads,
    D]."""
    keys, values = kv_cache.transpose(1, 2).chunk(2, -1)
    return keys, values


def weights_of(mixture: Mixture, kv_cache: Tensor, by_token: bool) -> tuple[Tensor, Tensor]:
    """Return the weights of the first and of the last layer, in the order and dtype of a block:
    [kv_heads, 2 * D] if tokens are the outer axis of a block, else [kv_heads, block, 2 * D]."""
    found = []
    for keys, values in (
        (mixture.first_keys, mixture.first_values),
        (mixture.last_keys, mixture.last_values),
    ):
        weight = torch.cat([by_channel(keys), values], -1).to(kv_cache.dtype)
        tokens = kv_cache.shape[2]
        found.append(weight if by_token else weight[:, None].expand(-1, tokens, -1).contiguous())
    return found[0], found[1]
