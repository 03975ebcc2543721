"""An engine's KV cache, as the store sees it, and the one in host memory: blocks in and out, one
pass a byte, checksums on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from headrace_kvstore.checksum import copy_sum, prepare
from headrace_kvstore.layout import BlockLayout


class EngineCache(Protocol):
    """Blocks in and out of an engine; arguments as `HostCache` says."""

    layout: BlockLayout

    @property
    def stored_layer_bytes(self) -> int: ...
    @property
    def layer_names(self) -> Sequence[str]: ...
    def fence(self) -> None: ...
    def load(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray: ...
    def save(self, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray) -> np.ndarray: ...


class HostCache:
    """Copies between an engine's cache and payloads, both in this process's memory.

    Args:
        layout: of the engine's cache.
        threads: share one copy.
    """

    def __init__(self, layout: BlockLayout, threads: int = 1) -> None:
        prepare()
        self.layout = layout
        self._threads = threads

    @property
    def layer_names(self) -> tuple[str, ...]:
        """In payload order."""
        return self.layout.names

    @property
    def stored_layer_bytes(self) -> int:
        """Bytes of one layer of one payload."""
        return self.layout.layer_bytes

    def fence(self) -> None:
        """Nothing: what has been computed in host memory is there."""

    def load(
        self, layer: int, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        """Copy one layer of n blocks in.

        Args:
            blocks: int64 [n], ids in the engine's cache.
            payloads: uint64 [n], addresses of the blocks' payloads.
            seeds: uint64 [n].

        Returns:
            uint64 [n], checksums of what was read.
        """
        layout = self.layout
        return copy_sum(
            layout.engine_addresses(blocks)[:, layer],
            layout.payload_addresses(payloads)[:, layer],
            layout.piece_bytes,
            seeds,
            threads=self._threads,
        )

    def save(self, blocks: np.ndarray, payloads: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Copy n blocks out, all layers; arguments as `load`, seeds and checksums [n, layers]."""
        layout = self.layout
        return copy_sum(
            layout.payload_addresses(payloads),
            layout.engine_addresses(blocks),
            layout.piece_bytes,
            seeds,
            threads=self._threads,
        )
