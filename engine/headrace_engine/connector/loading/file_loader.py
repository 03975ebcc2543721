"""Loads of KV blocks straight from the NVMe tier's files, a layer at a time.

A layer of all blocks is read with O_DIRECT into landing memory (`read_paths`), then moved into the
engine's cache and summed on the way. So each byte is touched twice and no other process handles it.
There is room for `depth` layers; the pipeline asks for layer l + depth once layer l is in place.

A load has a time limit: blocks that have not arrived by then are computed. Reads that are still in
flight keep the memory, and no other load begins before they have landed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.connector.loading.block_ids import ALL, BlockIds
from headrace_engine.connector.loading.read_paths import BounceBufferPath, GdsPath, ReadPath, tried
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.segment import Location, Read
from headrace_kvstore.protocol.wire import BadBlock

if TYPE_CHECKING:  # needs Triton, which is there where a GPU is
    from headrace_engine.connector.caches.device_cache import DeviceCache

logger = logging.getLogger("headrace.kvstore")

_LEFT_BEHIND: list[Any] = []
"""File tiers and ways whose memory a disk that hangs may still write to."""
TRIAL_END_S = 30.0
DIRECT_BACKEND = "GDS_MT"
"""NIXL's plugin for GPUDirect Storage with several threads."""


class FileLoader:
    """Reader of blocks from the tier's files, in this process. Its threads start with the first
    read.

    Blocks go through host memory until a trial, which the first load starts, has found that direct
    reads are faster. A direct load with wrong blocks does not prove that the files are bad. The
    next loads therefore go through host memory, which shows it, until another trial is over.

    Args:
        cache: the engine's.
        staging_bytes: size of the host memory that layers pass through.
        backend: NIXL's backend for direct reads, if `cache` is a DeviceCache; "" for none.

    Attributes:
        why: the way that is used, and why, in words; "" before the first load.
    """

    def __init__(self, cache: EngineCache, staging_bytes: int, backend: str = "") -> None:
        self._cache, self.staging_bytes, self._backend = cache, staging_bytes, backend
        self.file_io = FileIo()
        self._host: BounceBufferPath | None = None
        self._direct: GdsPath | None = None
        self._trial: threading.Thread | None = None
        self._unsettled: dict[ReadPath, FileLayerSource] = {}
        self.why = ""

    def source(
        self,
        places: Sequence[Location],
        blocks: np.ndarray,
        seeds: np.ndarray,
        depth: int,
        limit_s: float = math.inf,
    ) -> FileLayerSource:
        """Return a source of some blocks; call `settle` on it before the next. Arguments as
        `FileLayerSource`.

        Raises:
            ValueError: there is no room, or an earlier load still reads.
        """
        way = self._way(places)
        earlier = self._unsettled.pop(way, None)
        if earlier is not None and not earlier.quiet():
            self._unsettled[way] = earlier
            raise ValueError("reads that were given up are still in flight")
        return FileLayerSource(way, self._cache, places, blocks, seeds, depth, limit_s)

    def settle(self, source: FileLayerSource) -> None:
        """Release a source whose load is over; give up direct reads if they failed."""
        if not source.quiet():
            self._unsettled[source.way] = source
        whole = source.layers_read == len(self._cache.layer_names) and not source.bad.any()
        if source.way is self._direct and not (whole or source.late):
            logger.warning("direct reads of KV failed: the next ones go through host memory")
            _end(self._direct)
            self._direct = self._trial = None

    def close(self) -> None:
        """End all reads."""
        if self._trial is not None:
            self._trial.join(TRIAL_END_S)
        hung = self._trial is not None and self._trial.is_alive()
        for way in (self._direct, self._host or self.file_io):
            hung |= way is not None and not way.close()
        if hung:
            _LEFT_BEHIND.append(self)

    def _way(self, places: Sequence[Location]) -> ReadPath:
        """Return the way for the next load. This may start a trial with blocks of the load."""
        if self._trial is None:
            self._trial = threading.Thread(
                target=self._try_direct, args=(places,), name="kv-file-trial", daemon=True
            )
            self._trial.start()
        if self._host is None:
            self._host = BounceBufferPath(self._cache, self.staging_bytes, self.file_io)
        direct = self._direct
        return direct if direct is not None and direct.holds(len(places)) else self._host

    def _try_direct(self, places: Sequence[Location]) -> None:
        """Run the trial, in its thread."""
        if not self._backend:
            self.why = "through host memory: the cache is there"
            return
        cache: DeviceCache = self._cache  # type: ignore[assignment]
        try:
            direct = GdsPath(cache, self._backend)
        except Exception as error:
            self.why = f"through host memory: {error}"
            logger.info("KV is read from files %s", self.why)
            return
        name, why = tried(cache, direct, places, self.file_io).choice()
        self.why = f"{'directly' if name == 'direct' else 'through host memory'}: {why}"
        logger.info("KV is read from files %s", self.why)
        if name == "direct":
            self._direct = direct
        else:
            _end(direct)


def _end(way: GdsPath) -> None:
    if not way.close():
        _LEFT_BEHIND.append(way)


class FileLayerSource:
    """One step's load of some blocks from files; a `LayerSource`.

    Args:
        way: no other load uses it during this one.
        cache: the engine's.
        places: where the blocks lie.
        blocks: int64 [n, cache groups], their ids in the engine's cache, as `BlockIds` takes them.
        seeds: u64 [n, parts of all layers].
        depth: maximum number of layers in flight.
        limit_s: seconds from the first layer's request on; if a layer is later, all blocks are bad.

    Attributes:
        way: as given.
        bad: bool [n]: blocks that could not be read, or did not match their checksums.
        late: whether the limit ended it.
        layers_read: number of layers that arrived before that.
        read_s: seconds from the first layer's request to the last one's arrival.
    """

    medium = "nvme"

    def __init__(
        self,
        way: ReadPath,
        cache: EngineCache,
        places: Sequence[Location],
        blocks: np.ndarray,
        seeds: np.ndarray,
        depth: int,
        limit_s: float = math.inf,
    ) -> None:
        self.way, self._cache, self._places = way, cache, places
        self._limit_s, self._began_s = limit_s, math.nan
        self.read_s = 0.0
        self.late, self.layers_read = False, 0
        self._corrupt = np.zeros(len(blocks), np.bool_)
        self._unreadable = np.zeros(len(blocks), np.bool_)
        self._blocks, self._seeds = BlockIds(blocks, cache.groups), seeds
        self._parts = np.arange(cache.held.count, dtype=np.uint64) * np.uint64(cache.part_bytes)
        self._numbers = np.arange(len(blocks))
        self._room = way.room(len(blocks), depth)
        self._expected = np.array([place.sums for place in places], np.uint64)
        self._reads: dict[int, Read] = {}
        self.bad = np.zeros(len(blocks), np.bool_)

    @property
    def depth(self) -> int:
        """Number of layers that may be in flight."""
        return len(self._room)

    def begin(self, layer: int) -> None:
        if self.late:
            return
        if math.isnan(self._began_s):
            self._began_s = time.monotonic()
        rows, ids = self._blocks.of_layer(layer)
        if not len(ids):
            return
        room = np.add.outer(self._room[layer % len(self._room)][: len(ids)], self._parts)
        first = self._cache.columns(layer).start
        every = self._places
        places = every if rows is ALL else [every[i] for i in self._numbers[rows]]
        self._reads[layer] = self.way.reader.read(places, room, first_layer=first)

    def end(self, layer: int) -> None:
        if self.late:
            return
        rows, ids = self._blocks.of_layer(layer)
        if not len(ids):
            self.layers_read += 1
            return
        left_s = None
        if self._limit_s != math.inf:
            left_s = max(0.0, self._began_s + self._limit_s - time.monotonic())
        try:
            read = self._reads[layer]
            arrived = read.wait(left_s)
        except TimeoutError:
            self.late = True
            self.bad[:] = True
            return
        finally:
            self.read_s = time.monotonic() - self._began_s
        del self._reads[layer]
        mine, numbers = self._cache.columns(layer), self._numbers[rows]
        room = self._room[layer % len(self._room)][: len(ids)]
        sums = self.way.put(layer, room, ids, self._seeds[rows, mine])
        self._unreadable[[numbers[i] for i, why in read.bad.items() if why == "unreadable"]] = True
        self._corrupt[rows] |= arrived & (sums != self._expected[rows, mine]).any(axis=1)
        self.bad[rows] |= ~arrived | self._corrupt[rows]
        self.layers_read += 1

    @property
    def direct(self) -> bool:
        """Whether it reads straight into the device. Bad blocks do not prove bad files then."""
        return isinstance(self.way, GdsPath)

    def cause(self) -> str:
        """Return why blocks are bad: "slow", "unreadable", "corrupt" or "gone"."""
        if self.late:
            return "slow"
        if self._unreadable.any():
            return "unreadable"
        return "corrupt" if self._corrupt.any() else "gone"

    def suspects(self) -> list[BadBlock]:
        """Return the blocks that the files' owner should check: those that could not be read or did
        not match. None after a direct read, which does not prove bad files."""
        if self.late or self.direct:
            return []
        wrong = np.flatnonzero(self._unreadable | self._corrupt).tolist()
        return [BadBlock.at(self._places[i]) for i in wrong]

    def quiet(self) -> bool:
        """Call off the reads in flight; return whether none of them uses the way's memory any
        more."""
        for read in self._reads.values():
            read.abort()
        self._reads = {layer: read for layer, read in self._reads.items() if not read.done()}
        return not self._reads
