"""Fingerprints of KV blocks: one u64 a block over all its layers, made where the KV lies.

The sums are those of the store (`headrace_kvstore.blocks.checksum`): one for each layer, with a
seed of its own, and one more over these, with the block's seed. Seeds come from the hand-out, so
the sums of two hand-outs are never confused. A separate thread computes them: no step of the engine
waits for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.pull_proof.identity import Identity
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.checksum import checksum, layer_seeds

_PERSON = b"headrace-content"


def block_seeds(identity: Identity, positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the seeds, u64 [n], of blocks by their position in the prompt."""
    key = identity.incarnation + identity.generation.to_bytes(8, "little")
    first = int.from_bytes(hashlib.blake2b(key, digest_size=8, person=_PERSON).digest(), "little")
    return np.uint64(first) + np.asarray(positions, np.uint64)


class BlockSums:
    """Maker of fingerprints of an engine's blocks.

    Args:
        caches: tensor by layer name, as vLLM registers them.
        blocks: the scheduler's block count.

    Raises:
        LayoutError: the cache's blocks cannot be told apart (hybrid models).
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], blocks: int) -> None:
        layout = BlockLayout.of_tensors(caches, blocks)
        self._cache = EngineCache(layout)
        if next(iter(caches.values())).device.type != "cpu":
            # Triton is installed where there is a GPU.
            from headrace_engine.connector.caches.device_cache import DeviceCache

            self._cache = DeviceCache(caches, layout, staging_bytes=0)
        self._layers = len(layout.names)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-sums")

    def of(self, blocks: Sequence[int], seeds: np.ndarray) -> np.ndarray:
        """Return the fingerprints, u64 [n], of blocks by their ids in the cache; seeds u64 [n].
        Raises IndexError for an id outside the cache."""
        ids = np.asarray(blocks, np.int64)
        layers = self._cache.sums(ids, layer_seeds(seeds, self._layers))
        addresses = np.uint64(layers.ctypes.data) + np.uint64(8 * self._layers) * np.arange(
            len(ids), dtype=np.uint64
        )
        return checksum(addresses, 8 * self._layers, seeds)

    def start(self, blocks: Sequence[int], seeds: np.ndarray) -> Future[Any]:
        """Run `of` on the thread, after the work that the caller has launched on a device."""
        self._cache.fence()
        return self._thread.submit(self.of, blocks, seeds)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
