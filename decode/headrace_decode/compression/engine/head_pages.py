"""The KV cache of an engine as one array of head pages. A head page is a page of one KV head in one
layer.

vLLM allocates all layers at once. Any head page can therefore hold KV of any layer and head: a few
heads that need much can use the head pages that a block of the scheduler has in all layers. An
attention kernel that takes a table for each head reads head pages wherever they lie.

Heads of a page are `stride(kv_heads)` elements apart. Head pages are numbered in steps of this
size:

    head page = first of the layer + page * heads_apart + head

If tokens are outside of heads in memory (NHD on a GPU), the head pages of a page interleave, and
some numbers belong to no head page. Nothing uses these.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.cpu_cache import pages_of
from headrace_engine.kv_views import KvOrder, split_kv

INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integers of the size of an element, in which bytes are copied unchanged."""


class HeadPages:
    """All head pages of a KV cache.

    Args:
        caches: cache of each layer, [pages, kv_heads, page_tokens, 2 head_dim], all in one
            allocation.
        block_pages: number of pages of a block of the scheduler.
        order: order of K and V in a head page.

    Attributes:
        layers, kv_heads: number of layers, and of KV heads of a layer.
        in_block, block_tokens: number of head pages of a block of the scheduler, and of its tokens.
        kernel: K and V as the attention kernel of the device takes them. Each head page is a block.

    Raises:
        ValueError: the layers' caches are not one array of head pages.
    """

    def __init__(self, caches: Sequence[Tensor], block_pages: int, order: KvOrder) -> None:
        if why := why_no_head_pages(caches):
            raise ValueError(why)
        first = caches[0]
        pages, self.kv_heads, self.page_tokens, both = first.shape
        block, head, token, _ = first.stride()
        self.layers, self.block_pages, self.device = len(caches), block_pages, first.device
        self.in_block = self.layers * block_pages * self.kv_heads
        self.block_tokens = block_pages * self.page_tokens
        self._heads_apart = block // head
        offsets = [cache.storage_offset() for cache in caches]
        start = min(offsets)
        firsts = [(offset - start) // head for offset in offsets]
        self._firsts = torch.tensor(firsts, device=self.device)
        self._heads = torch.arange(self.kv_heads, device=self.device)[:, None]
        count = max(firsts) + (pages - 1) * self._heads_apart + self.kv_heads
        shape, strides = (count, 1, self.page_tokens, both), (head, head, token, 1)
        whole = first.as_strided(shape, strides, start)
        self._bits = whole.view(INTEGERS[whole.element_size()])
        self._keys, self._values = split_kv(whole, order)
        self.kernel: tuple[Tensor, Tensor] = (
            self._keys.transpose(1, 2),
            self._values.transpose(1, 2),
        )
        if order is KvOrder.VEC:
            keys, values = whole.view(count, 1, 2 * self.page_tokens, both // 2).chunk(2, 2)
            self.kernel = keys, values

    def number(self, pages: Tensor) -> Tensor:
        """Return the head pages of pages, int [..., n], in each layer:
        int64 [layers, ..., kv_heads, n]."""
        firsts = self._firsts.view(-1, *[1] * (pages.dim() + 1))
        return firsts + pages.unsqueeze(-2) * self._heads_apart + self._heads

    def of_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Return all head pages of blocks of the scheduler: int64 [n]."""
        return self.number(self.pages(blocks)).reshape(-1)

    def pages(self, blocks: Sequence[int]) -> Tensor:
        """Return the pages of blocks of the scheduler: int64 [n]."""
        return torch.from_numpy(pages_of(blocks, self.block_pages)).to(self.device)

    def read(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copy K and V of a request's pages, int64 [n], of one layer: each
        [kv_heads, n * page_tokens, head_dim]."""
        first = self._firsts[layer] + self._heads
        return self.read_head_pages(first + pages * self._heads_apart)

    def read_head_pages(self, head_pages: Tensor) -> tuple[Tensor, Tensor]:
        """Copy K and V of head pages, int [kv_heads, n]: each
        [kv_heads, n * page_tokens, head_dim]."""
        at = head_pages.long()
        return self._keys[at].flatten(1, 3), self._values[at].flatten(1, 3)

    def write(self, head_pages: Tensor, keys: Tensor, values: Tensor) -> None:
        """Fill head pages.

        Args:
            head_pages: int64 [n]. keys, values: [n * page_tokens, head_dim].
        """
        shape = len(head_pages), 1, self.page_tokens
        self._keys[head_pages] = keys.unflatten(0, shape)
        self._values[head_pages] = values.unflatten(0, shape)

    def write_bytes(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Write bytes, [n], into blocks of the scheduler in place of KV, and zeros after them."""
        head_pages = self.of_blocks(blocks)
        shape = len(head_pages), *self._bits.shape[1:]
        room = torch.zeros(shape, dtype=self._bits.dtype)
        room.view(-1).view(torch.uint8)[: len(data)] = torch.from_numpy(data)
        self._bits[head_pages] = room.to(self.device)

    def read_bytes(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return all bytes of blocks of the scheduler: [n]."""
        found = self._bits[self.of_blocks(blocks)].view(-1).view(torch.uint8)
        return found.cpu().numpy()


def why_no_head_pages(caches: Sequence[Tensor]) -> str | None:
    """Return why layers' caches are not one array of head pages; None if they are."""
    first = caches[0]
    if first.dim() != 4 or first.shape[3] % 2 or first.stride(3) != 1:
        return f"a KV cache of shape {tuple(first.shape)} is not of K and V by head"
    if first.element_size() not in INTEGERS:
        return f"a KV cache of {first.dtype} is quantised"
    block, head = first.stride()[:2]
    if block % head or block < head * first.shape[1]:
        return f"blocks are {block} elements apart and heads {head}"
    for number, cache in enumerate(caches):
        if (cache.shape, cache.stride(), cache.dtype) != (
            first.shape,
            first.stride(),
            first.dtype,
        ):
            return f"layer {number}'s KV cache has another shape than the first"
        if cache.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return f"layer {number}'s KV cache is not in the allocation of the first"
        if (cache.storage_offset() - first.storage_offset()) % head:
            return f"layer {number}'s KV cache is not a whole number of heads behind the first"
    return None
