"""The KV cache of an engine as one array of head pages. A head page is a page of one KV head in one
layer.

vLLM allocates all layers at once, one after the other. Any head page can therefore hold KV of any
layer and head: a few heads that need much can use the head pages that a block of the scheduler has
in all layers. An attention kernel that takes a table for each head reads head pages wherever they
lie.

    head page = (layer * pages + page) * kv_heads + head
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.cpu_cache import Ids, LayerCache, pages_of


class HeadPages:
    """All head pages of a KV cache.

    Args:
        layers: layers of the cache, in order.
        block_pages: number of pages of a block of the scheduler.

    Raises:
        ValueError: layers do not lie one after the other.
    """

    def __init__(self, layers: Sequence[LayerCache], block_pages: int) -> None:
        first = layers[0].cache
        if why := why_not_contiguous([layer.cache for layer in layers]):
            raise ValueError(why)
        self.layers, self.block_pages = list(layers), block_pages
        self.kv_heads, self.page_tokens = layers[0].kv_heads, layers[0].page_tokens
        self.in_block = len(layers) * block_pages * self.kv_heads
        """Number of head pages of a block of the scheduler."""
        self._pages = layers[0].blocks
        shape = len(layers) * self._pages * self.kv_heads, 1, *first.shape[2:]
        size = first.shape[2] * first.shape[3]
        whole = first.as_strided(shape, (size, size, first.shape[3], 1))
        self._all = LayerCache(whole)
        self._bytes = whole.flatten(1).view(torch.uint8)
        self.kernel = self._all.as_kernel()
        """K and V as the attention kernel takes them; each head page is a block."""

    def number(self, layer: int | Ids, pages: Ids) -> Ids:
        """Return the head pages of pages of one layer: int64 [kv_heads, n]. For layers [l, 1, 1],
        return int64 [l, kv_heads, n]."""
        heads = np.arange(self.kv_heads)[:, None]
        return (layer * self._pages + pages) * self.kv_heads + heads

    def of_blocks(self, blocks: Sequence[int]) -> Ids:
        """Return all head pages of blocks of the scheduler: int64 [n]."""
        pages = pages_of(blocks, self.block_pages)
        layers = range(len(self.layers))
        return np.concatenate([self.number(layer, pages).reshape(-1) for layer in layers])

    def read(self, layer: int, pages: Ids) -> tuple[Tensor, Tensor]:
        """Copy K and V of a request's pages of one layer: each
        [kv_heads, n * page_tokens, head_dim]."""
        both = self.layers[layer].read(pages), self.layers[layer].read_values(pages)
        keys, values = (one.transpose(0, 1).flatten(1, 2) for one in both)
        return keys, values

    def read_head_pages(self, head_pages: Ids) -> tuple[Tensor, Tensor]:
        """Copy K and V of head pages, int64 [kv_heads, n]: each
        [kv_heads, n * page_tokens, head_dim]."""
        flat = head_pages.reshape(-1)
        both = self._all.read(flat), self._all.read_values(flat)
        keys, values = (one.reshape(len(head_pages), -1, one.shape[-1]) for one in both)
        return keys, values

    def write(self, head_pages: Ids, keys: Tensor, values: Tensor) -> None:
        """Fill head pages.

        Args:
            head_pages: int64 [n]. keys, values: [n * page_tokens, head_dim].
        """
        shape = len(head_pages), 1, self.page_tokens
        self._all.write(head_pages, keys.unflatten(0, shape), values.unflatten(0, shape))

    def write_bytes(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Write bytes, [n], into blocks of the scheduler in place of KV, and zeros after them."""
        head_pages = torch.from_numpy(self.of_blocks(blocks))
        room = torch.zeros(len(head_pages), self._bytes.shape[1], dtype=torch.uint8)
        room.view(-1)[: len(data)] = torch.from_numpy(data)
        self._bytes[head_pages] = room

    def read_bytes(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return all bytes of blocks of the scheduler: [n]."""
        return self._bytes[torch.from_numpy(self.of_blocks(blocks))].view(-1).numpy()


def why_not_contiguous(caches: Sequence[Tensor]) -> str | None:
    """Return why layers' caches are not one array of head pages; None if they are."""
    first = caches[0]
    size = first.numel() * first.element_size()
    for number, cache in enumerate(caches):
        if cache.shape != first.shape or cache.dtype != first.dtype or not cache.is_contiguous():
            return f"layer {number}'s KV cache has another shape than the first"
        same = cache.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or cache.data_ptr() - first.data_ptr() != number * size:
            return f"layer {number}'s KV cache does not lie behind that of the layer before"
    return None
