"""An engine's KV cache in device memory: blocks go straight between it and payloads in host memory.

A layer of some blocks crosses the bus in one batch of copies. On the device one kernel then puts it
where the engine keeps it and sums it (`device.kernels`), or sums and decodes it. The host touches
no byte. Saves go the other way. Loads and saves have a stream each. A load begins behind everything
that the computing thread had queued when the step began (`fence`).

On CPU tensors, in Triton's interpreter, it does the same as `EngineCache` and `CodedCache`, byte
for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_kvstore.codec import Codec, LayerShape, Unfit
from headrace_kvstore.connector.cache import EngineCache
from headrace_kvstore.connector.coded import stored_layer_bytes
from headrace_kvstore.device.clock import CudaClock
from headrace_kvstore.device.codec_kernels import DeviceCoder, LayerStrides
from headrace_kvstore.device.kernels import copy_sum
from headrace_kvstore.device.lane import Lane, Registered
from headrace_kvstore.layout import BlockLayout

STAGING_BYTES = 64 * 2**20
"""Device memory for blocks on their way, for each direction."""


class DeviceCache(EngineCache):
    """The cache is on a device.

    Args:
        caches: tensor by layer name, as vLLM's `register_kv_caches` hands over.
        layout: found from them.
        codec, shape: how a layer is stored; neither for its own bytes.
        staging_bytes: as `STAGING_BYTES`; 0 for a cache that is only summed.
        saves: whether blocks are saved, too.

    Raises:
        ValueError: no kernel takes such layers.
    """

    def __init__(
        self,
        caches: Mapping[str, Tensor],
        layout: BlockLayout,
        codec: Codec | None = None,
        shape: LayerShape | None = None,
        *,
        staging_bytes: int = STAGING_BYTES,
        saves: bool = True,
    ) -> None:
        self.layout, self.layer_names = layout, layout.names
        self._made_of = caches, codec, shape
        first = caches[layout.names[0]]
        self._device, self._registered = first.device, Registered(first.device)
        self._coder: DeviceCoder | None = None
        self.stored_layer_bytes = layout.layer_bytes
        if codec is not None and shape is not None:
            strides = layer_strides(first, layout, shape)
            self._coder = DeviceCoder(codec, shape, strides)
            self.stored_layer_bytes = stored_layer_bytes(codec, shape)
        least = self.stored_layer_bytes + layout.layer_bytes
        room = max(staging_bytes, least) if staging_bytes else 0
        self._at_once = room // self.stored_layer_bytes
        self._in, self._out = Lane(self._device, room), Lane(self._device, room * saves)
        self.load_clock = self._in.clock
        if self._device.type == "cuda":
            self.step_clock = CudaClock(self._device)

    def beside(self) -> DeviceCache:
        """The same cache with a lane of its own: its loads wait for no others. It saves nothing."""
        caches, codec, shape = self._made_of
        return DeviceCache(caches, self.layout, codec, shape, saves=False)

    def warm(self) -> None:
        """Compile the kernels now and not in a step: some seconds, once on a machine."""
        lane, one, size = self._out, np.zeros(1, np.int64), self.stored_layer_bytes
        with lane.alone():
            rows, seeds = self._rows(lane, slice(0, 1)), lane.upload(np.zeros(1, np.uint64))
            self._pack(lane, 0, one, rows, seeds, torch.zeros_like(seeds, dtype=torch.int32))
            if self._coder is not None:
                # Into memory of the lane, not into a block.
                self._coder.decode(rows, lane.upload(_addresses(lane.staging[None, size:])))
        lane.drain()

    def register(self, address: int, size_bytes: int) -> None:
        if self._device.type == "cuda":
            self._registered.add(address, size_bytes)

    def close(self) -> None:
        self.drain()
        self._registered.close()

    def fence(self) -> Any:
        self._in.wait_for_current()
        return self.load_clock.mark()

    def drain(self) -> None:
        self._in.drain()
        self._out.drain()

    def load(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        """As `EngineCache.load`; returns when the device holds the blocks."""
        return self.start(layer, blocks, payloads, seeds)()

    def start(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> Callable[[], np.ndarray]:
        """Queue a load; the rest as `EngineCache.start`."""
        lane, size = self._in, self.stored_layer_bytes
        stored = np.asarray(payloads, np.uint64) + np.uint64(layer * size)
        with lane.alone():
            sums = []
            for part in self._parts(len(blocks)):
                rows = self._rows(lane, part)
                lane.copy(_addresses(rows), stored[part], size)
                sums.append(self._unpack(lane, layer, blocks[part], rows, lane.upload(seeds[part])))
            found = lane.fetch(torch.cat(sums)) if sums else (lambda: np.zeros(0, np.int64))
        return lambda: found().view(np.uint64)

    def save(self, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """As `EngineCache.save`.

        Raises:
            Unfit: a layer holds values that the codec refuses.
        """
        lane, size = self._out, self.stored_layer_bytes
        starts = np.asarray(payloads, np.uint64)
        with lane.alone():
            sums = torch.empty(seeds.shape, dtype=torch.int64, device=self._device)
            unfit = torch.zeros(len(blocks), dtype=torch.int32, device=self._device)
            for layer in range(len(self.layer_names)):
                for part in self._parts(len(blocks)):
                    rows, asked = self._rows(lane, part), lane.upload(seeds[part, layer])
                    sums[part, layer] = self._pack(
                        lane, layer, blocks[part], rows, asked, unfit[part]
                    )
                    lane.copy(starts[part] + np.uint64(layer * size), _addresses(rows), size)
            refused, found = lane.fetch(unfit), lane.fetch(sums)
        result = found().view(np.uint64)
        if refused().any():
            raise Unfit("layers with values not finite or too large")
        return result

    def sums(self, blocks: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """As `EngineCache.sums`, computed on the device: 8 bytes a block and layer leave it."""
        pieces, lane = len(self.layout.layers[0].offsets), self._in
        with lane.alone():
            places = lane.upload(self.layout.engine_addresses(blocks).reshape(-1, pieces))
            asked = lane.upload(seeds.reshape(-1))
            found = lane.fetch(copy_sum(None, places, self.layout.piece_bytes, asked))
        return found().view(np.uint64).reshape(seeds.shape)

    def _unpack(
        self, lane: Lane, layer: int, blocks: np.ndarray, rows: Tensor, seeds: Tensor
    ) -> Tensor:
        """From stored rows into the cache; sums int64 [n] of the rows."""
        places = lane.upload(self.layout.engine_addresses(blocks)[:, layer])
        if self._coder is None:
            return copy_sum(places, self._pieces(lane, rows), self.layout.piece_bytes, seeds)
        self._coder.decode(rows, places[:, 0].contiguous())
        return self._row_sums(lane, rows, seeds)

    def _pack(
        self,
        lane: Lane,
        layer: int,
        blocks: np.ndarray,
        rows: Tensor,
        seeds: Tensor,
        unfit: Tensor,
    ) -> Tensor:
        """From the cache into stored rows; sums int64 [n] of the rows."""
        places = lane.upload(self.layout.engine_addresses(blocks)[:, layer])
        if self._coder is None:
            return copy_sum(self._pieces(lane, rows), places, self.layout.piece_bytes, seeds)
        self._coder.encode(places[:, 0].contiguous(), rows, unfit)
        return self._row_sums(lane, rows, seeds)

    def _row_sums(self, lane: Lane, rows: Tensor, seeds: Tensor) -> Tensor:
        return copy_sum(None, lane.upload(_addresses(rows)[:, None]), rows.shape[1], seeds)

    def _pieces(self, lane: Lane, rows: Tensor) -> Tensor:
        """Addresses int64 [n, pieces] of a layer's pieces in its stored rows."""
        return lane.upload(self.layout.payload_addresses(_addresses(rows))[:, 0])

    def _rows(self, lane: Lane, part: slice) -> Tensor:
        """Device memory for some stored layers, uint8 [n, bytes]."""
        size, count = self.stored_layer_bytes, part.stop - part.start
        return lane.staging[: count * size].view(count, size)

    def _parts(self, blocks: int) -> list[slice]:
        """Runs of blocks of which a layer fits into the lane's memory."""
        step = self._at_once
        return [slice(i, min(blocks, i + step)) for i in range(0, blocks, step)]


def layer_strides(cache: Tensor, layout: BlockLayout, shape: LayerShape) -> LayerStrides:
    """Where keys and values lie in vLLM's cache [blocks, heads, tokens, K then V].

    Raises:
        ValueError: the cache is not of that form.
    """
    wanted = (layout.blocks, shape.kv_heads, shape.block_tokens, 2 * shape.head_dim)
    if tuple(cache.shape) != wanted or cache.stride(3) != 1:
        raise ValueError(
            f"codec: caches of shape {tuple(cache.shape)} with strides {cache.stride()} are not "
            f"{wanted}, keys before values; give raw"
        )
    return LayerStrides(cache.stride(1), cache.stride(2), shape.head_dim)


def _addresses(rows: Tensor) -> np.ndarray:
    """u64 [n], of the rows of a contiguous tensor of bytes."""
    step = np.uint64(rows.stride(0))
    return np.uint64(rows.data_ptr()) + step * np.arange(len(rows), dtype=np.uint64)
