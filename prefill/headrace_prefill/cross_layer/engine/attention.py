"""Attention of layers without KV to the KV of two storage layers, on vLLM's CPU kernel.

`Attention(kv_sharing_target_layer_name=...)` gives a layer no cache of its own, but K and V of one
other layer. Such a layer gets one of the two backends here with `attn_backend=`:

- Lite reads K where vLLM bound it and V in another layer's cache: one kernel call, no copy.
- Fused mixes the blocks that this step's rows attend to into a scratch cache, then makes the same
  kernel call. All layers share one scratch cache. It has the size of one layer's cache, 1/n of the
  KV memory of n storage layers, and is allocated at the start. docs/cross-layer.md has the costs of
  the alternatives.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace_engine.vllm.attention.cpu import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    RenumberedMetadataBuilder,
    attend,
    kv_scales,
    split_cache,
)
from headrace_prefill.cross_layer.engine.sources import FusedSources, LiteSources


class LiteImpl(LiteSources, CPUAttentionBackendImpl):
    """Attention to K of one layer and V of another."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # a dummy run
            return output
        keys, _ = split_cache(self._keys.kv_cache)
        _, values = split_cache(self._values.kv_cache)
        scales = kv_scales(self._keys, self._values)
        return attend(self, query, keys, values, attn_metadata, output, *scales)


class LiteBackend(CPUAttentionBackend):
    """vLLM's CPU attention with `LiteImpl`."""

    @staticmethod
    def get_impl_cls() -> type[LiteImpl]:
        return LiteImpl


class FusedImpl(FusedSources, CPUAttentionBackendImpl):
    """Attention to a mixture of two layers' K and V."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # a dummy run
            self._memory.reserve(self._first.kv_cache)
            return output
        first, last = self._first.kv_cache, self._last.kv_cache
        if self._weights is None:
            self._weights = self._mixture.packed(first, layer.isa)
        mixed = self._memory.mix(first, last, attn_metadata.blocks.numpy(), *self._weights)
        return attend(self, query, *split_cache(mixed), attn_metadata, output)


class FusedBackend(CPUAttentionBackend):
    """vLLM's CPU attention with `FusedImpl`."""

    @staticmethod
    def get_impl_cls() -> type[FusedImpl]:
        return FusedImpl

    @staticmethod
    def get_builder_cls() -> type[RenumberedMetadataBuilder]:
        return RenumberedMetadataBuilder
