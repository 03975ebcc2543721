"""Worker halves of the store's connector over one arena, with caches in plain memory."""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.connector.store_work import BlockSave, StoreWork
from headrace_engine.connector.worker_connector import WorkerConnector
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.sharding import Shard
from headrace_kvstore.settings.store_settings import StoreSettings

LAYERS, LAYER_BYTES, BLOCKS = 4, 256, 8
NAMES = [f"model.layers.{i}.attn" for i in range(LAYERS)]
HASHES = [bytes([i]) * 32 for i in range(1, BLOCKS + 1)]


class PlainCache(EngineCache):
    """An engine's cache in plain memory; its checksum is a seeded CRC."""

    layer_names: Sequence[str] = NAMES
    held = Shard()

    def __init__(self, fill: int) -> None:
        rng = np.random.default_rng(fill)
        self.data = rng.integers(0, 256, (LAYERS, BLOCKS, LAYER_BYTES), np.uint8)

    def fence(self) -> None:
        """Nothing runs ahead here."""

    def load(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        for block, payload in zip(blocks, payloads, strict=True):
            there = int(payload) + layer * LAYER_BYTES
            ctypes.memmove(self.data[layer, block].ctypes.data, there, LAYER_BYTES)
        return np.array([[self._sum(layer, b, s)] for b, [s] in zip(blocks, seeds, strict=True)])

    def save(self, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        sums = np.zeros((len(blocks), LAYERS), np.uint64)
        for i, ([block], payload) in enumerate(zip(blocks, payloads, strict=True)):
            for layer in range(LAYERS):
                here = self.data[layer, block].ctypes.data
                ctypes.memmove(int(payload) + layer * LAYER_BYTES, here, LAYER_BYTES)
                sums[i, layer] = self._sum(layer, block, seeds[i, layer])
        return sums

    def _sum(self, layer: int, block: int, seed: int) -> np.uint64:
        return np.uint64(zlib.crc32(self.data[layer, block].tobytes(), int(seed) & 0xFFFFFFFF))


def seeds(hashes: Sequence[bytes]) -> np.ndarray:
    return np.array([[h[0] * 100 + i for i in range(LAYERS)] for h in hashes], np.uint64)


class Node:
    """Engines over one arena."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workers: list[WorkerConnector] = []

    def engine(self, fill: int) -> tuple[WorkerConnector, PlainCache, Arena]:
        arena = Arena.create_or_attach(
            "a", 4 << 20, folder=self.folder, block_bytes=LAYERS * LAYER_BYTES, layers=LAYERS
        )
        row = arena.register_namespace(b"n" * 16, LAYERS * LAYER_BYTES, LAYERS)
        cache = PlainCache(fill)
        worker = WorkerConnector(arena, row, cache, seeds, StoreSettings())
        self.workers.append(worker)
        return worker, cache, arena


def save(worker: WorkerConnector, blocks: list[int], job: int = 1, tenant: str = "") -> None:
    names = [HASHES[b] for b in blocks]
    parents = [HASHES[b - 1] if b else b"" for b in blocks]
    worker.begin(StoreWork(saves={job: BlockSave([blocks], names, parents, blocks, tenant)}))
    worker.end()
    limit = time.monotonic() + 5
    while job not in worker.finished_jobs():
        assert time.monotonic() < limit, "the save did not end"
        time.sleep(0.002)
