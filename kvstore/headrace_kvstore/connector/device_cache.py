"""An engine's KV cache in device memory: blocks in and out through pinned host memory.

Device-neutral torch. On a CPU tensor it gives byte for byte the same as `cache.EngineCache`, which
is how it is tested where there is no GPU. One kernel gathers or scatters a layer of some blocks on
the device, and one copy moves it across the bus. On the host, the pass that copies to or from the
payloads also makes the checksums. Copies run on a stream of their own, after everything that the
computing thread had launched when the step began (`fence`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headrace_kvstore.checksum import copy_sum, fold_lanes
from headrace_kvstore.connector.cache import EngineCache
from headrace_kvstore.device_checksum import lane_sums
from headrace_kvstore.layout import HEADS, BlockLayout

SUMMED_BYTES = 32 * 2**20
"""Gathered and summed at once; summing takes five times as much memory for a moment."""


class DeviceCache(EngineCache):
    """The cache is on a device.

    Args:
        caches: tensor by layer name, as vLLM's `register_kv_caches` hands over.
        layout: found from them.
        threads: share one copy on the host's side.
        staging_bytes: host memory for blocks on their way, for each direction.
    """

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        layout: BlockLayout,
        threads: int = 1,
        staging_bytes: int = 64 * 2**20,
    ) -> None:
        super().__init__(layout, threads)
        self._views = [_blocks_first(caches[name], layout) for name in layout.names]
        self._parts = np.arange(layout.held.count, dtype=np.uint64) * np.uint64(layout.part_bytes)
        self._device = self._views[0].device
        rows = max(1, staging_bytes // layout.layer_bytes)
        self._in, self._out = (_Lane(self._device, rows, layout.layer_bytes) for _ in range(2))

    def fence(self) -> None:
        self._in.wait_for_current()

    def load(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        """As `EngineCache.load`; returns when the device holds the blocks."""
        sums = np.empty(seeds.shape, np.uint64)
        addresses = self._payload_addresses(payloads)[:, layer]
        for part in self._in.parts(len(blocks)):
            with self._in.use(part) as (host, rows):
                sums[part] = self._copy_sum(rows, addresses[part], seeds[part])
                self._scatter(layer, blocks[part], host)
        return sums

    def save(self, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        sums = np.empty(seeds.shape, np.uint64)
        addresses = self._payload_addresses(payloads)
        count = self.layout.held.count
        for layer in range(len(self._views)):
            mine = slice(layer * count, (layer + 1) * count)
            for part in self._out.parts(len(blocks)):
                with self._out.use(part) as (host, rows):
                    self._gather(layer, blocks[part], host)
                    self._out.synchronise()
                    sums[part, mine] = self._copy_sum(
                        addresses[part, layer], rows, seeds[part, mine]
                    )
        return sums

    def sums(self, blocks: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """As `EngineCache.sums`, computed on the device: 256 bytes a block and layer leave it."""
        sums = np.empty(seeds.shape, np.uint64)
        rows, count = max(1, SUMMED_BYTES // self.layout.layer_bytes), self.layout.held.count
        with self._in.alone():
            for layer, view in enumerate(self._views):
                mine = slice(layer * count, (layer + 1) * count)
                for first in range(0, len(blocks), rows):
                    part = slice(first, first + rows)
                    found = view.index_select(0, self._ids(blocks[part]))
                    lanes = lane_sums(found.reshape(len(found) * count, -1))
                    sums[part, mine] = fold_lanes(
                        lanes.cpu().numpy().view(np.uint64),
                        self.layout.part_bytes,
                        seeds[part, mine].ravel(),
                    ).reshape(-1, count)
        return sums

    def _copy_sum(self, dst: np.ndarray, src: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Copy layers, each one run, between u64 addresses [n]; sums of their parts."""
        runs = [np.add.outer(each, self._parts).reshape(seeds.shape) for each in (dst, src)]
        return copy_sum(*runs, self.layout.part_bytes, seeds, threads=self._threads)

    def _payload_addresses(self, payloads: np.ndarray) -> np.ndarray:
        """[n, layers]: a layer's bytes are one run in a payload."""
        addresses: np.ndarray = self.layout.payload_addresses(payloads)[:, :, 0]
        return addresses

    def _scatter(self, layer: int, blocks: np.ndarray, host: torch.Tensor) -> None:
        view = self._views[layer]
        arrived = host.to(self._device, non_blocking=True).view(view.dtype)
        view.index_copy_(0, self._ids(blocks), arrived.view(len(blocks), *view.shape[1:]))

    def _gather(self, layer: int, blocks: np.ndarray, host: torch.Tensor) -> None:
        view = self._views[layer]
        found = view.index_select(0, self._ids(blocks)).contiguous()
        host.copy_(found.view(len(blocks), -1).view(torch.uint8), non_blocking=True)

    def _ids(self, blocks: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(blocks.astype(np.int64)).to(self._device, non_blocking=True)


class _Lane:
    """Pinned host memory for some blocks of one layer, and a stream; one thread at a time."""

    def __init__(self, device: torch.device, rows: int, row_bytes: int) -> None:
        self._device, self._rows = device, rows
        pinned = device.type != "cpu"
        self._host = torch.empty((rows, row_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._addresses = self._host.data_ptr() + np.arange(rows, dtype=np.uint64) * np.uint64(
            row_bytes
        )
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()

    def parts(self, blocks: int) -> list[slice]:
        """Runs of blocks that fit."""
        return [slice(i, min(blocks, i + self._rows)) for i in range(0, blocks, self._rows)]

    def wait_for_current(self) -> None:
        """What this lane does next begins behind what the calling thread has launched."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def synchronise(self) -> None:
        """Wait until the device has done all of this lane's."""
        if self._stream is not None:
            self._stream.synchronize()

    @contextlib.contextmanager
    def alone(self) -> Any:
        """The lane's stream, while nobody else uses it."""
        stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with self._lock, stream:
            yield

    @contextlib.contextmanager
    def use(self, part: slice) -> Any:
        """Host rows for a part, u8 [n, bytes], and their addresses u64 [n]; synchronised at end."""
        count = part.stop - part.start
        stream = torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()
        with self._lock, stream:
            yield self._host[:count], self._addresses[:count]
            self.synchronise()


def _blocks_first(cache: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """The cache as [blocks, ...], the inner axes in the order in which memory holds them, or heads
    first where they are parts.

    vLLM's axis 0 may count smaller blocks of the kernel; consecutive ones form a block.
    """
    whole = cache.unflatten(0, (layout.blocks, cache.shape[0] // layout.blocks))
    first = HEADS + 1 if layout.held.count > 1 else 0
    # An axis of extent 1 has any stride and moves nothing.
    inner = sorted(
        range(1, whole.dim()), key=lambda axis: (axis != first, -_stride(whole, axis), axis)
    )
    return whole.permute(0, *inner)


def _stride(tensor: torch.Tensor, axis: int) -> int:
    return tensor.stride(axis) if tensor.shape[axis] > 1 else 0
