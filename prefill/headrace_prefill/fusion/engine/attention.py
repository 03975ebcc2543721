"""Attention of layers without KV to the KV of two storage layers, on vLLM's CPU kernel.

`Attention(kv_sharing_target_layer_name=...)` gives a layer no cache of its own, but K and V of one
layer. The two backends here are given to such a layer with `attn_backend=`:

- Lite reads K where vLLM bound it and V in another layer's cache: one kernel call, no copy.
- Fused mixes the blocks that this step's rows attend to into a scratch cache, then makes the same
  kernel call. A block's K and V are mixed in one pass, since a weight is a constant of its channel
  in whatever order the kernel keeps a block. The scratch is one for all layers. It grows to the
  largest batch's blocks, at most one layer's cache: 1/n of the KV memory of n storage layers.
  docs/fusion.md has what the alternatives cost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_prefill.fusion.engine._vllm_compat import (
    Attention,
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    MixedMetadataBuilder,
    attend,
    halves,
)
from headrace_prefill.fusion.engine.mixture import Mixture


class LiteImpl(CPUAttentionBackendImpl):
    """K of one layer, V of another.

    Args:
        keys, values: the attention of these layers.
    """

    def __init__(self, *args: Any, keys: Attention, values: Attention, **options: Any) -> None:
        super().__init__(*args, **options)
        self._keys, self._values = keys, values

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
        keys, _ = halves(self._keys.kv_cache)
        _, values = halves(self._values.kv_cache)
        scales = self._keys._k_scale_float, self._values._v_scale_float
        return attend(self, query, keys, values, attn_metadata, output, *scales)


class LiteBackend(CPUAttentionBackend):
    """vLLM's CPU attention with `LiteImpl`."""

    @staticmethod
    def get_impl_cls() -> type[LiteImpl]:
        return LiteImpl


class Scratch:
    """Memory for mixed blocks, one layer's at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, blocks: int, kv_cache: Tensor) -> Tensor:
        """Room [blocks, kv_heads, block, 2 * D], until the next call."""
        if len(self._memory) < blocks or self._memory.shape[1:] != kv_cache.shape[1:]:
            self._memory = torch.empty(blocks, *kv_cache.shape[1:], dtype=kv_cache.dtype)
        return self._memory[:blocks]


class FusedImpl(CPUAttentionBackendImpl):
    """K and V mixed of two layers.

    Args:
        first, last: the attention of these layers.
        mixture: its weights.
        scratch: one for all layers.
    """

    def __init__(
        self,
        *args: Any,
        first: Attention,
        last: Attention,
        mixture: Mixture,
        scratch: Scratch,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._first, self._last = first, last
        self._mixture, self._scratch = mixture, scratch
        self._weights: tuple[Tensor, Tensor] | None = None

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
        first, last = self._first.kv_cache, self._last.kv_cache
        if self._weights is None:
            self._weights = self._mixture.packed(first, layer.isa)
        mixed = self._scratch.take(len(attn_metadata.blocks), first)
        mix_blocks(first, last, attn_metadata.blocks, *self._weights, mixed)
        return attend(self, query, *halves(mixed), attn_metadata, output)


class FusedBackend(CPUAttentionBackend):
    """vLLM's CPU attention with `FusedImpl`."""

    @staticmethod
    def get_impl_cls() -> type[FusedImpl]:
        return FusedImpl

    @staticmethod
    def get_builder_cls() -> type[MixedMetadataBuilder]:
        return MixedMetadataBuilder


def mix_blocks(
    first: Tensor,
    last: Tensor,
    blocks: Tensor,
    first_weight: Tensor,
    last_weight: Tensor,
    output: Tensor,
) -> None:
    """output[i] = first[blocks[i]] * first_weight + last[blocks[i]] * last_weight.

    Args:
        first, last: two layers' caches, [any, kv_heads, block, 2 * D].
        blocks: int64 [n].
        first_weight, last_weight: [kv_heads, block, 2 * D].
        output: [n, kv_heads, block, 2 * D].
    """
    torch.index_select(first, 0, blocks, out=output)
    output.mul_(first_weight).addcmul_(last.index_select(0, blocks), last_weight)
