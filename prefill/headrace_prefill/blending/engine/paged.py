"""K and V of single tokens in a paged KV cache, read and written by slot.

A slot is `block * block_tokens + offset`, as in vLLM's slot mapping. `headrace_engine.kv_views`
describes the layouts of caches. The store keeps a block's layer as bytes in memory order, so stored
blocks are read through the same views (`stored_blocks`). Pure torch, any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_engine.kv_views import KvOrder, split_kv


def stored_blocks(bytes_: Tensor, like: Tensor) -> Tensor:
    """Return one layer of stored blocks, viewed as a cache.

    The store keeps a block's bytes in the engine's memory order, outermost axis first
    (`headrace_kvstore.blocks.block_layout`).

    Args:
        bytes_: uint8 [n, bytes of a layer of a block], contiguous.
        like: the engine's cache of one layer.

    Returns:
        A view [n * kernel blocks of a block, heads, tokens of a kernel block, 2 * head_dim] of
        `bytes_`.
    """
    inner = sorted(range(1, 4), key=lambda axis: (-_step(like, axis), axis))
    shape = [like.shape[axis] for axis in inner]
    ordered = bytes_.view(like.dtype).view(-1, *shape)
    return ordered.permute(0, *(1 + inner.index(axis) for axis in range(1, 4)))


def _step(cache: Tensor, axis: int) -> int:
    """Return an axis's stride; 0 for an axis of extent 1, whose stride has no meaning."""
    return cache.stride(axis) if cache.shape[axis] > 1 else 0


@dataclass(frozen=True)
class BlockTable:
    """A request's blocks, and where its positions lie.

    Attributes:
        blocks: int64 [n], block ids in order of position.
        tokens: number of tokens in a block.
    """

    blocks: NDArray[np.int64]
    tokens: int

    def slots(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of these positions.

        Raises:
            IndexError: a position outside the request's blocks.
        """
        if positions.size and (positions.min() < 0 or positions.max() >= self.capacity):
            raise IndexError(
                f"positions {positions.min()} to {positions.max()} of {self.capacity} with blocks"
            )
        slots: NDArray[np.int64] = (
            self.blocks[positions // self.tokens] * self.tokens + positions % self.tokens
        )
        return slots

    @property
    def capacity(self) -> int:
        """Number of positions that have a slot."""
        return len(self.blocks) * self.tokens


class PagedKV:
    """All layers' K and V by slot.

    Args:
        caches: one tensor for each layer, in the model's order, as vLLM allocates them.
        order: order of their last two axes.
        block_tokens: tokens of the scheduler's block; the kernel's may be smaller.

    Raises:
        ValueError: the caches have another layout.
    """

    def __init__(self, caches: Sequence[Tensor], order: KvOrder, block_tokens: int) -> None:
        self.caches = list(caches)
        self.order, self.block_tokens = order, block_tokens
        self._split = [split_kv(cache, order) for cache in caches]
        self.kernel_tokens = caches[0].shape[2]
        if block_tokens % self.kernel_tokens:
            raise ValueError(
                f"KV cache: blocks of {self.kernel_tokens} tokens do not divide {block_tokens}"
            )

    @property
    def device(self) -> torch.device:
        """Device of the caches."""
        return self.caches[0].device

    @property
    def kv_heads(self) -> int:
        """Number of KV heads of each layer."""
        return self.caches[0].shape[1]

    @property
    def head_dim(self) -> int:
        """Channels of a head of K; V has as many."""
        return self.caches[0].shape[3] // 2

    def kernel_blocks(self, table: BlockTable) -> NDArray[np.int64]:
        """Return a request's blocks in the kernel's numbering; consecutive ones form a block."""
        parts = self.block_tokens // self.kernel_tokens
        return (table.blocks[:, None] * parts + np.arange(parts)).reshape(-1)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of K and V of n slots, each [n, heads, head_dim]. `slots`: int64 [n]."""
        keys, values = self._split[layer]
        block, offset = slots // self.kernel_tokens, slots % self.kernel_tokens
        return keys[block, :, offset], values[block, :, offset]

    def put(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write K and V of n slots; shapes as in `gather`."""
        to_keys, to_values = self._split[layer]
        block, offset = slots // self.kernel_tokens, slots % self.kernel_tokens
        to_keys[block, :, offset] = keys.to(to_keys.dtype)
        to_values[block, :, offset] = values.to(to_values.dtype)

    def add(self, layer: int, table: BlockTable, first: int, keys: Tensor, values: Tensor) -> None:
        """Add to K and V of a request's positions from `first` on: fp32 [n, heads, head_dim]."""
        blocks, size = self.kernel_blocks(table), self.kernel_tokens
        for block in range(first // size, -(-(first + len(keys)) // size)):
            begin, end = max(first, block * size), min(first + len(keys), (block + 1) * size)
            within = slice(begin - block * size, end - block * size)
            for into, more in zip(self._split[layer], (keys, values), strict=True):
                into[blocks[block], :, within] += more[begin - first : end - first].transpose(0, 1)
