"""Moves KV blocks between an engine's cache and its machine's arena.

This is the worker half of the connector without its vLLM shell. Loads run layer by layer under the
step that needs them. Each (block, layer) is compared with its checksum before the step may use it.
A block that fails, is late or is missing is reported to vLLM, which computes it. Saves run in a
thread of their own, after the step that found them. The durations of steps and loads are measured
on the way, for `price`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace_kvstore.arena.arena import NO_ROOM, TAKEN, Arena
from headrace_kvstore.arena.writers import Writer
from headrace_kvstore.connector.cache import EngineCache
from headrace_kvstore.connector.files import FileSource, FileTier
from headrace_kvstore.connector.pipeline import DEPTH, LayerPipeline
from headrace_kvstore.connector.scheduler import Load, Save, Work
from headrace_kvstore.settings import StoreSettings
from headrace_kvstore.table import hash_word, tenant_number

logger = logging.getLogger("headrace.kvstore")

SAVE_NICENESS = 5
"""Of the saving thread: the engine's computing thread goes first where both want a core."""


REFUSED = {TAKEN: "save_not_needed", NO_ROOM: "save_no_room"}

Seeds = Callable[[Sequence[bytes]], np.ndarray]
"""Block hashes -> checksum seeds, u64 [n, parts of all layers]."""


class StepSample(NamedTuple):
    """What a step that computed prompts took, waits for KV left out; as `scheduler.Shape`."""

    prompt: int
    rows: int
    draft: int
    context: int
    pairs: int
    seconds: float


class LoadSample(NamedTuple):
    """What a load from a slow tier took, or would have taken: from one medium, so many blocks."""

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
        files: blocks in files, for what is not in DRAM.
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
        files: FileTier | None = None,
        writes: bool = True,
        writer: Writer | None = None,
    ) -> None:
        self._arena, self._row, self._cache, self._seeds = arena, row, cache, seeds
        self._writes, self._writer = writes, writer
        columns = [cache.columns(layer) for layer in range(len(cache.layer_names))]
        self._columns = np.r_[tuple(columns)].astype(np.int64)
        self._files = files
        self._layer_of = {name: i for i, name in enumerate(cache.layer_names)}
        self._loader = ThreadPoolExecutor(1, "kv-load")
        self._saver = ThreadPoolExecutor(1, "kv-save", initializer=_be_nice)
        self._pipeline: LayerPipeline | None = None
        self._source: _Loading | None = None
        self._failed: set[int] = set()
        self._bad_in_files: list[bytes] = []
        self._saves: dict[int, Save] = {}
        self._done: list[int] = []
        self._lock = threading.Lock()
        self._loads: list[tuple[str, int, float]] = []
        self._lease_s = settings.lease_s
        self._work = Work()
        self._opened_s = self._waited_s = 0.0
        self._samples: list[StepSample | LoadSample] = []
        self.counts: Counter[str] = Counter()

    def open(self) -> None:
        """vLLM turns to a step."""
        self._opened_s, self._waited_s = time.perf_counter(), 0.0

    def begin(self, work: Work) -> None:
        """A step's load starts; the step may have computed already if it loads nothing."""
        self._work, self._saves = work, work.saves
        if work.load.blocks:
            self._cache.fence()
            self._source = source = self._sources(work.load)
            layers = len(self._cache.layer_names)
            depth = DEPTH if source.files is None else source.files.depth
            parts = [part for _, part in source.parts]
            self._pipeline = LayerPipeline(parts, layers, self._loader, depth)

    def wait(self, layer_name: str) -> None:
        """The step needs a layer now. Layers that share another's cache are no concern of ours."""
        layer = self._layer_of.get(layer_name)
        if self._pipeline is not None and layer is not None:
            began_s = time.perf_counter()
            with contextlib.suppress(Exception):  # `end` reports what failed
                self._pipeline.wait(layer)
            self._waited_s += time.perf_counter() - began_s

    def end(self) -> None:
        """The step has computed, or there was nothing to compute; its saves start."""
        if self._pipeline is not None and self._source is not None:
            self._settle(self._pipeline, self._source)
            self._pipeline = self._source = None
        if self._work.shape is not None and self._opened_s:
            seconds = time.perf_counter() - self._opened_s - self._waited_s
            self._samples.append(StepSample(*self._work.shape, seconds))
        self._work = Work()
        saves, self._saves = self._saves, {}
        if not self._writes:
            with self._lock:
                self._done += saves
            return
        for job, save in saves.items():
            self._saver.submit(self._save, job, save)

    def failed_blocks(self) -> set[int]:
        """Ids of blocks whose load failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

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
        samples, self._samples = self._samples, []
        return samples

    def close(self) -> None:
        """Stop; copies under way end first."""
        self._loader.shutdown()
        self._saver.shutdown(cancel_futures=True)
        if self._files is not None:
            self._files.close()
        self._arena.close()

    def bad_in_files(self) -> list[bytes]:
        """Hashes of blocks whose bytes in files were not right, since the last call."""
        bad, self._bad_in_files = self._bad_in_files, []
        return bad

    def _sources(self, load: Load) -> _Loading:
        """What stands in DRAM comes from there, what else has a place from its file."""
        blocks = np.array(load.blocks, np.int64)
        seeds = self._seeds(load.hashes)
        slots = self._arena.lookup(self._row, load.hashes)
        here = np.flatnonzero(slots >= 0)
        arena = _ArenaSource(self._arena, self._cache, slots[here], blocks[here], seeds[here])
        source = _Loading(load.hashes, blocks, slots[here], [(here, arena)])
        placed = [i for i in np.flatnonzero(slots < 0) if load.hashes[i] in load.places]
        if placed and self._files is not None:
            places: list[Any] = [load.places[load.hashes[i]] for i in placed]
            limit_s = min(sum(load.limits_s) or self._lease_s, self._lease_s)
            try:
                files = self._files.source(places, blocks[placed], seeds[placed], DEPTH, limit_s)
            except (OSError, RuntimeError, ValueError) as error:
                logger.warning("%d KV blocks are computed, not read: %s", len(placed), error)
            else:
                source.parts.append((np.array(placed), files))
                source.files = files
        return source

    def _settle(self, pipeline: LayerPipeline, source: _Loading) -> None:
        bad = np.ones(len(source.blocks), np.bool_)
        lost = Counter({"gone": len(bad)})
        corrupt: list[bytes] = []
        try:
            pipeline.finish()
        except Exception:
            logger.exception("loading KV failed; %d blocks are computed", len(bad))
            lost = Counter({"error": len(bad)})
        else:
            for indices, part in source.parts:
                bad[indices] = part.bad
                wrong = [source.hashes[i] for i in indices[part.bad]]
                medium, cause = "dram", "corrupt"
                if part is source.files:
                    medium = source.files.medium
                    if wrong:
                        cause = source.files.cause()
                    if cause != "slow":
                        self._bad_in_files += wrong
                else:
                    corrupt += wrong
                lost["gone"] -= len(indices)
                lost[f"{cause}_{medium}"] += len(wrong)
                self.counts[f"loaded_{medium}"] += len(indices) - len(wrong)
        if self._files is not None and source.files is not None:
            self._files.settle(source.files)
            self._measure(source.files, pipeline.seconds)
        self.counts.update({f"lost_{cause}": n for cause, n in lost.items() if n})
        loaded = int((~bad).sum())
        if loaded:
            medium = "dram" if source.files is None else source.files.medium
            self._loads.append((medium, loaded, pipeline.seconds))
        self._failed.update(source.blocks[bad].tolist())
        if bad.any():
            logger.warning("%d of %d KV blocks are computed anew: %s", bad.sum(), len(bad), +lost)
        self._saver.submit(self._after_load, source.slots, corrupt)

    def _after_load(self, slots: np.ndarray, corrupt: list[bytes]) -> None:
        """Give the leases of a load back, and drop blocks whose bytes were wrong."""
        try:
            self._arena.release(slots)
            if corrupt:
                self._arena.discard(self._row, corrupt)
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


class _ArenaSource:
    """Blocks of one step's load that stand in the arena: `slots`, to `blocks`."""

    def __init__(
        self,
        arena: Arena,
        cache: EngineCache,
        slots: np.ndarray,
        blocks: np.ndarray,
        seeds: np.ndarray,
    ) -> None:
        self._cache, self._blocks, self._seeds = cache, blocks, seeds
        self._payloads = arena.addresses(slots).astype(np.uint64)
        self._expected = arena.sums(slots)
        self.bad = np.zeros(len(blocks), np.bool_)

    def begin(self, layer: int) -> None:
        """Memory needs no asking."""

    def end(self, layer: int) -> None:
        if len(self._blocks):
            mine = self._cache.columns(layer)
            sums = self._cache.load(layer, self._blocks, self._payloads, self._seeds[:, mine])
            self.bad |= (sums != self._expected[:, mine]).any(axis=1)


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
    parts: list[tuple[np.ndarray, _ArenaSource | FileSource]]
    files: FileSource | None = None


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SAVE_NICENESS)
