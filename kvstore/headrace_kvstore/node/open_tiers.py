"""A StoreNode's tiers, opened as its settings say."""

from __future__ import annotations

from collections.abc import Callable

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.node_settings import NodeSettings
from headrace_kvstore.nvme.mover import Mover
from headrace_kvstore.nvme.nvme_tier import NvmeTier, TierEvent


def open_arena(settings: NodeSettings) -> Arena:
    """Open the node's arena, or make it. Raises as `Arena.create_or_attach`."""
    return Arena.create_or_attach(
        settings.name,
        settings.dram_bytes,
        folder=settings.folder,
        block_bytes=settings.block_bytes,
        layers=settings.layers,
        policy=settings.policy,
        **settings.quota_options,
    )


def open_tier(
    settings: NodeSettings, mover: Mover, on_event: Callable[[TierEvent], None]
) -> NvmeTier:
    """Own the folder of the settings, which there is. Raises FolderBusy."""
    assert settings.nvme_folder is not None
    return NvmeTier.open(
        settings.nvme_folder,
        settings.nvme_bytes,
        settings.segment_bytes,
        mover,
        events=[on_event],
    )
