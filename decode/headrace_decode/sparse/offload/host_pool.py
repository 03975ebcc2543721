"""Host memory for KV that left the engine's cache, in pages, and the copies between the two.

All layers have the same pages. A page lies in host memory byte for byte as in the cache, so a copy
moves whole rows: a page of one KV head, or of all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.attention.cpu_cache import Ids, LayerCache, pages_of
from headrace_decode.sparse.summary_layout import jit

Words = NDArray[np.int64]


class HostPool:
    """Pages of all layers in host memory.

    Args:
        layers: layers of the engine's cache, in order.
        blocks: maximum number of the scheduler's blocks that it holds.
        block_pages: number of pages in a block.

    Attributes:
        layers: layers over host memory, like those of the cache.
        free_blocks: number of blocks that no request holds.
    """

    def __init__(self, layers: list[LayerCache], blocks: int, block_pages: int) -> None:
        shape = blocks * block_pages, *layers[0].cache.shape[1:]
        self.block_pages = block_pages
        self.layers = [
            LayerCache(torch.empty(shape, dtype=layer.cache.dtype, device="cpu"))
            for layer in layers
        ]
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return sum(layer.cache.numel() * layer.cache.element_size() for layer in self.layers)

    def allocate(self, blocks: int) -> Ids:
        """Allocate so many free blocks; return their pages, int64 [blocks * block_pages].

        Raises:
            MemoryError: fewer blocks are free.
        """
        if blocks > len(self._free):
            raise MemoryError(f"{blocks} blocks of host memory, and {len(self._free)} are free")
        return pages_of([self._free.pop() for _ in range(blocks)], self.block_pages)

    def free(self, pages: Ids) -> None:
        """Free pages that `allocate` returned."""
        self._free += (pages[:: self.block_pages] // self.block_pages).tolist()


def words(cache: Tensor, by_head: bool) -> Words:
    """Return a view of a cache's bytes: int64 [pages, words], or [pages * kv_heads, words] by head.

    Args:
        cache: [pages, kv_heads, page_tokens, 2 head_dim].
    """
    flat = cache.flatten(2).view(torch.int64).numpy()
    rows = len(flat) * flat.shape[1] if by_head else len(flat)
    found: Words = flat.reshape(rows, -1)
    return found


@jit
def copy_rows(source: Any, from_: Any, into: Any, to: Any) -> None:
    """Copy rows: into[to[n]] = source[from_[n]] for all n."""
    for n in range(from_.size):
        row, other = source[from_[n]], into[to[n]]
        for word in range(row.size):
            other[word] = row[word]
