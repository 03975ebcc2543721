"""One layer's pages in vLLM's CPU cache: reads, writes, and sums of the bytes of their keys.

vLLM 0.32 lays a layer out as `[blocks, heads, tokens, 2 head_dim]`. Within a block and head, the
instruction sets `vec` and `vec16` keep K as `[head_dim, tokens]`, then V as `[tokens, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_engine.kv_views import KvOrder, split_kv
from headrace_kvstore.blocks.checksum import checksum

Ids = NDArray[np.int64]
Kernel = Callable[..., None]
"""(query, keys, values, output, starts, lengths, table, schedule, scale): vLLM's attention over
[tokens, heads, head_dim], with blocks of one KV head."""


def pages_of(blocks: Sequence[int] | Ids, block_pages: int) -> Ids:
    """Return the pages of blocks of the scheduler, `block_pages` each: int64 [n]."""
    first = np.asarray(blocks, np.int64)[:, None] * block_pages
    return (first + np.arange(block_pages)).reshape(-1)


class LayerCache:
    """Views of one layer's cache.

    Args:
        cache: [blocks, kv_heads, page_tokens, 2 head_dim], contiguous, in host memory.

    Raises:
        ValueError: a cache of another form.
    """

    def __init__(self, cache: Tensor) -> None:
        if cache.dim() != 4 or not cache.is_contiguous() or cache.device.type != "cpu":
            raise ValueError(f"a KV cache of shape {tuple(cache.shape)} is not contiguous on a CPU")
        self.cache = cache
        self.blocks, self.kv_heads, self.page_tokens, both = cache.shape
        self.head_dim = both // 2
        self._keys, self._values = split_kv(cache, KvOrder.VEC)
        self.key_bytes = self.page_tokens * self.head_dim * cache.element_size()
        """Bytes of the keys of one page and head."""

    def read(self, pages: Ids) -> Tensor:
        """Copy the keys of n pages: [n, kv_heads, page_tokens, head_dim]."""
        return self._keys[torch.from_numpy(pages)]

    def read_values(self, pages: Ids) -> Tensor:
        """Copy the values of n pages, in the same shape."""
        return self._values[torch.from_numpy(pages)]

    def write(self, pages: Ids, keys: Tensor, values: Tensor) -> None:
        """Write n pages; shapes as for `read`."""
        at = torch.from_numpy(pages)
        self._keys[at], self._values[at] = keys, values

    def by_head(self) -> tuple[Tensor, Tensor]:
        """Return K and V as the kernel takes them, where each head's page is a block of its own:
        page `u` of head `h` is block `u * kv_heads + h`, of one KV head."""
        return self._split(self.blocks * self.kv_heads, 1)

    def as_kernel(self) -> tuple[Tensor, Tensor]:
        """Return K and V as the kernel takes them; each page is a block."""
        return self._split(self.blocks, self.kv_heads)

    def _split(self, blocks: int, heads: int) -> tuple[Tensor, Tensor]:
        shape = blocks, heads, 2 * self.page_tokens, self.head_dim
        keys, values = self.cache.view(shape).chunk(2, dim=2)
        return keys, values


class KeyChecksums:
    """Sums of the bytes of pages' keys, over all layers.

    Args:
        layers: layers in order.
    """

    def __init__(self, layers: list[LayerCache]) -> None:
        first = layers[0]
        head_bytes = 2 * first.key_bytes
        starts = np.array([layer.cache.data_ptr() for layer in layers], np.uint64)
        heads = np.arange(first.kv_heads, dtype=np.uint64) * np.uint64(head_bytes)
        self._places = starts[:, None] + heads
        self._step, self._bytes = np.uint64(head_bytes * first.kv_heads), first.key_bytes

    def of(self, pages: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the sums of n pages: u64 [n, layers]. Sums of equal bytes are equal; sums of other
        bytes are equal with probability 2^-64 (`headrace_kvstore.blocks.checksum`)."""
        steps = pages.astype(np.uint64) * self._step
        places = self._places + steps[:, None, None]
        return checksum(places, self._bytes, np.zeros(places.shape[:2], np.uint64))
