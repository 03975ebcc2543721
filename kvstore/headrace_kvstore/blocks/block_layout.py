"""The layout of a KV block's bytes in an engine's caches, and their order in a payload.

An engine gives one strided tensor a layer. The bytes that one block has in one layer are one or
more contiguous pieces of equal size. This file finds them from shape and strides alone, so it needs
no name for the layout (NHD, HND, K and V in one row or separate, MLA, layers inside blocks). The
payload of a block holds these pieces, layer after layer and part after part (`parts`), in ascending
order of address. A cache that has `count` of a layer's `parts`, from `first` on, has

    address(block, layer, part, piece) = base[layer, part, piece] + block * block_stride[layer]
    payload offset                     = (layer * parts + first + part) * part_bytes
                                         + piece * piece_bytes

Ascending addresses put the axes in memory order, outermost first, which is the same for two caches
of one layout, whatever their block counts. Layers are ordered by name, numbers in names as numbers.
The layers of different cache groups have different block ids, and may lie in the same memory.

vLLM 0.32 views every cache as `[blocks, heads, tokens, content]`, with the layout in the strides
(`vllm.v1.kv_cache_layout`). Where the kernel's block is smaller than the scheduler's, axis 0 has a
multiple of the scheduler's block count, and consecutive entries form one block. Pure: tensors
are used through `data_ptr`, `shape`, `stride` and `element_size`; torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace_kvstore.blocks.sharding import WHOLE_LAYER, Shard

HEADS = 1
"""The axis of a cache that counts heads."""


class LayoutError(ValueError):
    """Error: a cache's blocks cannot be separated or put into one payload; the text says why."""


@dataclass(frozen=True)
class LayerLayout:
    """One layer's cache. Addresses and sizes in bytes."""

    address: int
    """Address of block 0's first element."""
    blocks: int
    block_stride_bytes: int
    offsets: tuple[int, ...]
    """Offsets of the pieces from their block's address: part after part, ascending in each."""
    piece_bytes: int
    axes: str
    """The block's axes in memory order, `axis:extent`, then bytes per element: caches with equal
    `axes` hold blocks of equal meaning at equal places of the payload."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer."""
        return self.piece_bytes * len(self.offsets)


def layer_layout(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    blocks: int,
    parts: int = 1,
) -> LayerLayout:
    """Find the contiguous pieces of one block in a strided cache whose axis 0 counts blocks.

    Args:
        address: of the element at index zero, in bytes.
        shape, strides: of the cache; strides in elements.
        itemsize: bytes per element.
        blocks: the scheduler's block count; `shape[0]` may be a multiple of it.
        parts: number of parts, each of as many heads.

    Raises:
        LayoutError: no memory, an empty axis, a block count or parts that do not fit their axes, or
            elements that overlap.
    """
    if address <= 0 or itemsize <= 0 or not shape or len(shape) != len(strides):
        raise LayoutError(f"no cache: address {address}, shape {shape}, strides {strides}")
    if min(shape) <= 0 or min(strides) < 0:
        raise LayoutError(f"shape {tuple(shape)} or strides {tuple(strides)} not positive")
    if blocks <= 0 or shape[0] % blocks:
        raise LayoutError(f"axis 0 of {tuple(shape)} is no multiple of {blocks} blocks")
    kernel_blocks = shape[0] // blocks
    block_stride = strides[0] * kernel_blocks

    # (stride, extent, axis), innermost first; an axis of extent 1 has no effect
    extents = [kernel_blocks, *shape[1:]]
    axes = list(zip(strides, extents, range(len(shape)), strict=True))
    inner = sorted(axis for axis in axes if axis[1] > 1)
    _refuse_overlap(inner + ([(block_stride, blocks, 0)] if blocks > 1 else []))

    step = 0
    if parts > 1:
        if len(shape) <= HEADS or shape[HEADS] % parts:
            raise LayoutError(f"axis {HEADS} of {tuple(shape)} has no {parts} parts of equal heads")
        heads = shape[HEADS] // parts
        step = strides[HEADS] * heads
        axes[HEADS] = strides[HEADS], heads, HEADS
    run, contiguous = 1, 0
    of_part = sorted(axis for axis in axes if axis[1] > 1)
    for stride, extent, _ in of_part:
        if stride != run:
            break
        run *= extent
        contiguous += 1
    offsets = np.zeros(1, np.int64)
    for stride, extent, _ in of_part[contiguous:]:
        offsets = np.add.outer(np.arange(extent, dtype=np.int64) * stride, offsets).ravel()
    offsets = np.add.outer(np.arange(parts) * step, np.sort(offsets)).ravel()
    return LayerLayout(
        address=address,
        blocks=blocks,
        block_stride_bytes=block_stride * itemsize,
        offsets=tuple(int(offset) * itemsize for offset in offsets),
        piece_bytes=run * itemsize,
        axes=",".join(f"{axis}:{extent}" for _, extent, axis in reversed(inner)) + f"x{itemsize}",
    )


def _refuse_overlap(axes: list[tuple[int, int, int]]) -> None:
    """Check that each axis steps over all elements that the smaller steps reach; else raise."""
    reach = 1
    for stride, extent, axis in sorted(axes):
        if stride < reach:
            raise LayoutError(f"axis {axis} steps {stride} elements, others reach {reach}: overlap")
        reach += stride * (extent - 1)


def natural_order(name: str) -> list[tuple[int, str | int]]:
    """Sort key of layer names, with `layers.9` before `layers.10`."""
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True)
class BlockLayout:
    """All layers of one engine, in payload order.

    `shard` says which parts of each stored layer this engine's cache has. `groups` has the number
    of each layer's cache group; without it all layers are in one.

    Raises:
        LayoutError: no layers; layers that differ in block count, bytes or order of axes; or
            layers of one group that share bytes (a cache registered under two names).
    """

    names: tuple[str, ...]
    layers: tuple[LayerLayout, ...]
    shard: Shard = WHOLE_LAYER
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers or len(self.names) != len(self.layers):
            raise LayoutError(f"{len(self.names)} names for {len(self.layers)} layers")
        if not self.groups:
            object.__setattr__(self, "groups", (0,) * len(self.layers))
        first = self.layers[0]
        for name, layer in zip(self.names, self.layers, strict=True):
            for what, mine, theirs in (
                ("blocks", layer.blocks, first.blocks),
                ("bytes a block", layer.block_bytes, first.block_bytes),
                ("as order of axes", layer.axes, first.axes),
                ("bytes a piece", layer.piece_bytes, first.piece_bytes),
            ):
                if mine != theirs:
                    raise LayoutError(
                        f"{name} has {mine} {what}, {self.names[0]} has {theirs}: one payload "
                        "holds equal layers only"
                    )
        groups = np.array(self.groups)
        for group in np.unique(groups):
            self._refuse_shared_bytes(np.flatnonzero(groups == group))

    @classmethod
    def of_tensors(
        cls,
        caches: Mapping[str, Any],
        blocks: int,
        shard: Shard = WHOLE_LAYER,
        groups: Mapping[str, int] | None = None,
    ) -> BlockLayout:
        """Return the layout of the caches that vLLM's `register_kv_caches` hands over.

        Args:
            caches: tensor by layer name; they must stay alive as long as addresses are used.
            blocks: the scheduler's block count (`KVCacheConfig.num_blocks`).
            shard: which parts of each layer they hold.
            groups: number of each layer's cache group; None if there is one.

        Raises:
            LayoutError: as `layer_layout` (naming the layer) and `BlockLayout`.
        """
        names = sorted(caches, key=natural_order)
        layers = []
        for name in names:
            cache = caches[name]
            memory = cache.data_ptr(), tuple(cache.shape), tuple(cache.stride())
            try:
                layers.append(layer_layout(*memory, cache.element_size(), blocks, shard.count))
            except LayoutError as error:
                raise LayoutError(f"{name}: {error}") from error
        numbers = () if groups is None else tuple(groups[name] for name in names)
        return cls(tuple(names), tuple(layers), shard, numbers)

    @property
    def blocks(self) -> int:
        """Blocks in the engine's cache."""
        return self.layers[0].blocks

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block in the engine's cache."""
        return self.layers[0].block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in the engine's cache."""
        return self.layer_bytes * len(self.layers)

    @property
    def part_bytes(self) -> int:
        """Bytes of one part of one layer."""
        return self.layer_bytes // self.shard.count

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block's payload, the parts that other engines hold included."""
        return self.part_bytes * self.shard.parts * len(self.layers)

    @property
    def piece_bytes(self) -> int:
        """Bytes of each piece."""
        return self.layers[0].piece_bytes

    def engine_addresses(self, block_ids: ArrayLike) -> NDArray[np.uint64]:
        """Return addresses in the engine's caches, shape [blocks asked for, layers, pieces].

        Args:
            block_ids: [n], the same for all layers, or [n, groups].

        Raises:
            IndexError: an id outside the cache.
        """
        ids = np.asarray(block_ids, np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.blocks):
            raise IndexError(f"block ids {ids.min()} to {ids.max()}, of {self.blocks} blocks")
        ids = ids.reshape(len(ids), -1) if ids.size else ids.reshape(0, 1)
        if ids.shape[1] > 1:
            ids = ids[:, self.groups]
        steps = ids.astype(np.uint64)[:, :, None] * self._block_strides[None, :, None]
        return self._bases[None] + steps

    def payload_addresses(self, payloads: ArrayLike) -> NDArray[np.uint64]:
        """Return addresses of the same pieces in payloads that start at these addresses, shape
        [payloads, layers, pieces]. A layer's pieces are contiguous."""
        starts = np.asarray(payloads, np.uint64).reshape(-1)
        return starts[:, None, None] + self._payload_offsets[None]

    @cached_property
    def _bases(self) -> NDArray[np.uint64]:
        rows = [[layer.address + offset for offset in layer.offsets] for layer in self.layers]
        return np.array(rows, np.uint64)

    @cached_property
    def _block_strides(self) -> NDArray[np.uint64]:
        return np.array([layer.block_stride_bytes for layer in self.layers], np.uint64)

    @cached_property
    def _payload_offsets(self) -> NDArray[np.uint64]:
        pieces = np.arange(len(self.layers[0].offsets)) * self.piece_bytes
        layers = np.arange(len(self.layers)) * self.shard.parts + self.shard.first
        return np.add.outer(layers * self.part_bytes, pieces).astype(np.uint64)

    def _refuse_shared_bytes(self, layers: NDArray[np.int64]) -> None:
        """Refuse layers of one group that share bytes. Layers with overlapping ranges must lie
        inside each other's blocks: with one stride for all, within which no piece reaches into
        another."""
        pieces, size = len(self.layers[0].offsets), self.piece_bytes
        first = self._bases[layers].ravel().astype(np.int64)
        steps = np.repeat(self._block_strides[layers].astype(np.int64), pieces)
        ends = first + (self.blocks - 1) * steps + size
        order = np.argsort(first, kind="stable")
        apart = np.maximum.accumulate(ends[order])[:-1] <= first[order][1:]
        for run in np.split(order, np.flatnonzero(apart) + 1):
            places = np.sort((first[run] - first[run[0]]) % max(1, steps[run[0]]))
            gaps = np.diff(places, append=places[0] + steps[run[0]])
            if len(run) > 1 and ((steps[run] != steps[run[0]]).any() or gaps.min() < size):
                names = sorted({self.names[layers[i // pieces]] for i in run})
                raise LayoutError(
                    f"{' and '.join(names[:2])} share bytes, or lie in each other with unequal "
                    "block strides: one cache under two names, or layers of two cache groups"
                )
