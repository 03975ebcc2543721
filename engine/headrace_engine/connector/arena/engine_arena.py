"""A node's arena as one side of an engine's connector sees it, with the engine's blocks in it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig

from headrace_engine.connector.cache_groups import CacheGroups
from headrace_engine.connector.caches.quantized_cache import layer_shape, stored_layer_bytes
from headrace_engine.connector.identity.engine_identity import device_identity, engine_namespace
from headrace_engine.connector.identity.weights import Unidentified
from headrace_engine.connector.supported_engines import engine_sharding, stored_groups
from headrace_engine.vllm.kv_cache import recurrent_layout
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.writer_group import Writer, writer_group_id
from headrace_kvstore.blocks.checksum import block_seed, layer_seeds
from headrace_kvstore.blocks.sharding import HeadSharding, Shard
from headrace_kvstore.codec import CODECS, Codec, LayerShape
from headrace_kvstore.identity.namespace import DIGEST_BYTES
from headrace_kvstore.settings.store_settings import StoreSettings

logger = logging.getLogger("headrace.kvstore")

UNIDENTIFIED_DIGEST = bytes(DIGEST_BYTES)
"""Digest of an engine whose KV has no identity."""


@dataclass(frozen=True)
class EngineArena:
    """An arena, and where an engine's blocks are in it.

    Attributes:
        settings: of the connector.
        row: of the engine's blocks. digest: of their namespace. about: the namespace, in a line for
            people; empty if the engine's KV cannot be identified. Then it is neither loaded nor
            saved.
        groups: the cache groups of the layers in a block. parts: how each layer is cut.
        rank: of the worker whose side this is; 0 for the scheduler's.
        group: identifies the engine's workers when they fill blocks together.
        part_bytes: of a stored part. engine_block_bytes: of a block in one worker's cache.
        codec: of the stored blocks. shape: of a worker's part of a layer, if the codec is lossy.
    """

    arena: Arena
    settings: StoreSettings
    row: int
    digest: bytes
    groups: CacheGroups
    parts: HeadSharding
    rank: int
    about: str
    group: int
    part_bytes: int
    engine_block_bytes: int
    codec: Codec
    shape: LayerShape | None

    @staticmethod
    def of(
        vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> EngineArena:
        """Open the arena that the connector's settings name.

        Raises:
            SettingsError: a setting is unknown or impossible.
            ValueError: this engine's cache cannot be stored.
        """
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        settings = StoreSettings.parse(transfer.kv_connector_extra_config)
        codec, shape = CODECS[settings.codec](), None
        groups = stored_groups(kv_cache_config, codec)
        spec, layers = groups.spec, groups.stored_layers
        cache_layout = kv_cache_config.kv_cache_layout
        parts = engine_sharding(vllm_config, cache_layout, spec, codec)
        part_bytes = spec.page_size_bytes // parts.shard(0).count
        if codec.lossy:
            shape = layer_shape(spec, device_identity(vllm_config))
            part_bytes = stored_layer_bytes(codec, shape)
        pieces = layers * parts.parts
        arena = _open(settings, pieces * part_bytes, pieces)
        space, digest = None, UNIDENTIFIED_DIGEST
        layout = cache_layout
        if groups.states is not None:
            layout = f"{cache_layout}/{recurrent_layout(vllm_config, kv_cache_config)}"
        names = layout, parts.parts, list(groups.of_layer), codec
        try:
            space = engine_namespace(vllm_config, *names)
        except Unidentified as error:
            settings = settings.model_copy(update={"load": False, "save": False})
            if role == KVConnectorRole.SCHEDULER:
                logger.warning("this engine neither loads stored KV nor stores any: %s", error)
        else:
            digest = space.digest
        row = 0 if space is None else arena.register_namespace(digest, pieces * part_bytes, pieces)
        rank = 0
        if role == KVConnectorRole.WORKER:
            rank = vllm_config.parallel_config.rank % parts.ranks
        return EngineArena(
            *(arena, settings, row, digest, groups, parts, rank),
            about="" if space is None else space.describe(),
            group=writer_group_id(str(transfer.engine_id)),
            part_bytes=part_bytes,
            engine_block_bytes=layers * spec.page_size_bytes,
            codec=codec,
            shape=shape,
        )

    @property
    def layers(self) -> int:
        """Number of layers in a block."""
        return self.groups.stored_layers

    @property
    def pieces(self) -> int:
        """Number of parts of all layers of a block, which has a checksum for each."""
        return self.layers * self.parts.parts

    @property
    def block_bytes(self) -> int:
        """Bytes of a stored block."""
        return self.pieces * self.part_bytes

    @property
    def whole_block_bytes(self) -> int:
        """Bytes of a block in the caches of all workers; bytes that several workers have count
        once."""
        return self.engine_block_bytes * self.parts.writers

    @property
    def held(self) -> Shard:
        """This worker's parts of each layer."""
        return self.parts.shard(self.rank)

    @property
    def writes(self) -> bool:
        """Whether this worker writes into the store; if not, a lower rank has the same bytes."""
        return self.parts.writer(self.rank) is not None

    @property
    def writer(self) -> Writer | None:
        """This worker among those that fill blocks together; None if one fills them alone or this
        worker does not write."""
        number, count = self.parts.writer(self.rank), self.parts.writers
        return None if number is None or count == 1 else Writer(self.group, number, count)

    def seeds(self, hashes: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return the checksum seeds [n, pieces] of blocks."""
        return layer_seeds([block_seed(self.digest, each) for each in hashes], self.pieces)

    def holds(self, hashes: Sequence[bytes]) -> bool:
        """Whether DRAM has all these blocks. No side effects."""
        return bool(self.about and (self.arena.lookup(self.row, hashes) >= 0).all())

    def leased(self, hashes: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Lease blocks for `lease_s`; return their slots, -1 for those that are not stored."""
        return self.arena.lease(self.row, hashes, self.settings.lease_s)

    def follow(self) -> EngineArena | None:
        """Open the arena that has taken this one's name; return None if no other has.

        Raises:
            OSError, ValueError, LockBusyError: it cannot be opened, or has no room for this
                engine's blocks.
        """
        if not self.arena.replaced():
            return None
        arena = _open(self.settings, self.block_bytes, self.pieces)
        try:
            row = 0
            if self.about:
                row = arena.register_namespace(self.digest, self.block_bytes, self.pieces)
        except BaseException:
            arena.close()
            raise
        return replace(self, arena=arena, row=row)

    def close(self) -> None:
        """Close the arena."""
        self.arena.close()


def _open(settings: StoreSettings, block_bytes: int, pieces: int) -> Arena:
    return Arena.create_or_attach(
        settings.name,
        settings.dram_bytes,
        folder=settings.folder,
        block_bytes=block_bytes,
        layers=pieces,
        policy=settings.policy,
        **settings.quota_options,
    )
