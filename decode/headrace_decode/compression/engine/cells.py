"""The KV cache of an engine as one array of cells. A cell is a unit of one KV head in one layer.

vLLM allocates all layers at once, one after the other. Any cell can therefore hold KV of any layer
and head: a few heads that need much can use the cells that a block of the scheduler has in all
layers. An attention kernel that takes a table for each head reads cells wherever they lie.

    cell = (layer * units + unit) * kv_heads + head
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.sparse.engine.keys import Ids, LayerKeys


class Cells:
    """All cells of a KV cache.

    Args:
        layers: layers of the cache, in order.
        block_units: number of units of a block of the scheduler.

    Raises:
        ValueError: layers do not lie one after the other.
    """

    def __init__(self, layers: Sequence[LayerKeys], block_units: int) -> None:
        first = layers[0].cache
        if why := why_apart([layer.cache for layer in layers]):
            raise ValueError(why)
        self.layers, self.block_units = list(layers), block_units
        self.kv_heads, self.unit_tokens = layers[0].kv_heads, layers[0].unit_tokens
        self.in_block = len(layers) * block_units * self.kv_heads
        """Number of cells of a block of the scheduler."""
        self._units = layers[0].blocks
        shape = len(layers) * self._units * self.kv_heads, 1, *first.shape[2:]
        size = first.shape[2] * first.shape[3]
        whole = first.as_strided(shape, (size, size, first.shape[3], 1))
        self._all = LayerKeys(whole)
        self._bytes = whole.flatten(1).view(torch.uint8)
        self.kernel = self._all.as_kernel()
        """K and V as the attention kernel takes them; each cell is a block."""

    def number(self, layer: int | Ids, units: Ids) -> Ids:
        """Return the cells of units of one layer: int64 [kv_heads, n]. For layers [l, 1, 1], return
        int64 [l, kv_heads, n]."""
        heads = np.arange(self.kv_heads)[:, None]
        return (layer * self._units + units) * self.kv_heads + heads

    def of_blocks(self, blocks: Sequence[int]) -> Ids:
        """Return all cells of blocks of the scheduler: int64 [n]."""
        per = np.arange(self.block_units)
        units = (np.asarray(blocks, np.int64)[:, None] * self.block_units + per).reshape(-1)
        layers = range(len(self.layers))
        return np.concatenate([self.number(layer, units).reshape(-1) for layer in layers])

    def read(self, layer: int, units: Ids) -> tuple[Tensor, Tensor]:
        """Copy K and V of a request's units of one layer: each
        [kv_heads, n * unit_tokens, head_dim]."""
        both = self.layers[layer].read(units), self.layers[layer].read_values(units)
        keys, values = (one.transpose(0, 1).flatten(1, 2) for one in both)
        return keys, values

    def read_cells(self, cells: Ids) -> tuple[Tensor, Tensor]:
        """Copy K and V of cells, int64 [kv_heads, n]: each
        [kv_heads, n * unit_tokens, head_dim]."""
        flat = cells.reshape(-1)
        both = self._all.read(flat), self._all.read_values(flat)
        keys, values = (one.reshape(len(cells), -1, one.shape[-1]) for one in both)
        return keys, values

    def write(self, cells: Ids, keys: Tensor, values: Tensor) -> None:
        """Fill cells.

        Args:
            cells: int64 [n]. keys, values: [n * unit_tokens, head_dim].
        """
        shape = len(cells), 1, self.unit_tokens
        self._all.write(cells, keys.unflatten(0, shape), values.unflatten(0, shape))

    def write_bytes(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Write bytes, [n], into blocks of the scheduler in place of KV, and zeros after them."""
        cells = torch.from_numpy(self.of_blocks(blocks))
        room = torch.zeros(len(cells), self._bytes.shape[1], dtype=torch.uint8)
        room.view(-1)[: len(data)] = torch.from_numpy(data)
        self._bytes[cells] = room

    def read_bytes(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return all bytes of blocks of the scheduler: [n]."""
        return self._bytes[torch.from_numpy(self.of_blocks(blocks))].view(-1).numpy()


def why_apart(caches: Sequence[Tensor]) -> str | None:
    """Return why layers' caches are not one array of cells; None if they are."""
    first = caches[0]
    size = first.numel() * first.element_size()
    for number, cache in enumerate(caches):
        if cache.shape != first.shape or cache.dtype != first.dtype or not cache.is_contiguous():
            return f"layer {number}'s KV cache has another shape than the first"
        same = cache.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or cache.data_ptr() - first.data_ptr() != number * size:
            return f"layer {number}'s KV cache does not lie behind that of the layer before"
    return None
