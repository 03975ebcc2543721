"""An engine's cache, a node's arena and the connector's worker half between them; no engine.

The cache is what vLLM's CPU backend gives SmolLM2-135M: for each of 30 layers one tensor [blocks,
KV heads 3, tokens 128, 2 x head dim 64]. Loads and saves go the connector's own way.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import torch

from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.connector.store_work import BlockLoad, BlockSave, StoreWork
from headrace_engine.connector.worker_connector import WorkerConnector
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.geometry import PAGE_BYTES
from headrace_kvstore.arena.shared_file import MADV_POPULATE_WRITE
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.checksum import block_seed, copy, layer_seeds
from headrace_kvstore.blocks.sharding import HeadSharding
from headrace_kvstore.settings.store_settings import StoreSettings

LAYERS, KV_HEADS, BLOCK_TOKENS, HEAD_DIM = 30, 3, 128, 64
PIECES = LAYERS * KV_HEADS
"""Parts of a block with a checksum each."""
BLOCKS = 46
"""Full blocks of a prompt of 6,000 tokens: 271 MB in float32."""
LEASE_S = 30.0
_POLL_S = 50e-6


class Stage:
    """Some full blocks in an engine's cache, at scattered places, that a store can hold.

    Args:
        dtype: of the cache.
        blocks: how many; the cache and the arena hold just so many.
        threads: the connector's `copy_threads`.
    """

    def __init__(self, dtype: str = "float32", blocks: int = BLOCKS, threads: int = 1) -> None:
        rng = np.random.default_rng(0)
        shape = (blocks, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_DIM)
        self.caches = {
            f"model.layers.{i}.self_attn.attn": torch.empty(shape, dtype=getattr(torch, dtype))
            for i in range(LAYERS)
        }
        for cache in self.caches.values():
            self._bytes_of(cache)[:] = rng.integers(0, 256, cache.nbytes, dtype=np.uint8)
        held = HeadSharding.of(KV_HEADS, 1, heads_contiguous=True).shard(0)
        self.layout = BlockLayout.of_tensors(self.caches, blocks, held)
        self.cache = EngineCache(self.layout, threads)
        self.size_bytes = self.layout.block_bytes * blocks
        self.hashes = [rng.bytes(32) for _ in range(blocks)]
        self.blocks = rng.permutation(blocks)
        self.digest = rng.bytes(16)
        self.arena = Arena.create_or_attach(
            f"headrace-bench-{uuid.uuid4().hex[:12]}",
            (blocks + 8) * (self.layout.block_bytes + PAGE_BYTES) + (8 << 20),
            block_bytes=self.layout.block_bytes,
            layers=PIECES,
        )
        self.arena._file.memory.madvise(MADV_POPULATE_WRITE)
        self.row = self.arena.register_namespace(self.digest, self.layout.block_bytes, PIECES)
        settings = StoreSettings(copy_threads=threads)
        self.worker = WorkerConnector(self.arena, self.row, self.cache, self.seeds, settings)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.arena.unlink()
        self.worker.close()

    def seeds(self, hashes: Sequence[bytes]) -> np.ndarray:
        """Return the checksum seeds u64 [n, pieces], as the connector makes them."""
        return layer_seeds([block_seed(self.digest, each) for each in hashes], PIECES)

    def save(self) -> None:
        """Put all blocks into the arena: reserve, copy and sum, publish."""
        self.arena.lookup(self.row, self.hashes)
        parents = [b"", *self.hashes[:-1]]
        depths = list(range(len(self.hashes)))
        save = BlockSave([self.blocks.tolist()], self.hashes, parents, depths)
        self.worker.begin(StoreWork(saves={0: save}))
        self.worker.end()
        while not self.worker.finished_jobs():
            time.sleep(_POLL_S)

    def load(self) -> None:
        """Get all blocks out of the arena: lease, copy and sum layer by layer, compare.

        Raises:
            RuntimeError: a block was not there, or not what was saved.
        """
        self.arena.lookup(self.row, self.hashes)
        self.arena.lease(self.row, self.hashes, LEASE_S)
        self.worker.begin(StoreWork(load=BlockLoad([self.blocks.tolist()], self.hashes)))
        for name in self.cache.layer_names:
            self.worker.wait(name)
        self.worker.end()
        if failed := self.worker.failed_blocks():
            raise RuntimeError(f"{len(failed)} blocks were not loaded")

    def load_unverified(self, threads: int) -> None:
        """Do the same as `load`, in the caller's thread and without sums."""
        slots = self.arena.lookup(self.row, self.hashes)
        self.arena.lease(self.row, self.hashes, LEASE_S)
        targets = self.layout.engine_addresses(self.blocks)
        sources = self.layout.payload_addresses(self.arena.addresses(slots).astype(np.uint64))
        for layer in range(LAYERS):
            copy(targets[:, layer], sources[:, layer], self.layout.piece_bytes, threads=threads)

    def forget(self) -> None:
        """Empty the arena."""
        self.arena.clear()

    def wipe(self) -> None:
        """Zero the engine's cache."""
        for cache in self.caches.values():
            self._bytes_of(cache)[:] = 0

    def content(self) -> np.ndarray:
        """Return a copy of all bytes of the engine's cache, u8 [layers, bytes]."""
        return np.stack([self._bytes_of(cache) for cache in self.caches.values()])

    @staticmethod
    def _bytes_of(cache: torch.Tensor) -> np.ndarray:
        flat: np.ndarray = cache.view(torch.uint8).reshape(-1).numpy()
        return flat
