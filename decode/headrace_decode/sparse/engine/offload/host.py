"""Host memory for KV that left the engine's cache, in units, and the copies between the two.

All layers have the same units. A unit lies in host memory byte for byte as in the cache, so a copy
moves whole rows: a unit of one KV head, or of all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.sparse.engine.keys import Ids, LayerKeys
from headrace_decode.sparse.layout import jit

Words = NDArray[np.int64]


class HostPool:
    """Units of all layers in host memory.

    Args:
        layers: layers of the engine's cache, in order.
        blocks: maximum number of the scheduler's blocks that it holds.
        block_units: number of units in a block.

    Attributes:
        layers: layers over host memory, like those of the cache.
        free_blocks: number of blocks that no request holds.
    """

    def __init__(self, layers: list[LayerKeys], blocks: int, block_units: int) -> None:
        shape = blocks * block_units, *layers[0].cache.shape[1:]
        self.block_units = block_units
        self.layers = [
            LayerKeys(torch.empty(shape, dtype=layer.cache.dtype, device="cpu")) for layer in layers
        ]
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return sum(layer.cache.numel() * layer.cache.element_size() for layer in self.layers)

    def take(self, blocks: int) -> Ids:
        """Take so many free blocks; return their units, int64 [blocks * block_units].

        Raises:
            MemoryError: fewer blocks are free.
        """
        if blocks > len(self._free):
            raise MemoryError(f"{blocks} blocks of host memory, and {len(self._free)} are free")
        taken = np.array([self._free.pop() for _ in range(blocks)], np.int64)
        return (taken[:, None] * self.block_units + np.arange(self.block_units)).reshape(-1)

    def give_back(self, units: Ids) -> None:
        """Give back units that `take` returned."""
        self._free += (units[:: self.block_units] // self.block_units).tolist()


def words(cache: Tensor, by_head: bool) -> Words:
    """Return a view of a cache's bytes: int64 [units, words], or [units * kv_heads, words] by head.

    Args:
        cache: [units, kv_heads, unit_tokens, 2 head_dim].
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
