"""Moving KV blocks between an engine's cache and its node's arena.

This is the worker half of the connector without its vLLM shell. Loads run layer by layer under the
step that needs them; each (block, layer) is compared with its checksum before the step may use it,
and a block that fails, or is gone, is reported, so that vLLM computes it. Saves run in a thread of
their own after the step that found them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from headrace_kvstore.arena import Arena
from headrace_kvstore.connector.pipeline import DepthFit, LayerPipeline
from headrace_kvstore.connector.scheduler import Load, Save, Work
from headrace_kvstore.connector.settings import StoreSettings
from headrace_kvstore.table import hash_word

logger = logging.getLogger("headrace.kvstore")

SAVE_NICENESS = 5
"""Of the saving thread: the engine's computing thread goes first where both want a core."""


class EngineCache(Protocol):
    """An engine's KV cache; see `cache.HostCache`."""

    @property
    def layer_names(self) -> Sequence[str]: ...
    def load(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray: ...
    def save(self, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray) -> np.ndarray: ...


class WorkerHalf:
    """Carries out what the scheduler half decided, for one worker.

    Args:
        arena, row: where this worker's blocks are.
        cache: the engine's cache.
        seeds: block hashes -> checksum seeds [n, layers].
        settings: of the store.
    """

    def __init__(
        self, arena: Arena, row: int, cache: EngineCache, seeds: Any, settings: StoreSettings
    ) -> None:
        self._arena, self._row, self._cache, self._seeds = arena, row, cache, seeds
        self._layer_of = {name: i for i, name in enumerate(cache.layer_names)}
        self._fit = DepthFit(settings.depth)
        self._loader = ThreadPoolExecutor(1, "kv-load")
        self._saver = ThreadPoolExecutor(1, "kv-save", initializer=_be_nice)
        self._pipeline: LayerPipeline | None = None
        self._source: _ArenaSource | None = None
        self._failed: set[int] = set()
        self._saves: dict[int, Save] = {}
        self._done: list[int] = []
        self._lock = threading.Lock()
        self.blocks_loaded = self.blocks_saved = self.blocks_failed = 0

    def begin(self, work: Work) -> None:
        """A step begins; its load starts."""
        self._saves = work.saves
        if work.load.blocks:
            self._source = _ArenaSource(self._arena, self._row, self._cache, self._seeds, work.load)
            layers = len(self._cache.layer_names)
            self._pipeline = LayerPipeline(self._source, layers, self._loader, self._fit)

    def wait(self, layer_name: str) -> None:
        """The step needs a layer now. Layers that share another's cache are no concern of ours."""
        layer = self._layer_of.get(layer_name)
        if self._pipeline is not None and layer is not None:
            with contextlib.suppress(Exception):  # `end` reports what failed
                self._pipeline.wait(layer)

    def end(self) -> None:
        """The step has computed, or there was nothing to compute; its saves start."""
        if self._pipeline is not None and self._source is not None:
            self._settle(self._pipeline, self._source)
            self._pipeline = self._source = None
        saves, self._saves = self._saves, {}
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

    def close(self) -> None:
        """Stop; copies under way end first."""
        self._loader.shutdown()
        self._saver.shutdown(cancel_futures=True)
        self._arena.close()

    def _settle(self, pipeline: LayerPipeline, source: _ArenaSource) -> None:
        try:
            pipeline.finish()
            bad, corrupt = source.bad, source.bad & source.found
        except Exception:
            logger.exception("loading KV failed; %d blocks are computed", len(source.blocks))
            bad, corrupt = np.ones_like(source.bad), np.zeros_like(source.bad)
        self.blocks_loaded += int((~bad).sum())
        self.blocks_failed += int(bad.sum())
        self._failed.update(source.blocks[bad].tolist())
        if corrupt.any():
            logger.warning("%d KV blocks did not match their checksums", int(corrupt.sum()))
            self._arena.discard(self._row, [source.hashes[i] for i in np.flatnonzero(corrupt)])

    def _save(self, job: int, save: Save) -> None:
        try:
            self.blocks_saved += self._copy_out(save)
        except Exception:
            logger.exception("saving %d KV blocks failed", len(save.blocks))
        with self._lock:
            self._done.append(job)

    def _copy_out(self, save: Save) -> int:
        slots = self._arena.reserve(
            self._row,
            save.hashes,
            [hash_word(parent) for parent in save.parents],
            save.depths,
            tenant=tenant_number(save.tenant),
        )
        given = slots >= 0
        slots = slots[given]
        if not len(slots):
            return 0
        try:
            blocks = np.array(save.blocks, np.int64)[given]
            hashes = [h for h, g in zip(save.hashes, given, strict=True) if g]
            payloads = self._arena.addresses(slots).astype(np.uint64)
            sums = self._cache.save(blocks, payloads, self._seeds(hashes))
        except BaseException:
            self._arena.abandon(slots)
            raise
        return int(self._arena.publish(slots, sums).sum())


class _ArenaSource:
    """One step's load from the arena."""

    def __init__(self, arena: Arena, row: int, cache: EngineCache, seeds: Any, load: Load) -> None:
        self.hashes = load.hashes
        self.blocks = np.array(load.blocks, np.int64)
        slots = arena.lookup(row, load.hashes)
        self.found = slots >= 0
        self.bad = ~self.found
        self._cache = cache
        self._there = np.flatnonzero(self.found)
        self._payloads = arena.addresses(slots[self.found]).astype(np.uint64)
        self._expected = arena.sums(slots[self.found])
        self._seed = seeds(load.hashes)[self.found]

    def begin(self, layer: int) -> None:
        """Memory needs no asking."""

    def end(self, layer: int) -> None:
        there = self._there
        if not len(there):
            return
        sums = self._cache.load(layer, self.blocks[there], self._payloads, self._seed[:, layer])
        self.bad[there] |= sums != self._expected[:, layer]


def tenant_number(salt: str) -> int:
    """A tenant in the slot table: 0 for none, else 32 bits of its cache salt's hash."""
    if not salt:
        return 0
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=4).digest()) or 1


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SAVE_NICENESS)
