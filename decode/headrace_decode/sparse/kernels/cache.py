"""View of a paged KV cache whose blocks have one KV head each, so that each head has its own table.

vLLM 0.32 keeps a layer's KV as `[blocks, kv_heads, page_tokens, 2 head_dim]`, K before V, with the
tokens (HND) or the heads (NHD) outside in memory. The same memory is read as

    [places, page_tokens, 1, head_dim]        head h of block b is place  b * heads_apart + h

with a place every `stride(kv_heads)` elements. Under NHD places overlap, and tables never name most
of them. Nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HeadCache:
    """One layer's cache, by head.

    Attributes:
        keys, values: [places, page_tokens, 1, head_dim], views.
        heads_apart: number of places from a block to the next.
        kv_heads: number of the cache's KV heads.
    """

    keys: Tensor
    values: Tensor
    heads_apart: int
    kv_heads: int

    @classmethod
    def of(cls, cache: Tensor) -> HeadCache:
        """Return the view of a cache.

        Args:
            cache: [blocks, kv_heads, page_tokens, 2 head_dim], in HND or NHD order.

        Raises:
            ValueError: the cache has another form, or its blocks are not a whole number of heads
                apart.
        """
        if cache.dim() != 4 or cache.shape[3] % 2 or cache.stride(3) != 1:
            raise ValueError(f"a KV cache of shape {tuple(cache.shape)} is not of K and V by head")
        blocks, kv_heads, page_tokens, both = cache.shape
        block, head, token, _ = cache.stride()
        if block % head or block < head * kv_heads:
            raise ValueError(f"blocks are {block} elements apart and heads {head}")
        heads_apart, dim = block // head, both // 2
        places = (blocks - 1) * heads_apart + kv_heads
        shape, strides = (places, page_tokens, 1, dim), (head, token, head, 1)
        start = cache.storage_offset()
        return cls(
            cache.as_strided(shape, strides, start),
            cache.as_strided(shape, strides, start + dim),
            heads_apart,
            kv_heads,
        )

    @property
    def page_tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]
