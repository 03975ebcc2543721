"""K and V of a layer's paged KV cache, as views without a copy.

vLLM 0.32 views each layer's cache as `[blocks, heads, tokens, 2 * head_dim]`, with the layout in
the strides. The content of the last two axes differs:

    joined   CUDA: the last axis is K, then V (NHD and HND differ in strides only)
    vec      CPU, ISAs "vec" and "vec16": within a block and head, K as [head_dim, tokens], then V
             as [tokens, head_dim]

Both become views `[blocks, heads, tokens, head_dim]`, one for K and one for V. Pure torch, any
device.
"""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor


class KvOrder(StrEnum):
    """Order of K and V in the last two axes of a cache."""

    JOINED = "joined"
    VEC = "vec"


def split_kv(cache: Tensor, order: KvOrder) -> tuple[Tensor, Tensor]:
    """Return K and V of a layer's cache as views.

    Args:
        cache: [blocks, heads, tokens, 2 * head_dim].
        order: order of its last two axes.

    Returns:
        K and V, each [blocks, heads, tokens, head_dim].

    Raises:
        ValueError: the cache has another shape, or "vec" and a block's heads are not contiguous.
    """
    if cache.dim() != 4 or cache.shape[3] % 2:
        raise ValueError(f"KV cache: shape {tuple(cache.shape)} is not [blocks, heads, tokens, 2D]")
    _, _, tokens, both = cache.shape
    if order is KvOrder.JOINED:
        keys, values = cache.split(both // 2, dim=3)
        return keys, values
    if cache.stride()[2:] != (both, 1):
        raise ValueError(f"KV cache: strides {cache.stride()} are not those of the CPU layout vec")
    flat = cache.flatten(2)
    keys, values = flat.split(tokens * both // 2, dim=2)
    keys = keys.unflatten(2, (both // 2, tokens)).transpose(2, 3)
    return keys, values.unflatten(2, (tokens, both // 2))
