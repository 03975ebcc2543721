"""Loads of KV blocks from the machine's arena, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.connector.loading.block_ids import BlockIds
from headrace_kvstore.arena.arena import Arena


class ArenaSource:
    """Blocks of one load that are in the arena; a `LayerSource`.

    Args:
        slots: int64 [n], where they are in the arena.
        blocks: int64 [n, cache groups], ids as `BlockIds` takes them.
        seeds: u64 [n, parts of all layers].

    Attributes:
        bad: bool [n], blocks that did not match their checksums.
    """

    def __init__(
        self,
        arena: Arena,
        cache: EngineCache,
        slots: np.ndarray,
        blocks: np.ndarray,
        seeds: np.ndarray,
    ) -> None:
        self._cache, self._seeds = cache, seeds
        self._blocks = BlockIds(blocks, cache.groups)
        self._generations = arena.table["generation"]
        self.slots, self._generation = slots, self._generations[slots]
        self._payloads = arena.addresses(slots).astype(np.uint64)
        self._expected = arena.sums(slots)
        self._started: dict[int, Callable[[], np.ndarray]] = {}
        self.bad = np.zeros(len(blocks), np.bool_)

    def begin(self, layer: int) -> None:
        rows, ids = self._blocks.of_layer(layer)
        if len(ids):
            seeds = self._seeds[rows, self._cache.columns(layer)]
            self._started[layer] = self._cache.start(layer, ids, self._payloads[rows], seeds)

    def end(self, layer: int) -> None:
        rows, ids = self._blocks.of_layer(layer)
        if len(ids):
            wanted = self._expected[rows, self._cache.columns(layer)]
            self.bad[rows] |= (self._started.pop(layer)() != wanted).any(axis=1)

    def overwritten(self) -> np.ndarray:
        """Return which slots were given to other blocks since the load began, bool [n]."""
        changed: np.ndarray = self._generations[self.slots] != self._generation
        return changed
