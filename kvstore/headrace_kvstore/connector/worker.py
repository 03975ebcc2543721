"""Moves KV blocks between an engine's cache and its machine's arena.

This is the worker half of the connector without its vLLM shell. Loads run layer by layer under the
step that needs them, or ahead of it, in a thread of their own: then the engine's other requests go
on, and the step that needs them comes when they are there. A step that cannot wait for single
layers, since a CUDA graph computes it as a whole, waits for its load before it begins. Each (block,
layer) is compared with its checksum. A block that fails, is late or is missing is reported to vLLM,
which computes it. Saves run in a thread of their own, after the step that found them. The durations
of steps and loads are measured on the way, for `price`, by the clocks of the device that does the
work (`device.clock`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from headrace_kvstore.arena.arena import NO_ROOM, TAKEN, Arena
from headrace_kvstore.arena.writers import Writer
from headrace_kvstore.connector.arena_source import ArenaSource
from headrace_kvstore.connector.cache import EngineCache
from headrace_kvstore.connector.files import FileSource, FileTier
from headrace_kvstore.connector.pipeline import DEPTH, LayerPipeline, ThisThread, Threads
from headrace_kvstore.connector.work import Load, Save, Shape, Work
from headrace_kvstore.device.clock import StepTimer
from headrace_kvstore.protocol.wire import BadBlock
from headrace_kvstore.settings import StoreSettings
from headrace_kvstore.table import hash_word, tenant_number

logger = logging.getLogger("headrace.kvstore")

SAVE_NICENESS = 5
"""Of the saving thread: the engine's computing thread goes first where both want a core."""


REFUSED = {TAKEN: "save_not_needed", NO_ROOM: "save_no_room"}

Seeds = Callable[[Sequence[bytes]], np.ndarray]
"""Block hashes -> checksum seeds, u64 [n, parts of all layers]."""


class StepSample(NamedTuple):
    """What a step that computed prompts took, waits for KV left out; as `work.Shape`."""

    prompt: int
    rows: int
    draft: int
    context: int
    pairs: int
    seconds: float


class LoadSample(NamedTuple):
    """What a load took, or would have taken: from one medium, so many blocks."""

    medium: str
    blocks: int
    seconds: float


class WorkerHalf:
    """Carries out what the scheduler half decided, for one worker.

    Args:
        arena, row: where the engine's blocks are.
        cache: this worker's.
        seeds: of blocks.
        settings: of the store.
        files: makes a reader of files into a cache, for blocks that are not in DRAM.
        writes: whether this worker saves; where not, another one saves the same bytes.
        writer: which of those that save it is, if they are several.

    Attributes:
        counts: blocks by what became of them, since the start.
    """

    def __init__(
        self,
        arena: Arena,
        row: int,
        cache: EngineCache,
        seeds: Seeds,
        settings: StoreSettings,
        files: Callable[[EngineCache], FileTier] | None = None,
        writes: bool = True,
        writer: Writer | None = None,
    ) -> None:
        self._arena, self._row, self._cache, self._seeds = arena, row, cache, seeds
        self._writes, self._writer = writes, writer
        columns = [cache.columns(layer) for layer in range(len(cache.layer_names))]
        self._columns = np.r_[tuple(columns)].astype(np.int64)
        cache.register(arena.data_address, arena.data_bytes)
        self._files = None if files is None else files(cache)
        # Loads ahead have all of their own, so that a step's own load waits for none of them.
        self._cache_ahead = cache.beside()
        self._files_ahead = None if files is None else files(self._cache_ahead)
        # A load from DRAM takes milliseconds, so it waits for no disk.
        self._ahead = ThreadPoolExecutor(1, "kv-load-ahead")
        self._ahead_files = ThreadPoolExecutor(1, "kv-load-ahead-files")
        self._came: list[tuple[str, _Ended]] = []
        self._finished: set[str] = set()
        self._layer_of = {name: i for i, name in enumerate(cache.layer_names)}
        self._loader = ThreadPoolExecutor(1, "kv-load")
        self._saver = ThreadPoolExecutor(1, "kv-save", initializer=_be_nice)
        self._pipeline: LayerPipeline | None = None
        self._source: _Loading | None = None
        self._failed: set[int] = set()
        self._bad_in_files: list[BadBlock] = []
        self._saves: dict[int, Save] = {}
        self._tasks: list[Future[None]] = []
        self._stops_saving = False
        self._done: list[int] = []
        self._lock = threading.Lock()
        self._loads: list[tuple[str, int, float]] = []
        self._lease_s = settings.lease_s
        self._work = Work()
        self._timer: StepTimer[Shape] = StepTimer(cache.step_clock)
        self._samples: list[StepSample | LoadSample] = []
        self.counts: Counter[str] = Counter()

    def open(self, ahead: bool = False) -> None:
        """vLLM turns to a step.

        Args:
            ahead: loads ahead come with it. They wait for what was queued before this step, and not
                for the step, which leaves their blocks alone.
        """
        if ahead:
            self._cache_ahead.fence()
        self._timer.begin()

    def begin(self, work: Work, by_layers: bool = True) -> None:
        """A step's load starts; the step may have computed already if it loads nothing.

        Args:
            by_layers: `wait` will be called for each layer that the step needs.
        """
        self._work, self._saves = work, work.saves
        if work.load.blocks:
            began = self._cache.fence()
            self._source = source = self._find(work.load, self._cache, self._files)
            self._pipeline = self._pipelined(source, self._cache, self._loader, began)
            if not by_layers:
                self._wait(self._pipeline.finish)
        for request_id, load in work.ahead.items():
            threads = self._ahead_files if load.places else self._ahead
            self._tasks.append(threads.submit(self._load_ahead, request_id, load))

    def wait(self, layer_name: str) -> None:
        """The step needs a layer now. Layers that share another's cache are no concern of ours."""
        layer = self._layer_of.get(layer_name)
        if self._pipeline is not None and layer is not None:
            self._wait(partial(self._pipeline.wait, layer))

    def end(self) -> None:
        """The step is computed, or queued on its device, or there was nothing to compute; its saves
        start."""
        self._timer.end(self._work.shape)
        if self._pipeline is not None and self._source is not None:
            ended = self._finish(self._pipeline, self._source, self._cache, self._files)
            self._pipeline = self._source = None
            self._account(ended)
        with self._lock:
            came, self._came = self._came, []
        for request_id, ended in came:
            self._account(ended)
            self._finished.add(request_id)
        self._work = Work()
        saves, self._saves = self._saves, {}
        self._tasks = [task for task in self._tasks if not task.done()]
        if not self._writes or self._stops_saving:
            with self._lock:
                self._done += saves
            return
        for job, save in saves.items():
            self._tasks.append(self._saver.submit(self._save, job, save))

    def failed_blocks(self) -> set[int]:
        """Ids of blocks whose load failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def loaded_ahead(self) -> set[str]:
        """Requests whose load ahead has ended since the last call, well or not."""
        finished, self._finished = self._finished, set()
        return finished

    def finished_jobs(self) -> list[int]:
        """Saves that have ended since the last call."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def loads(self) -> list[tuple[str, int, float]]:
        """Loads since the last call: medium, blocks that came, seconds."""
        loads, self._loads = self._loads, []
        return loads

    def samples(self) -> list[StepSample | LoadSample]:
        """What was measured since the last call."""
        self._samples += [StepSample(*shape, seconds) for shape, seconds in self._timer.ended()]
        samples, self._samples = self._samples, []
        return samples

    def prepare_to_move(self) -> bool:
        """Save no more until `move`; True between steps once nothing uses the arena."""
        self._stops_saving = True
        ended = self._pipeline is None and all(task.done() for task in self._tasks)
        return ended and not self._came

    def move(self, arena: Arena, row: int) -> None:
        """Use another arena from now on, and close the one before."""
        before, self._arena, self._row = self._arena, arena, row
        self._cache.register(arena.data_address, arena.data_bytes)
        self._cache.unregister(before.data_address)
        before.close()
        self._stops_saving = False

    def close(self) -> None:
        """Stop; copies under way end first."""
        for threads in (self._ahead, self._ahead_files):
            threads.shutdown(cancel_futures=True)
        self._loader.shutdown()
        self._saver.shutdown(cancel_futures=True)
        for files in (self._files, self._files_ahead):
            if files is not None:
                files.close()
        for cache in (self._cache_ahead, self._cache):
            cache.close()
        self._arena.close()

    def bad_in_files(self) -> list[BadBlock]:
        """Return the blocks whose bytes in files were not right, since the last call."""
        bad, self._bad_in_files = self._bad_in_files, []
        return bad

    def _wait(self, until: Callable[[], None]) -> None:
        """The step waits for KV."""
        self._timer.pause()
        with contextlib.suppress(Exception):  # `end` reports what failed
            until()
        self._timer.resume()

    def _load_ahead(self, request_id: str, load: Load) -> None:
        """In a thread of loads ahead. The load is finished here, since the next one uses the same
        staging memory."""
        ended = _Ended(_Loading.of_nothing(load), 0.0, failed=True)
        try:
            source = self._find(load, self._cache_ahead, self._files_ahead)
            pipeline = self._pipelined(source, self._cache_ahead, ThisThread(), None)
            ended = self._finish(pipeline, source, self._cache_ahead, self._files_ahead)
        except Exception:
            logger.exception("a load ahead failed; %d blocks are computed", len(load.blocks))
        finally:
            with self._lock:
                self._came.append((request_id, ended))

    def _pipelined(
        self, source: _Loading, cache: EngineCache, threads: Threads, began: Any
    ) -> LayerPipeline:
        """Begin a load."""
        depth = DEPTH if source.files is None else source.files.depth
        parts = [part for _, part in source.parts]
        clock = cache.load_clock
        return LayerPipeline(parts, len(cache.layer_names), threads, depth, clock, began)

    def _find(self, load: Load, cache: EngineCache, files: FileTier | None) -> _Loading:
        """Where a load's blocks come from. If that cannot be told, they are computed."""
        try:
            return self._sources(load, cache, files)
        except Exception:
            logger.exception("a load cannot begin; %d blocks are computed", len(load.blocks))
            return _Loading.of_nothing(load)

    def _sources(self, load: Load, cache: EngineCache, files: FileTier | None) -> _Loading:
        """What stands in DRAM comes from there, what else has a place from its file."""
        blocks = np.array(load.blocks, np.int64)
        seeds = self._seeds(load.hashes)
        slots = self._arena.lookup(self._row, load.hashes)
        here = np.flatnonzero(slots >= 0)
        arena = ArenaSource(self._arena, cache, slots[here], blocks[here], seeds[here])
        source = _Loading(load.hashes, blocks, slots[here], [(here, arena)])
        placed = [i for i in np.flatnonzero(slots < 0) if load.hashes[i] in load.places]
        if placed and files is not None:
            places: list[Any] = [load.places[load.hashes[i]] for i in placed]
            # Without a limit for every request that reads here, the leases are the limit.
            left_s = max(0.0, min(load.until_s, default=math.inf) - time.monotonic())
            wanted_s = sum(load.limits_s) if load.limits_s else math.inf
            limit_s = min(wanted_s, left_s, self._lease_s)
            try:
                read = files.source(places, blocks[placed], seeds[placed], DEPTH, limit_s)
            except (OSError, RuntimeError, ValueError) as error:
                logger.warning("%d KV blocks are computed, not read: %s", len(placed), error)
            else:
                source.parts.append((np.array(placed), read))
                source.files = read
        return source

    @staticmethod
    def _finish(
        pipeline: LayerPipeline, source: _Loading, cache: EngineCache, files: FileTier | None
    ) -> _Ended:
        """Wait for the end of a load, so that the next one may use its staging memory."""
        failed = False
        try:
            pipeline.finish()
            if files is not None and source.files is not None:
                files.settle(source.files)
        except Exception:
            failed = True
            logger.exception("loading KV failed; %d blocks are computed", len(source.blocks))
            # What was begun must not arrive in blocks that are computed by then.
            with contextlib.suppress(Exception):
                cache.drain()
            if files is not None and source.files is not None:
                with contextlib.suppress(Exception):
                    files.settle(source.files)
        return _Ended(source, pipeline.seconds, failed)

    def _account(self, ended: _Ended) -> None:
        """Record which blocks a load brought, and which are to be computed."""
        source, seconds = ended.source, ended.seconds
        bad = np.ones(len(source.blocks), np.bool_)
        lost = Counter({"error" if ended.failed else "gone": len(bad)})
        corrupt: dict[bytes, int] = {}
        for indices, part in () if ended.failed else source.parts:
            bad[indices] = part.bad
            wrong = indices[part.bad]
            lost["gone"] -= len(indices)
            if isinstance(part, ArenaSource):
                medium, same = "dram", ~part.overwritten()
                corrupt = {
                    source.hashes[indices[i]]: int(part.slots[i])
                    for i in np.flatnonzero(part.bad & same)
                }
                lost["gone"] += len(wrong) - len(corrupt)
                lost["corrupt_dram"] += len(corrupt)
            else:
                medium, cause = part.medium, part.cause() if len(wrong) else "corrupt"
                self._bad_in_files += part.suspects()
                if part.direct:
                    self.counts[f"direct_{medium}"] += len(indices) - len(wrong)
                lost["gone" if cause == "gone" else f"{cause}_{medium}"] += len(wrong)
            self.counts[f"loaded_{medium}"] += len(indices) - len(wrong)
        if source.files is not None:
            # Reading does not wait for the device, so it may have begun before the copies could.
            seconds = max(seconds, source.files.read_s) if seconds else 0.0
            self._measure(source.files, seconds)
        self.counts.update({f"lost_{cause}": n for cause, n in lost.items() if n})
        loaded = int((~bad).sum())
        if loaded:
            medium = "dram" if source.files is None else source.files.medium
            self._loads.append((medium, loaded, seconds))
            if source.files is None and not bad.any():
                self._samples.append(LoadSample(medium, loaded, seconds))
        self._failed.update(source.blocks[bad].tolist())
        if bad.any():
            logger.warning("%d of %d KV blocks are computed anew: %s", bad.sum(), len(bad), +lost)
        self._tasks.append(self._saver.submit(self._after_load, source.slots, corrupt))

    def _after_load(self, slots: np.ndarray, corrupt: dict[bytes, int]) -> None:
        """Give the leases of a load back, and drop blocks whose bytes were wrong, if they are still
        in the slots where they were read."""
        try:
            self._arena.release(slots)
            if corrupt:
                now = self._arena.lookup(self._row, [*corrupt]).tolist()
                same = [
                    h
                    for (h, slot), there in zip(corrupt.items(), now, strict=True)
                    if slot == there
                ]
                self._arena.discard(self._row, same)
        except Exception as error:
            logger.warning("the leases of a load run out by themselves: %s", error)

    def _measure(self, files: FileSource, seconds: float) -> None:
        """Learn from a load that came to its end, or from how far a late one came."""
        if not seconds or (files.bad.any() and not files.late):
            return
        share = max(1, files.layers_read) / len(self._cache.layer_names)
        self._samples.append(LoadSample(files.medium, len(files.bad), seconds / share))

    def _save(self, job: int, save: Save) -> None:
        try:
            self._copy_out(save)
        except Exception:
            logger.exception("saving %d KV blocks failed", len(save.blocks))
            self.counts["save_failed"] += len(save.blocks)
        with self._lock:
            self._done.append(job)

    def _copy_out(self, save: Save) -> None:
        slots = self._arena.reserve(
            self._row,
            save.hashes,
            [hash_word(parent) for parent in save.parents],
            save.depths,
            tenant=tenant_number(save.tenant),
            compute_s=np.array(save.compute_s),
            writer=self._writer,
        )
        given = slots >= 0
        self.counts.update(REFUSED[code] for code in slots[~given].tolist())
        slots = slots[given]
        if not len(slots):
            return
        try:
            blocks = np.array(save.blocks, np.int64)[given]
            hashes = [h for h, g in zip(save.hashes, given, strict=True) if g]
            payloads = self._arena.addresses(slots).astype(np.uint64)
            sums = self._cache.save(blocks, payloads, self._seeds(hashes)[:, self._columns])
        except BaseException:
            self._arena.abandon(slots)  # those of several writers are given up when all have ended
            raise
        published = int(self._arena.publish(slots, sums, self._writer, self._columns).sum())
        self.counts["saved"] += published
        self.counts["save_failed"] += len(slots) - published


@dataclass
class _Loading:
    """One step's load: which of its blocks comes from which source; the rest is gone.

    Attributes:
        slots: those in the arena, leased by the scheduler half.
        parts: sources, with the positions of their blocks.
        files: the one of them that reads files.
    """

    hashes: list[bytes]
    blocks: np.ndarray
    slots: np.ndarray
    parts: list[tuple[np.ndarray, ArenaSource | FileSource]]
    files: FileSource | None = None

    @staticmethod
    def of_nothing(load: Load) -> _Loading:
        """A load none of whose blocks has a source."""
        return _Loading(load.hashes, np.array(load.blocks, np.int64), np.zeros(0, np.int64), [])


class _Ended(NamedTuple):
    """A load that is over.

    Attributes:
        seconds: that it took; 0 if it did not come to its end.
        failed: none of its blocks can be used.
    """

    source: _Loading
    seconds: float
    failed: bool


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SAVE_NICENESS)
