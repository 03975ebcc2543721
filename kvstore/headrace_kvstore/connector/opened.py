"""A node's arena as one half of an engine's connector sees it: which rows are the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.codec import CODECS, Codec, LayerShape
from headrace_kvstore.connector.coded import layer_shape, stored_layer_bytes
from headrace_kvstore.connector.identity import device_identity, engine_namespace
from headrace_kvstore.keys import Namespace
from headrace_kvstore.settings import StoreSettings


@dataclass(frozen=True)
class OpenedArena:
    """An arena, and where an engine's blocks are in it.

    Attributes:
        settings: of the connector.
        rows: of the workers that this half speaks of: all of them, or one.
        spaces: their namespaces.
        layers: whose KV a block holds.
        block_bytes: of a stored block; `engine_block_bytes` of one in the engine's cache.
        codec: blocks are stored under it. shape: of a layer, if it is lossy.
    """

    arena: Arena
    settings: StoreSettings
    rows: list[int]
    spaces: list[Namespace]
    layers: int
    block_bytes: int
    engine_block_bytes: int
    codec: Codec
    shape: LayerShape | None

    @staticmethod
    def of(
        vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> OpenedArena:
        """Open the arena that the connector's settings name.

        Raises:
            SettingsError: a setting is unknown or impossible.
            ValueError: this engine's cache cannot be stored.
        """
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        settings = StoreSettings.parse(transfer.kv_connector_extra_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError(
                f"the KV store keeps models with one kind of attention; this one has "
                f"{len(kv_cache_config.kv_cache_groups)} cache groups"
            )
        [group] = kv_cache_config.kv_cache_groups
        layers, spec = len(group.layer_names), group.kv_cache_spec
        codec, shape = CODECS[settings.codec](), None
        layer_bytes = spec.page_size_bytes
        if codec.lossy:
            shape = layer_shape(spec, device_identity(vllm_config))
            layer_bytes = stored_layer_bytes(codec, shape)
        block_bytes = layers * layer_bytes
        arena = Arena.create_or_attach(
            settings.name,
            settings.dram_bytes,
            folder=settings.folder,
            block_bytes=block_bytes,
            layers=layers,
            policy=settings.policy,
            **settings.quota_options,
        )
        parallel = vllm_config.parallel_config
        ranks = range(parallel.tensor_parallel_size)
        if role == KVConnectorRole.WORKER:
            ranks = range(parallel.rank % len(ranks), parallel.rank % len(ranks) + 1)
        spaces = [
            engine_namespace(
                *(vllm_config, kv_cache_config.kv_cache_layout, rank), *(group.layer_names, codec)
            )
            for rank in ranks
        ]
        rows = [arena.namespace(space.digest, block_bytes, layers) for space in spaces]
        sizes = block_bytes, layers * spec.page_size_bytes
        return OpenedArena(arena, settings, rows, spaces, layers, *sizes, codec, shape)

    @property
    def digest(self) -> bytes:
        """Of the only namespace."""
        [space] = self.spaces
        return space.digest

    def holds(self, hashes: Sequence[bytes]) -> bool:
        """Whether DRAM has all these blocks, every worker's part. No side effects."""
        return all(bool((self.arena.lookup(row, hashes) >= 0).all()) for row in self.rows)

    def leased(self, hashes: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Slots of one worker's blocks, kept for `lease_s`; -1 for those that are not there."""
        [row] = self.rows
        return self.arena.lease(row, hashes, self.settings.lease_s)

    def close(self) -> None:
        """Let the arena go."""
        self.arena.close()
