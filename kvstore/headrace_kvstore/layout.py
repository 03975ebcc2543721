"""Where a KV block's bytes lie in an engine's caches, and in which order a payload holds them.

An engine gives one strided tensor a layer. With the block fixed, the bytes of one layer are one or
more contiguous pieces; this file finds them from shape and strides alone, so that it needs no name
for the layout (NHD, HND, K and V in one row or apart, MLA, layers inside blocks). The payload of a
block is, layer after layer, these pieces in ascending order of address:

    address(block, layer, piece) = base[layer, piece] + block * block_stride[layer]
    payload offset               = layer * layer_bytes + (bytes of the layer's earlier pieces)

Ascending addresses put the axes in memory order, outermost first, which is the same for two caches
of one layout, whatever their block counts. Layers are ordered by name, numbers in names as numbers.

vLLM 0.29 views every cache as `[blocks, heads, tokens, content]`, with the layout in the strides
(`vllm.v1.kv_cache_layout`). Where the kernel's block is smaller than the scheduler's, axis 0 has a
multiple of the scheduler's block count, and consecutive entries form one block. Pure: tensors
are used through `data_ptr`, `shape`, `stride` and `element_size`; torch is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray


class LayoutError(ValueError):
    """Caches whose blocks cannot be told apart or put into one payload; the text says why."""


class CacheTensor(Protocol):
    """The part of torch.Tensor that is used."""

    @property
    def shape(self) -> Any: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Any: ...
    def element_size(self) -> int: ...


@dataclass(frozen=True)
class LayerLayout:
    """One layer's cache. Addresses and sizes in bytes."""

    address: int
    """Of block 0's first element."""
    blocks: int
    block_stride_bytes: int
    offsets: tuple[int, ...]
    """Of the pieces from their block's address, ascending."""
    piece_bytes: tuple[int, ...]
    """Sizes of the pieces, in the same order."""
    axes: str
    """The block's axes in memory order, `axis:extent`, then bytes per element: caches with equal
    `axes` hold blocks of equal meaning at equal places of the payload."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this layer."""
        return sum(self.piece_bytes)


def layer_layout(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    *,
    block_axis: int = 0,
    blocks: int | None = None,
) -> LayerLayout:
    """Find the contiguous pieces of one block in a strided cache.

    Args:
        address: of the element at index zero, in bytes.
        shape, strides: of the cache; strides in elements.
        itemsize: bytes per element.
        block_axis: the axis that counts blocks.
        blocks: the scheduler's block count, when `shape[block_axis]` may be a multiple of it;
            None takes `shape[block_axis]`.

    Raises:
        LayoutError: no memory, an empty axis, a block count that does not fit the axis, or
            elements that overlap.
    """
    if address <= 0 or itemsize <= 0 or len(shape) != len(strides):
        raise LayoutError(f"no cache: address {address}, shape {shape}, strides {strides}")
    if not 0 <= block_axis < len(shape):
        raise LayoutError(f"block axis {block_axis} of a cache of shape {tuple(shape)}")
    if min(shape) <= 0 or min(strides) < 0:
        raise LayoutError(f"shape {tuple(shape)} or strides {tuple(strides)} not positive")
    blocks = shape[block_axis] if blocks is None else blocks
    if blocks <= 0 or shape[block_axis] % blocks:
        raise LayoutError(f"axis {block_axis} of {tuple(shape)} is no multiple of {blocks} blocks")
    kernel_blocks = shape[block_axis] // blocks
    block_stride = strides[block_axis] * kernel_blocks

    # (stride, extent, axis), innermost first; an axis of extent 1 moves nothing
    inner = [
        (stride, extent, axis)
        for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True))
        if axis != block_axis
    ]
    inner.append((strides[block_axis], kernel_blocks, block_axis))
    inner = sorted(axis for axis in inner if axis[1] > 1)
    _refuse_overlap(inner + ([(block_stride, blocks, block_axis)] if blocks > 1 else []))

    run, contiguous = 1, 0
    for stride, extent, _ in inner:
        if stride != run:
            break
        run *= extent
        contiguous += 1
    offsets = np.zeros(1, np.int64)
    for stride, extent, _ in inner[contiguous:]:
        offsets = np.add.outer(np.arange(extent, dtype=np.int64) * stride, offsets).ravel()
    return LayerLayout(
        address=address,
        blocks=blocks,
        block_stride_bytes=block_stride * itemsize,
        offsets=tuple(int(offset) * itemsize for offset in np.sort(offsets)),
        piece_bytes=(run * itemsize,) * len(offsets),
        axes=",".join(f"{axis}:{extent}" for _, extent, axis in reversed(inner)) + f"x{itemsize}",
    )


def _refuse_overlap(axes: list[tuple[int, int, int]]) -> None:
    """Each axis must step over all that the smaller steps reach."""
    reach = 1
    for stride, extent, axis in sorted(axes):
        if stride < reach:
            raise LayoutError(f"axis {axis} steps {stride} elements, others reach {reach}: overlap")
        reach += stride * (extent - 1)


def find_block_axis(shape: Sequence[int], blocks: int) -> int:
    """The axis that counts blocks, for caches that do not have it first.

    Raises:
        LayoutError: no axis, or more than one, is a multiple of the block count: then the caller
            must know.
    """
    found = [axis for axis, extent in enumerate(shape) if extent and extent % blocks == 0]
    if len(found) != 1:
        raise LayoutError(f"axes {found} of {tuple(shape)} may count {blocks} blocks")
    return found[0]


def natural_order(name: str) -> list[tuple[int, str | int]]:
    """Sort key of layer names, with `layers.9` before `layers.10`."""
    return [(1, int(part)) if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True)
class BlockLayout:
    """All layers of one engine that share a block table, in payload order.

    Raises:
        LayoutError: no layers; layers that differ in block count, bytes or order of axes; or
            layers that share bytes (a cache registered under two names, or overlaid groups of a
            hybrid model).
    """

    names: tuple[str, ...]
    layers: tuple[LayerLayout, ...]

    def __post_init__(self) -> None:
        if not self.layers or len(self.names) != len(self.layers):
            raise LayoutError(f"{len(self.names)} names for {len(self.layers)} layers")
        first = self.layers[0]
        for name, layer in zip(self.names, self.layers, strict=True):
            for what, mine, theirs in (
                ("blocks", layer.blocks, first.blocks),
                ("bytes a block", layer.block_bytes, first.block_bytes),
                ("as order of axes", layer.axes, first.axes),
                ("as pieces", layer.piece_bytes, first.piece_bytes),
            ):
                if mine != theirs:
                    raise LayoutError(
                        f"{name} has {mine} {what}, {self.names[0]} has {theirs}: one payload "
                        "holds equal layers only (hybrid models need a layout for each group)"
                    )
        self._refuse_shared_bytes()

    @classmethod
    def of_tensors(
        cls, caches: Mapping[str, CacheTensor], blocks: int, block_axis: int = 0
    ) -> BlockLayout:
        """Layout of what vLLM's `register_kv_caches` hands over.

        Args:
            caches: tensor by layer name; they must stay alive as long as addresses are used.
            blocks: the scheduler's block count (`KVCacheConfig.num_blocks`).
            block_axis: 0 in vLLM since 0.29; see `find_block_axis` for others.

        Raises:
            LayoutError: as `layer_layout` (naming the layer) and `BlockLayout`.
        """
        names = sorted(caches, key=natural_order)
        layers = []
        for name in names:
            cache = caches[name]
            try:
                layer = layer_layout(
                    cache.data_ptr(),
                    tuple(cache.shape),
                    tuple(cache.stride()),
                    cache.element_size(),
                    block_axis=block_axis,
                    blocks=blocks,
                )
            except LayoutError as error:
                raise LayoutError(f"{name}: {error}") from error
            layers.append(layer)
        return cls(tuple(names), tuple(layers))

    @property
    def blocks(self) -> int:
        """Blocks in the engine's cache."""
        return self.layers[0].blocks

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block; the payload's stride."""
        return self.layers[0].block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's payload."""
        return self.layer_bytes * len(self.layers)

    @cached_property
    def piece_bytes(self) -> NDArray[np.uint64]:
        """Shape [pieces]: sizes of a layer's pieces."""
        return np.array(self.layers[0].piece_bytes, np.uint64)

    @property
    def axes(self) -> str:
        """What a payload's bytes mean, for comparing engines: layers, and each one's axes."""
        return f"{len(self.layers)}*({self.layers[0].axes})"

    def engine_addresses(self, block_ids: ArrayLike) -> NDArray[np.uint64]:
        """Shape [blocks asked for, layers, pieces]: addresses in the engine's caches.

        Raises:
            IndexError: an id outside the cache.
        """
        ids = np.asarray(block_ids, np.int64).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= self.blocks):
            raise IndexError(f"block ids {ids.min()} to {ids.max()}, of {self.blocks} blocks")
        steps = ids.astype(np.uint64)[:, None, None] * self._block_strides[None, :, None]
        return self._bases[None] + steps

    def payload_addresses(self, payloads: ArrayLike) -> NDArray[np.uint64]:
        """Shape [payloads, layers, pieces]: addresses of the same pieces in payloads that start at
        these addresses."""
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
        layer = np.arange(len(self.layers), dtype=np.uint64) * np.uint64(self.layer_bytes)
        return layer[:, None] + (np.cumsum(self.piece_bytes) - self.piece_bytes)[None]

    def _refuse_shared_bytes(self) -> None:
        """Pieces of all layers, each repeated `blocks` times a stride apart, must be disjoint.

        Two whose whole ranges are apart are. Interleaved ones (layers inside blocks) must have
        equal strides s; then, for a distance d between their starts, block i of one meets block j
        of the other iff |d + (j - i) s| is less than the size of the one that comes first, and
        only the two multiples next to d can.
        """
        size = np.tile(self.piece_bytes.astype(np.int64), len(self.layers))
        starts = self._bases.ravel().astype(np.int64)
        steps = np.repeat(self._block_strides.astype(np.int64), len(self.piece_bytes))
        owner = np.repeat(np.arange(len(self.layers)), len(self.piece_bytes))
        ends = starts + (self.blocks - 1) * steps + size
        order = np.argsort(starts, kind="stable")
        for at, mine in enumerate(order):
            rest = order[at + 1 :]
            near = rest[(starts[rest] < ends[mine]) & (owner[rest] != owner[mine])]
            if not near.size:
                continue
            step, distance = steps[mine], starts[near] - starts[mine]
            ahead = distance % step if self.blocks > 1 else distance
            beyond_range = distance // max(step, 1) + 1 >= self.blocks
            shared = (steps[near] != step) | (ahead < size[mine])
            shared |= ~beyond_range & (step - ahead < size[near])
            if shared.any():
                one, two = self.names[owner[mine]], self.names[owner[near[shared.argmax()]]]
                raise LayoutError(
                    f"{one} and {two} share bytes, or lie in each other with unequal block strides:"
                    " one cache under two names, or overlaid groups of a hybrid model"
                )
