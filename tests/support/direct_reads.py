"""Loads from the tier's files into a cache on a device, without an engine."""

from __future__ import annotations

import numpy as np
import torch

from headrace_engine.connector.loading.file_loader import FileLayerSource, FileLoader
from headrace_engine.connector.loading.layer_pipeline import InlineExecutor, LayerPipeline
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.nvme.segment import Location
from tests.unit.test_kv_connector_files import (
    BLOCKS,
    HASHES,
    LAYER_BYTES,
    LAYERS,
    NAMES,
    seeds,
)

STAGING_BYTES = 1 << 20


class Direct:
    """A cache on a device, and its reads from files.

    Args:
        backend: of NIXL.
        device: "cpu" counts as a device in Triton's interpreter.
    """

    def __init__(self, backend: str, device: str = "cpu") -> None:
        from headrace_engine.connector.caches.device_cache import DeviceCache  # needs Triton

        self.tensors = {
            name: torch.zeros((BLOCKS, LAYER_BYTES), dtype=torch.uint8, device=device)
            for name in NAMES
        }
        layout = BlockLayout.of_tensors(self.tensors, BLOCKS)
        self.cache = DeviceCache(self.tensors, layout, staging_bytes=4 * LAYER_BYTES, saves=False)
        self.tier = FileLoader(self.cache, STAGING_BYTES, backend)

    def load(self, places: dict[bytes, Location], blocks: list[int]) -> FileLayerSource:
        names = [HASHES[block] for block in blocks]
        source = self.tier.source(
            [places[name] for name in names], np.array(blocks), seeds(names), depth=2
        )
        try:
            LayerPipeline([source], LAYERS, InlineExecutor(), source.depth).finish()
        finally:
            self.tier.settle(source)
        return source

    def tried(self) -> None:
        """Wait until it is known which way is the faster one."""
        assert self.tier._trial is not None
        self.tier._trial.join(60)
        assert not self.tier._trial.is_alive()

    def content(self, block: int) -> bytes:
        return b"".join(self.tensors[name][block].cpu().numpy().tobytes() for name in NAMES)
