"""An engine's KV cache in device memory: blocks go straight between it and payloads in host memory.

A layer of some blocks crosses the bus in one batch of copies. On the device one kernel then puts it
where the engine keeps it and sums its parts (`device.checksum_kernels`), or sums and decodes it.
The host touches no byte. Saves go the other way. Loads and saves have a stream each. A load begins
after everything that the computing thread had queued when the step began (`fence`).

On CPU tensors, in Triton's interpreter, the results equal those of `EngineCache` and
`QuantizedCache`, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.connector.caches.quantized_cache import stored_layer_bytes
from headrace_engine.vllm.kv_cache import copy_batch
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.sharding import Shard
from headrace_kvstore.codec import Codec, LayerShape, QuantizationRangeError
from headrace_kvstore.device.checksum_kernels import copy_sum
from headrace_kvstore.device.clock import CudaClock
from headrace_kvstore.device.codec_kernels import DeviceCoder, LayerStrides
from headrace_kvstore.device.copy_stream import CopyStream, RegisteredMemory

STAGING_BYTES = 64 * 2**20
"""Device memory for blocks on their way, for each direction."""


class DeviceCache(EngineCache):
    """Cache on a device.

    Args:
        caches: tensor by layer name, as vLLM's `register_kv_caches` hands over.
        layout: found from them.
        codec, shape: how a layer of the cache's heads is stored; None if its own bytes are stored.
        held: the part of a stored layer that the cache has; None for the layout's own.
        staging_bytes: as `STAGING_BYTES`; 0 for a cache that is only summed.
        saves: whether blocks are saved, too.

    Attributes:
        device: where the cache is.

    Raises:
        ValueError: no kernel takes such layers.
    """

    def __init__(
        self,
        caches: Mapping[str, Tensor],
        layout: BlockLayout,
        codec: Codec | None = None,
        shape: LayerShape | None = None,
        held: Shard | None = None,
        *,
        staging_bytes: int = STAGING_BYTES,
        saves: bool = True,
    ) -> None:
        self.layout, self.layer_names, self.groups = layout, layout.names, layout.groups
        self.held, self.part_bytes = held or layout.shard, layout.part_bytes
        self._made_of = caches, codec, shape, held
        first = caches[layout.names[0]]
        self.device, self._registered = first.device, RegisteredMemory(first.device)
        self._coder: DeviceCoder | None = None
        if codec is not None and shape is not None:
            strides = layer_strides(first, layout, shape)
            self._coder = DeviceCoder(codec, shape, strides)
            self.part_bytes = stored_layer_bytes(codec, shape)
        least = self.stored_layer_bytes + layout.layer_bytes
        room = max(staging_bytes, least) if staging_bytes else 0
        self._at_once = room // self.stored_layer_bytes
        self._in = CopyStream(self.device, room, copy_batch)
        self._out = CopyStream(self.device, room * saves, copy_batch)
        self.load_clock = self._in.clock
        if self.device.type == "cuda":
            self.step_clock = CudaClock(self.device)

    def beside(self) -> DeviceCache:
        """Return the same cache with a lane of its own: its loads wait for no others. It saves
        nothing."""
        caches, codec, shape, held = self._made_of
        return DeviceCache(caches, self.layout, codec, shape, held, saves=False)

    def warm(self) -> None:
        """Compile the kernels now and not in a step: some seconds, once on a machine."""
        lane, one, size = self._out, np.zeros(1, np.int64), self.stored_layer_bytes
        with lane.exclusive():
            rows = self._rows(lane, slice(0, 1))
            seeds = lane.upload(np.zeros((1, self.held.count), np.uint64))
            unfit = torch.zeros(1, dtype=torch.int32, device=self.device)
            self._pack(lane, 0, one, rows, seeds, unfit)
            if self._coder is not None:
                # Into memory of the lane, not into a block.
                self._coder.decode(rows, lane.upload(_addresses(lane.staging[None, size:])))
        lane.drain()

    def register(self, address: int, size_bytes: int) -> None:
        if self.device.type == "cuda":
            self._registered.add(address, size_bytes)

    def unregister(self, address: int) -> None:
        self._registered.remove(address)

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
        """Copy one layer of n blocks in, as `EngineCache.load`; return when the device holds
        them."""
        return self.start(layer, blocks, payloads, seeds)()

    def start(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> Callable[[], np.ndarray]:
        """Queue a load; otherwise as `EngineCache.start`."""
        lane, size = self._in, self.stored_layer_bytes
        stored = self._stored(layer, payloads)
        with lane.exclusive():
            sums = []
            for some in self._batches(len(blocks)):
                rows = self._rows(lane, some)
                lane.copy(_addresses(rows), stored[some], size)
                sums.append(self._unpack(lane, layer, blocks[some], rows, lane.upload(seeds[some])))
            none = np.zeros(seeds.shape, np.int64)
            found = lane.fetch(torch.cat(sums)) if sums else (lambda: none)
        return lambda: found().view(np.uint64)

    def take(self, layer: int, blocks: np.ndarray, rows: Tensor, seeds: np.ndarray) -> np.ndarray:
        """Move one layer of n blocks in from stored bytes that are in device memory already;
        otherwise as `EngineCache.load`.

        Args:
            rows: uint8 [n, stored bytes of a layer], free again on return.
        """
        lane = self._in
        with lane.exclusive():
            found = lane.fetch(self._unpack(lane, layer, blocks, rows, lane.upload(seeds)))
        return found().view(np.uint64)

    def save(self, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Copy n blocks out, all layers, as `EngineCache.save`.

        Raises:
            QuantizationRangeError: a layer holds values that the codec refuses.
        """
        lane, size = self._out, self.stored_layer_bytes
        count = self.held.count
        with lane.exclusive():
            sums = torch.empty(seeds.shape, dtype=torch.int64, device=self.device)
            unfit = torch.zeros(len(blocks), dtype=torch.int32, device=self.device)
            for layer in range(len(self.layer_names)):
                stored = self._stored(layer, payloads)
                mine = slice(layer * count, (layer + 1) * count)
                for some in self._batches(len(blocks)):
                    rows, asked = self._rows(lane, some), lane.upload(seeds[some, mine])
                    sums[some, mine] = self._pack(
                        lane, layer, blocks[some], rows, asked, unfit[some]
                    )
                    lane.copy(stored[some], _addresses(rows), size)
            refused, found = lane.fetch(unfit), lane.fetch(sums)
        result = found().view(np.uint64)
        if refused().any():
            raise QuantizationRangeError("layers with values not finite or too large")
        return result

    def sums(self, blocks: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Return checksums as `EngineCache.sums`, computed on the device: it sends 8 bytes a block
        and part."""
        lane = self._in
        with lane.exclusive():
            places, asked = self.layout.engine_addresses(blocks), lane.upload(seeds)
            found = lane.fetch(self._copy_sum(None, self._by_part(lane, places), asked))
        return found().view(np.uint64)

    def _unpack(
        self, lane: CopyStream, layer: int, blocks: np.ndarray, rows: Tensor, seeds: Tensor
    ) -> Tensor:
        """Move stored rows into the cache; return their sums, int64 [n, parts] as the seeds."""
        places = self.layout.engine_addresses(blocks)[:, layer]
        if self._coder is None:
            return self._copy_sum(self._by_part(lane, places), self._pieces(lane, rows), seeds)
        self._coder.decode(rows, lane.upload(places[:, 0]))
        return self._row_sums(lane, rows, seeds)

    def _pack(
        self,
        lane: CopyStream,
        layer: int,
        blocks: np.ndarray,
        rows: Tensor,
        seeds: Tensor,
        unfit: Tensor,
    ) -> Tensor:
        """Move blocks of the cache into stored rows; return the rows' sums, int64 [n, parts] as the
        seeds."""
        places = self.layout.engine_addresses(blocks)[:, layer]
        if self._coder is None:
            return self._copy_sum(self._pieces(lane, rows), self._by_part(lane, places), seeds)
        self._coder.encode(lane.upload(places[:, 0]), rows, unfit)
        return self._row_sums(lane, rows, seeds)

    def _copy_sum(self, dst: Tensor | None, src: Tensor, seeds: Tensor) -> Tensor:
        """Copy and sum parts; return the sums in the shape of the seeds."""
        return copy_sum(dst, src, self.layout.piece_bytes, seeds.view(-1)).view(seeds.shape)

    def _row_sums(self, lane: CopyStream, rows: Tensor, seeds: Tensor) -> Tensor:
        """Return the sums of coded rows, each of which is a part."""
        there = lane.upload(_addresses(rows)[:, None])
        return copy_sum(None, there, rows.shape[1], seeds.view(-1)).view(seeds.shape)

    def _pieces(self, lane: CopyStream, rows: Tensor) -> Tensor:
        """Return the addresses, int64 [parts, pieces], of a layer's pieces in its stored rows."""
        pieces = len(self.layout.layers[0].offsets)
        steps = np.arange(pieces, dtype=np.uint64) * np.uint64(self.layout.piece_bytes)
        return self._by_part(lane, np.add.outer(_addresses(rows), steps))

    def _by_part(self, lane: CopyStream, places: np.ndarray) -> Tensor:
        """Return addresses of pieces, part after part, as int64 [parts, pieces]."""
        pieces = len(self.layout.layers[0].offsets) // self.layout.shard.count
        return lane.upload(places.reshape(-1, pieces))

    def _stored(self, layer: int, payloads: np.ndarray) -> np.ndarray:
        """Return where a layer's parts begin in payloads, u64 [n]."""
        first = np.uint64(self.columns(layer).start * self.part_bytes)
        return np.asarray(payloads, np.uint64) + first

    def _rows(self, lane: CopyStream, some: slice) -> Tensor:
        """Return device memory for some stored layers, uint8 [n, bytes]."""
        size, count = self.stored_layer_bytes, some.stop - some.start
        return lane.staging[: count * size].view(count, size)

    def _batches(self, blocks: int) -> list[slice]:
        """Return runs of blocks whose layer fits into the lane's memory."""
        step = self._at_once
        return [slice(i, min(blocks, i + step)) for i in range(0, blocks, step)]


def layer_strides(cache: Tensor, layout: BlockLayout, shape: LayerShape) -> LayerStrides:
    """Return the strides of vLLM's cache [blocks, heads, tokens, K then V].

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
    """Return the addresses, u64 [n], of the rows of a contiguous tensor of bytes."""
    step = np.uint64(rows.stride(0))
    return np.uint64(rows.data_ptr()) + step * np.arange(len(rows), dtype=np.uint64)
