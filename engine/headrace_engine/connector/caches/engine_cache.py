"""An engine's KV cache as the store uses it, in host memory.

Blocks are copied in and out in one pass over their bytes, which also computes their checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.checksum import checksum, copy_sum, prepare
from headrace_kvstore.blocks.sharding import Shard
from headrace_kvstore.device.clock import Clock, HostClock


class EngineCache:
    """An engine's cache; copies blocks between it and payloads in this process's memory.

    Args:
        layout: of the engine's cache.
        threads: number of threads that share one copy.

    Attributes:
        layer_names: in payload order.
        groups: number of each layer's cache group; empty if there is one.
        held: the parts of a payload's layers that the cache has.
        part_bytes: size of a stored part.
        step_clock: clock of the engine's computation.
        load_clock: clock of loads into the cache.
    """

    layer_names: Sequence[str]
    groups: Sequence[int] = ()
    held: Shard
    part_bytes: int
    step_clock: Clock = HostClock()
    load_clock: Clock = HostClock()

    def __init__(self, layout: BlockLayout, threads: int = 1) -> None:
        prepare()
        self.layout, self._threads = layout, threads
        self.layer_names, self.groups = layout.names, layout.groups
        self.held, self.part_bytes = layout.shard, layout.part_bytes

    @property
    def stored_layer_bytes(self) -> int:
        """Bytes of this cache's parts of a layer in a payload, which are contiguous."""
        return self.held.count * self.part_bytes

    def columns(self, layer: int) -> slice:
        """Return where this cache's parts of a layer are among all parts of a block."""
        first = layer * self.held.parts + self.held.first
        return slice(first, first + self.held.count)

    def fence(self) -> Any:
        """Make later loads wait for the work that the calling thread has launched on a device. For
        a cache in host memory there is nothing to wait for.

        Returns:
            The mark of `load_clock` from which loads may begin; None for now.
        """
        return None

    def beside(self) -> EngineCache:
        """Return the same cache for loads that run beside others."""
        return self

    def register(self, address: int, size_bytes: int) -> None:
        """Announce memory that holds payloads until `unregister` or `close`."""

    def unregister(self, address: int) -> None:
        """Announce that the memory at this address holds no payloads any more."""

    def drain(self) -> None:
        """Wait until no copy that was begun touches the cache any more."""

    def close(self) -> None:
        """End all loads and saves."""

    def start(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> Callable[[], np.ndarray]:
        """Begin a `load`. Calling the result waits for the load and returns its checksums. In host
        memory that call makes the copy."""
        return partial(self.load, layer, blocks, payloads, seeds)

    def load(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        """Copy one layer of n blocks in.

        Args:
            blocks: int64 [n], the layer's ids in the engine's cache.
            payloads: uint64 [n], addresses of the blocks' payloads.
            seeds: uint64 [n, parts of the layer that this cache has].

        Returns:
            uint64, checksums of what was read, in the shape of the seeds.
        """
        layout, pieces = self.layout, (*seeds.shape, -1)
        engine = layout.engine_addresses(blocks)[:, layer].reshape(pieces)
        stored = layout.payload_addresses(payloads)[:, layer].reshape(pieces)
        return copy_sum(engine, stored, layout.piece_bytes, seeds, threads=self._threads)

    def save(self, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Copy n blocks out, all layers.

        Args:
            blocks: int64 [n, cache groups], or [n] if there is one.
            payloads: as `load`.
            seeds: uint64 [n, parts of all layers that this cache has].

        Returns:
            uint64, checksums of what was written, in the shape of the seeds.
        """
        layout, pieces = self.layout, (*seeds.shape, -1)
        engine = layout.engine_addresses(blocks).reshape(pieces)
        stored = layout.payload_addresses(payloads).reshape(pieces)
        return copy_sum(stored, engine, layout.piece_bytes, seeds, threads=self._threads)

    def sums(self, blocks: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Return the checksums of n blocks in the engine's cache; arguments as `save`."""
        layout = self.layout
        engine = layout.engine_addresses(blocks).reshape(*seeds.shape, -1)
        return checksum(engine, layout.piece_bytes, seeds, threads=self._threads)
