"""Transfer of KV blocks between an engine's cache and its machine's arena.

This is the worker's side of the connector without its vLLM shell. Loads run layer by layer under
the step that needs them, or ahead of it in a thread of their own. During a load ahead the engine's
other requests continue, and the step that needs the load runs when it is complete. A step that a
CUDA graph computes as a whole cannot wait for single layers, so it waits for its load before it
begins. Each (block, layer) is compared with its checksum. A block that fails, is late or is missing
is reported to vLLM, which computes it, or its whole request if vLLM recovers no single blocks.
Saves run in a thread of their own, after the step that found them. The worker's side measures the
durations of steps and loads for `load_price`, by the clocks of the device that does the work
(`device.clock`).
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
from functools import partial
from typing import Any

import numpy as np

from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.connector.loading.active_load import ActiveLoad, EndedLoad
from headrace_engine.connector.loading.arena_source import ArenaSource
from headrace_engine.connector.loading.file_loader import FileLayerSource, FileLoader
from headrace_engine.connector.loading.layer_pipeline import (
    DEPTH,
    InlineExecutor,
    LayerPipeline,
    LoaderExecutor,
)
from headrace_engine.connector.messages import LoadSample, StepSample
from headrace_engine.connector.store_work import BlockLoad, BlockSave, StepShape, StoreWork
from headrace_kvstore.arena.arena import EXISTS, NO_ROOM, Arena
from headrace_kvstore.arena.writer_group import Writer
from headrace_kvstore.blocks.slot_record import hash_word, tenant_number
from headrace_kvstore.device.clock import StepTimer
from headrace_kvstore.protocol.wire import BadBlock
from headrace_kvstore.settings.store_settings import StoreSettings

logger = logging.getLogger("headrace.kvstore")

SAVE_NICENESS = 5
"""Niceness of the saving thread: the engine's computing thread goes first if both want a core."""

REFUSED = {EXISTS: "save_not_needed", NO_ROOM: "save_no_room"}

Seeds = Callable[[Sequence[bytes]], np.ndarray]
"""Block hashes -> checksum seeds, u64 [n, parts of all layers]."""


class WorkerConnector:
    """Executor of the scheduler side's decisions, for one worker.

    Args:
        arena, row: where the engine's blocks are.
        cache: this worker's.
        seeds: computes the checksum seeds of blocks.
        settings: of the store.
        files: makes a reader of files into a cache, for blocks that are not in DRAM.
        writes: whether this worker saves; if not, another one saves the same bytes.
        writer: this worker among those that save, if there are several.
        recovers_blocks: whether vLLM computes single blocks that failed to load; else loads are
            made ahead only, and the request of a load that failed in part is computed as a whole.

    Attributes:
        counts: blocks by outcome, since the start.
    """

    def __init__(
        self,
        arena: Arena,
        row: int,
        cache: EngineCache,
        seeds: Seeds,
        settings: StoreSettings,
        files: Callable[[EngineCache], FileLoader] | None = None,
        writes: bool = True,
        writer: Writer | None = None,
        recovers_blocks: bool = True,
    ) -> None:
        self.arena, self._row, self._cache, self._seeds = arena, row, cache, seeds
        self._writes, self._writer = writes, writer
        self._recovers_blocks = recovers_blocks
        columns = [cache.columns(layer) for layer in range(len(cache.layer_names))]
        self._columns = np.r_[tuple(columns)].astype(np.int64)
        cache.register(arena.data_address, arena.data_bytes)
        self.file_loader = None if files is None else files(cache)
        # Loads ahead have resources of their own, so a step's own load waits for none of them.
        self._cache_ahead = cache.beside()
        self.file_loader_ahead = None if files is None else files(self._cache_ahead)
        # A load from DRAM takes milliseconds, so it waits for no disk.
        self.dram_thread_ahead = ThreadPoolExecutor(1, "kv-load-ahead")
        self.file_thread_ahead = ThreadPoolExecutor(1, "kv-load-ahead-files")
        self._came: list[tuple[str, EndedLoad]] = []
        self._finished: set[str] = set()
        self._layer_of = {name: i for i, name in enumerate(cache.layer_names)}
        self._loader = ThreadPoolExecutor(1, "kv-load")
        self._saver = ThreadPoolExecutor(1, "kv-save", initializer=_be_nice)
        self._pipeline: LayerPipeline | None = None
        self._source: ActiveLoad | None = None
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._bad_in_files: list[BadBlock] = []
        self._saves: dict[int, BlockSave] = {}
        self._tasks: list[Future[None]] = []
        self._stops_saving = False
        self._done: list[int] = []
        self._lock = threading.Lock()
        self._loads: list[tuple[str, int, float]] = []
        self._lease_s = settings.lease_s
        self._work = StoreWork()
        self._timer: StepTimer[StepShape] = StepTimer(cache.step_clock)
        self._samples: list[StepSample | LoadSample] = []
        self.counts: Counter[str] = Counter()

    def open(self, ahead: bool = False) -> None:
        """Begin to time a step of vLLM.

        Args:
            ahead: whether the step has loads ahead. They wait for the work queued before this step,
                and not for the step, which does not touch their blocks.
        """
        if ahead:
            self._cache_ahead.fence()
        self._timer.begin()

    def begin(self, work: StoreWork, by_layers: bool = True) -> None:
        """Start a step's load and the loads ahead; the step may have computed already if it loads
        nothing.

        Args:
            by_layers: whether `wait` will be called for each layer that the step needs.
        """
        self._work, self._saves = work, work.saves
        if work.load.hashes:
            began = self._cache.fence()
            self._source = source = self._find(work.load, self._cache, self.file_loader)
            self._pipeline = self._pipelined(source, self._cache, self._loader, began)
            if not by_layers:
                self._wait(self._pipeline.finish)
        for request_id, load in work.ahead.items():
            threads = self.file_thread_ahead if load.places else self.dram_thread_ahead
            self._tasks.append(threads.submit(self._load_ahead, request_id, load))

    def wait(self, layer_name: str) -> None:
        """Wait for a layer that the step needs now. A layer that shares another's cache is
        ignored."""
        layer = self._layer_of.get(layer_name)
        if self._pipeline is not None and layer is not None:
            self._wait(partial(self._pipeline.wait, layer))

    def end(self) -> None:
        """End a step and start its saves. The step was computed or queued on its device, or had
        nothing to compute."""
        self._timer.end(self._work.shape)
        if self._pipeline is not None and self._source is not None:
            ended = self._finish(self._pipeline, self._source, self._cache, self.file_loader)
            self._pipeline = self._source = None
            self._failed.update(self._account(ended))
        with self._lock:
            came, self._came = self._came, []
        for request_id, ended in came:
            failed = self._account(ended)
            if self._recovers_blocks:
                self._failed.update(failed)
            elif failed:
                self._failed_requests.add(request_id)
            self._finished.add(request_id)
        self._work = StoreWork()
        saves, self._saves = self._saves, {}
        self._tasks = [task for task in self._tasks if not task.done()]
        if not self._writes or self._stops_saving:
            with self._lock:
                self._done += saves
            return
        for job, save in saves.items():
            self._tasks.append(self._saver.submit(self._save, job, save))

    def failed_blocks(self) -> set[int]:
        """Return the ids of blocks whose load failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def failed_requests(self) -> set[str]:
        """Return the requests of which a block failed to load since the last call, and that vLLM
        computes as a whole."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def loaded_ahead(self) -> set[str]:
        """Return the requests whose load ahead has ended since the last call, well or not."""
        finished, self._finished = self._finished, set()
        return finished

    def finished_jobs(self) -> list[int]:
        """Return the saves that have ended since the last call."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def loads(self) -> list[tuple[str, int, float]]:
        """Return the loads since the last call: medium, number of loaded blocks, seconds."""
        loads, self._loads = self._loads, []
        return loads

    def samples(self) -> list[StepSample | LoadSample]:
        """Return the measurements since the last call."""
        self._samples += [StepSample(*shape, seconds) for shape, seconds in self._timer.ended()]
        samples, self._samples = self._samples, []
        return samples

    def prepare_to_move(self) -> bool:
        """Stop saving until `move`; return True between steps once nothing uses the arena."""
        self._stops_saving = True
        ended = self._pipeline is None and all(task.done() for task in self._tasks)
        return ended and not self._came

    def move(self, arena: Arena, row: int) -> None:
        """Use another arena from now on, and close the previous one."""
        before, self.arena, self._row = self.arena, arena, row
        self._cache.register(arena.data_address, arena.data_bytes)
        self._cache.unregister(before.data_address)
        before.close()
        self._stops_saving = False

    def close(self) -> None:
        """Stop; copies under way end first."""
        for threads in (self.dram_thread_ahead, self.file_thread_ahead):
            threads.shutdown(cancel_futures=True)
        self._loader.shutdown()
        self._saver.shutdown(cancel_futures=True)
        for files in (self.file_loader, self.file_loader_ahead):
            if files is not None:
                files.close()
        for cache in (self._cache_ahead, self._cache):
            cache.close()
        self.arena.close()

    def bad_in_files(self) -> list[BadBlock]:
        """Return the blocks whose bytes in files were wrong, since the last call."""
        bad, self._bad_in_files = self._bad_in_files, []
        return bad

    def _wait(self, until: Callable[[], None]) -> None:
        """Wait for KV that the step needs, and time the wait."""
        self._timer.pause()
        with contextlib.suppress(Exception):  # `end` reports what failed
            until()
        self._timer.resume()

    def _load_ahead(self, request_id: str, load: BlockLoad) -> None:
        """Load ahead, in a thread for such loads. Wait for the end of the load, since the next one
        uses the same staging memory."""
        ended = EndedLoad(ActiveLoad.of_nothing(load), 0.0, failed=True)
        try:
            source = self._find(load, self._cache_ahead, self.file_loader_ahead)
            pipeline = self._pipelined(source, self._cache_ahead, InlineExecutor(), None)
            ended = self._finish(pipeline, source, self._cache_ahead, self.file_loader_ahead)
        except Exception:
            logger.exception("a load ahead failed; %d blocks are computed", len(load.hashes))
        finally:
            with self._lock:
                self._came.append((request_id, ended))

    def _pipelined(
        self, source: ActiveLoad, cache: EngineCache, threads: LoaderExecutor, began: Any
    ) -> LayerPipeline:
        """Begin a load."""
        depth = DEPTH if source.files is None else source.files.depth
        parts = [part for _, part in source.parts]
        clock = cache.load_clock
        return LayerPipeline(parts, len(cache.layer_names), threads, depth, clock, began)

    def _find(self, load: BlockLoad, cache: EngineCache, files: FileLoader | None) -> ActiveLoad:
        """Find the sources of a load's blocks. If this fails, the blocks are computed."""
        try:
            return self._sources(load, cache, files)
        except Exception:
            logger.exception("a load cannot begin; %d blocks are computed", len(load.hashes))
            return ActiveLoad.of_nothing(load)

    def _sources(self, load: BlockLoad, cache: EngineCache, files: FileLoader | None) -> ActiveLoad:
        """Return a load's sources: DRAM for blocks that are there, else the file of a block's
        place."""
        blocks, seeds = load.block_ids, self._seeds(load.hashes)
        slots = self.arena.lookup(self._row, load.hashes)
        here = np.flatnonzero(slots >= 0)
        arena = ArenaSource(self.arena, cache, slots[here], blocks[here], seeds[here])
        source = ActiveLoad(load.hashes, blocks, slots[here], [(here, arena)])
        placed = [i for i in np.flatnonzero(slots < 0) if load.hashes[i] in load.places]
        if placed and files is not None:
            places: list[Any] = [load.places[load.hashes[i]] for i in placed]
            # If no request that reads here has a limit, the leases are the limit.
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
        pipeline: LayerPipeline, source: ActiveLoad, cache: EngineCache, files: FileLoader | None
    ) -> EndedLoad:
        """Wait for the end of a load, so that the next one may use its staging memory."""
        failed = False
        try:
            pipeline.finish()
            if files is not None and source.files is not None:
                files.settle(source.files)
        except Exception:
            failed = True
            logger.exception("loading KV failed; %d blocks are computed", len(source.blocks))
            # Wait for copies under way: they must not arrive later in blocks that are then
            # computed.
            with contextlib.suppress(Exception):
                cache.drain()
            if files is not None and source.files is not None:
                with contextlib.suppress(Exception):
                    files.settle(source.files)
        return EndedLoad(source, pipeline.seconds, failed)

    def _account(self, ended: EndedLoad) -> list[int]:
        """Record which blocks were loaded; return the ids of those that must be computed."""
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
            # Reads do not wait for the device, so they may have begun before the copies could.
            seconds = max(seconds, source.files.read_s) if seconds else 0.0
            self._measure(source.files, seconds)
        self.counts.update({f"lost_{cause}": n for cause, n in lost.items() if n})
        loaded = int((~bad).sum())
        if loaded:
            medium = "dram" if source.files is None else source.files.medium
            self._loads.append((medium, loaded, seconds))
            if source.files is None and not bad.any():
                self._samples.append(LoadSample(medium, loaded, seconds))
        if bad.any():
            logger.warning("%d of %d KV blocks are computed anew: %s", bad.sum(), len(bad), +lost)
        self._tasks.append(self._saver.submit(self._after_load, source.slots, corrupt))
        failed: list[int] = source.blocks[bad].ravel().tolist()
        return failed

    def _after_load(self, slots: np.ndarray, corrupt: dict[bytes, int]) -> None:
        """Release the leases of a load. Drop blocks whose bytes were wrong, if they are still in
        the slots where they were read."""
        try:
            self.arena.release(slots)
            if corrupt:
                now = self.arena.lookup(self._row, [*corrupt]).tolist()
                same = [
                    h
                    for (h, slot), there in zip(corrupt.items(), now, strict=True)
                    if slot == there
                ]
                self.arena.discard(self._row, same)
        except Exception as error:
            logger.warning("the leases of a load run out by themselves: %s", error)

    def _measure(self, files: FileLayerSource, seconds: float) -> None:
        """Record the duration of a complete load; for a late one, extrapolate from the layers
        read."""
        if not seconds or (files.bad.any() and not files.late):
            return
        share = max(1, files.layers_read) / len(self._cache.layer_names)
        self._samples.append(LoadSample(files.medium, len(files.bad), seconds / share))

    def _save(self, job: int, save: BlockSave) -> None:
        try:
            self._copy_out(save)
        except Exception:
            logger.exception("saving %d KV blocks failed", len(save.hashes))
            self.counts["save_failed"] += len(save.hashes)
        with self._lock:
            self._done.append(job)

    def _copy_out(self, save: BlockSave) -> None:
        slots = self.arena.reserve(
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
            blocks = save.block_ids[given]
            hashes = [h for h, g in zip(save.hashes, given, strict=True) if g]
            payloads = self.arena.addresses(slots).astype(np.uint64)
            sums = self._cache.save(blocks, payloads, self._seeds(hashes)[:, self._columns])
        except BaseException:
            self.arena.abandon(slots)  # a group's slots are freed when all writers have ended
            raise
        published = int(self.arena.publish(slots, sums, self._writer, self._columns).sum())
        self.counts["saved"] += published
        self.counts["save_failed"] += len(slots) - published


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SAVE_NICENESS)
