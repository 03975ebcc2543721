"""An engine's KV cache in host memory whose blocks are stored under a codec.

Checksums are those of the stored bytes. A load first copies these into memory of its own and
decodes from there. So the bytes that were summed are the bytes that are decoded, even if another
process writes to the slot during the load. Stored layers are rounded up to whole pages, because
reading files past the page cache requires it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.checksum import checksum, copy, copy_sum
from headrace_kvstore.blocks.sharding import WHOLE_LAYER, Shard
from headrace_kvstore.codec import Codec, LayerShape, Order
from headrace_kvstore.nvme.record import PAGE_BYTES

ORDERS = {"cpu/vec": Order.VEC, "cuda": Order.HND}
"""Order of elements in vLLM's caches, by device. Kernels on a GPU use strides, so its entry covers
both HND and NHD; the stored bytes are the same."""


def stored_layer_bytes(codec: Codec, shape: LayerShape) -> int:
    """Return the bytes of one stored layer, in whole pages. Raises ValueError for a shape that the
    codec does not take."""
    return -(-codec.stored_bytes(shape) // PAGE_BYTES) * PAGE_BYTES


def layer_shape(spec: Any, device: str) -> LayerShape:
    """Return the shape of a layer of one block, from vLLM's cache specification.

    Args:
        spec: vLLM's AttentionSpec.
        device: as `engine_identity.device_identity` names it.

    Raises:
        ValueError: the order of the cache on this device is not known here.
    """
    if device not in ORDERS:
        known = " and ".join(ORDERS)
        raise ValueError(f"codec: is known for caches on {known}, not on {device}; give raw")
    dtype = str(spec.dtype).removeprefix("torch.")
    shape = LayerShape(*(spec.num_kv_heads, spec.block_size, spec.head_size, dtype), ORDERS[device])
    if shape.layer_bytes != spec.page_size_bytes:
        raise ValueError(
            f"codec: layers of {type(spec).__name__} have {spec.page_size_bytes} bytes a block, "
            f"not {shape.layer_bytes} of keys and values (MLA keeps one vector for both); give raw"
        )
    return shape


class QuantizedCache(EngineCache):
    """Cache in host memory with a codec between engine and payload.

    Args:
        layout: of the engine's cache.
        codec, shape: how a layer of the cache's heads is stored.
        held: the part of a stored layer that the cache has.

    Raises:
        ValueError: the layers are not of that shape.
    """

    def __init__(
        self, layout: BlockLayout, codec: Codec, shape: LayerShape, held: Shard = WHOLE_LAYER
    ) -> None:
        if layout.layer_bytes != shape.layer_bytes:
            raise ValueError(f"layers of {layout.layer_bytes} bytes are not {shape}")
        super().__init__(layout)
        self._coder = codec.bind(shape)
        self.held, self.part_bytes = held, stored_layer_bytes(codec, shape)
        self._coder.warm()

    def load(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        """Decode one layer of n blocks; arguments and checksums as `EngineCache.load`."""
        size = self.part_bytes
        stored = np.empty((len(blocks), size), np.uint8)
        whole = np.empty(self._coder.layer_bytes, np.uint8)
        into = stored.ctypes.data + np.arange(len(blocks), dtype=np.uint64) * np.uint64(size)
        there = np.asarray(payloads, np.uint64) + np.uint64(self.columns(layer).start * size)
        sums = copy_sum(into.reshape(seeds.shape), there.reshape(seeds.shape), size, seeds)
        targets = self.layout.engine_addresses(blocks)[:, layer]
        pieces = self.layout.payload_addresses([whole.ctypes.data])[0, 0]
        for row, target in zip(stored, targets, strict=True):
            self._coder.decode(row[: self._coder.stored_bytes], whole)
            copy(target[None], pieces[None], self.layout.piece_bytes)
        return sums

    def save(self, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Encode n blocks, all layers; arguments and checksums as `EngineCache.save`.

        Raises:
            QuantizationRangeError: a layer holds values that the codec refuses.
        """
        layers, size = len(self.layout.layers), self.part_bytes
        whole = np.empty(self._coder.layer_bytes, np.uint8)
        pieces = self.layout.payload_addresses([whole.ctypes.data])[0, 0]
        sources = self.layout.engine_addresses(blocks)
        places = np.array([self.columns(layer).start * size for layer in range(layers)], np.uint64)
        starts = np.asarray(payloads, np.uint64)[:, None] + places
        for block in range(len(blocks)):
            for layer in range(layers):
                copy(pieces[None], sources[block, layer][None], self.layout.piece_bytes)
                stored = _bytes_at(int(starts[block, layer]), size)
                self._coder.encode(whole, stored[: self._coder.stored_bytes])
                stored[self._coder.stored_bytes :] = 0
        return checksum(starts, size, seeds)


def _bytes_at(address: int, size_bytes: int) -> np.ndarray:
    """Return memory as an array; the caller keeps it alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
