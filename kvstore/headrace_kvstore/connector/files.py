"""Loading KV blocks straight from the NVMe tier's files, a layer at a time.

A layer of all blocks is read with O_DIRECT into staging memory, then copied into the engine's cache
and summed on the way, so that a byte is touched twice and no other process handles it. Staging
holds `depth` layers; the pipeline asks for layer l + depth once layer l is in place.

A load has a time limit: what has not come by then is computed. Reads that are still in flight keep
the staging memory, and no other load begins before they have landed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import numpy as np

from headrace_kvstore.connector.cache import EngineCache
from headrace_kvstore.nvme.mover import Mover
from headrace_kvstore.nvme.record import PAGE_BYTES
from headrace_kvstore.nvme.segment import BlockReader, Location, Read, page_memory

logger = logging.getLogger("headrace.kvstore")

_LEFT_BEHIND: list[FileTier] = []
"""A disk that hangs may still write to their staging memory."""


class Staging:
    """Page-aligned memory that reads land in."""

    def __init__(self, size_bytes: int) -> None:
        self._memory, self.address = page_memory(-(-size_bytes // PAGE_BYTES) * PAGE_BYTES)
        self.size_bytes = len(self._memory)

    def layers(self, blocks: int, layer_bytes: int, depth: int) -> np.ndarray:
        """Room for as many layers of some blocks as fit, `depth` at most: addresses
        u64 [layers, blocks].

        Raises:
            ValueError: not one layer fits.
        """
        stride = -(-layer_bytes // PAGE_BYTES) * PAGE_BYTES
        fitting = min(depth, self.size_bytes // max(1, blocks * stride))
        if not fitting:
            raise ValueError(f"{blocks} blocks of {layer_bytes} bytes a layer: staging too small")
        offsets = np.arange(fitting * blocks, dtype=np.uint64) * np.uint64(stride)
        return np.uint64(self.address) + offsets.reshape(fitting, blocks)


class FileTier:
    """Reads of this process from the tier's files. Their threads start with the first of them.

    Args:
        cache: the engine's.
        staging_bytes: memory that layers pass through.
    """

    def __init__(self, cache: EngineCache, staging_bytes: int) -> None:
        self._cache, self._staging_bytes = cache, staging_bytes
        self._mover = Mover()
        self._reader = BlockReader(self._mover)
        self._staging: Staging | None = None
        self._unsettled: FileSource | None = None

    def source(
        self,
        places: Sequence[Location],
        blocks: np.ndarray,
        seeds: np.ndarray,
        depth: int,
        limit_s: float = math.inf,
    ) -> FileSource:
        """A source of some blocks; `settle` it before the next. The rest as `FileSource`.

        Raises:
            ValueError: there is no room, or an earlier load still reads.
        """
        if self._unsettled is not None:
            if not self._unsettled.quiet():
                raise ValueError("reads that were given up are still in flight")
            self._unsettled = None
        if self._staging is None:
            self._staging = Staging(self._staging_bytes)
            self._cache.register(self._staging.address, self._staging.size_bytes)
        return FileSource(
            *(self._reader, self._staging, self._cache, places, blocks, seeds, depth, limit_s)
        )

    def settle(self, source: FileSource) -> None:
        """The source's load is over."""
        if not source.quiet():
            self._unsettled = source

    def close(self) -> None:
        """End all reads."""
        if self._mover.close():
            self._reader.close()
        else:
            _LEFT_BEHIND.append(self)


class FileSource:
    """One step's load of some blocks from files; a `LayerSource`.

    Args:
        reader: of the tier's files.
        staging: memory that nothing else uses meanwhile.
        cache: the engine's.
        places: where the blocks lie.
        blocks: int64 [n], their ids in the engine's cache.
        seeds: u64 [n, parts of all layers].
        depth: layers in flight, at most.
        limit_s: seconds from the first layer's asking on; what has not come by then is bad.

    Attributes:
        bad: bool [n]: blocks that could not be read, or did not match their checksums.
        late: whether the limit ended it.
        layers_read: how many came before that.
        read_s: from the first layer's asking to the last one's coming.
    """

    medium = "nvme"

    def __init__(
        self,
        reader: BlockReader,
        staging: Staging,
        cache: EngineCache,
        places: Sequence[Location],
        blocks: np.ndarray,
        seeds: np.ndarray,
        depth: int,
        limit_s: float = math.inf,
    ) -> None:
        self._reader, self._cache, self._places = reader, cache, places
        self._limit_s, self._began_s = limit_s, math.nan
        self.read_s = 0.0
        self.late, self.layers_read = False, 0
        self._unreadable = False
        self._blocks, self._seeds = blocks, seeds
        self._parts = np.arange(cache.held.count, dtype=np.uint64) * np.uint64(cache.part_bytes)
        self._room = staging.layers(len(blocks), cache.stored_layer_bytes, depth)
        self._expected = np.array([place.sums for place in places], np.uint64)
        self._reads: dict[int, Read] = {}
        self.bad = np.zeros(len(blocks), np.bool_)

    @property
    def depth(self) -> int:
        """Layers that may be in flight."""
        return len(self._room)

    def begin(self, layer: int) -> None:
        if self.late:
            return
        if math.isnan(self._began_s):
            self._began_s = time.monotonic()
        room = np.add.outer(self._room[layer % len(self._room)], self._parts)
        first = self._cache.columns(layer).start
        self._reads[layer] = self._reader.read(self._places, room, first_layer=first)

    def end(self, layer: int) -> None:
        if self.late:
            return
        left_s = None
        if self._limit_s != math.inf:
            left_s = max(0.0, self._began_s + self._limit_s - time.monotonic())
        try:
            arrived = self._reads[layer].wait(left_s)
        except TimeoutError:
            self.late = True
            self.bad[:] = True
            return
        finally:
            self.read_s = time.monotonic() - self._began_s
        del self._reads[layer]
        mine = self._cache.columns(layer)
        # `load` adds the layer's place in a payload to what it is given.
        before = np.uint64(mine.start * self._cache.part_bytes)
        payloads = self._room[layer % len(self._room)] - before
        sums = self._cache.load(layer, self._blocks, payloads, self._seeds[:, mine])
        self._unreadable |= not arrived.all()
        self.bad |= ~arrived | (sums != self._expected[:, mine]).any(axis=1)
        self.layers_read += 1

    def cause(self) -> str:
        """Why blocks are bad: "slow", "unreadable" or "corrupt"."""
        if self.late:
            return "slow"
        return "unreadable" if self._unreadable else "corrupt"

    def quiet(self) -> bool:
        """Call off what is in flight; whether the staging memory is nobody else's now."""
        for read in self._reads.values():
            read.call_off()
        self._reads = {layer: read for layer, read in self._reads.items() if not read.done()}
        return not self._reads
