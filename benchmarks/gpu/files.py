"""Loads of whole blocks from the NVMe tier's files into a KV cache on the card, on both ways.

Blocks as Llama 3 8B has them at TP=2: 32 layers of 32 KiB. They are written by the tier into a
folder in HEADRACE_GPU_DISK, or in /var/tmp, and read with O_DIRECT. Each load is the store's own:
eight layers on their way at once, each put in place and summed by a kernel and compared.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.parts import Report
from benchmarks.gpu.timing import DEVICE
from headrace_engine.connector.caches.device_cache import DeviceCache
from headrace_engine.connector.loading.file_loader import DIRECT_BACKEND, FileLayerSource
from headrace_engine.connector.loading.layer_pipeline import DEPTH, InlineExecutor, LayerPipeline
from headrace_engine.connector.loading.read_paths import BounceBufferPath, GdsPath, ReadPath
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.checksum import block_seed, checksum, layer_seeds
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.record import BlockShape, WriteRequest
from headrace_kvstore.nvme.segment import Location, page_memory

LAYERS, LAYER_BYTES, BLOCKS, FEW = 32, 32 << 10, 512, 2
TURNS, WARM = 7, 1
STAGING_BYTES = 256 << 20
DIGEST = b"benchmark-digest"
DRY_BACKEND = "POSIX"
"""NIXL's plugin in place of GPUDirect Storage's in a dry run."""


class Disk:
    """Blocks in files, and an empty cache on a device for them.

    Args:
        folder: is made.
        blocks: how many.
        device: where the cache is.
    """

    def __init__(self, folder: Path, blocks: int, device: str) -> None:
        self._file_io = FileIo()
        size = blocks * LAYERS * LAYER_BYTES
        self._tier = NvmeTier.open(folder, 2 * size + (64 << 20), 64 << 20, self._file_io)
        names = [n.to_bytes(32, "little") for n in range(1, blocks + 1)]
        self.blocks = np.arange(blocks)
        self.seeds = layer_seeds([block_seed(DIGEST, name) for name in names], LAYERS)
        memory, address = page_memory(size)
        memory[:] = np.random.default_rng(0).integers(0, 256, len(memory), np.uint8)
        pieces = np.uint64(address) + np.arange(blocks * LAYERS, dtype=np.uint64) * np.uint64(
            LAYER_BYTES
        )
        sums = checksum(pieces.reshape(blocks, LAYERS, 1), LAYER_BYTES, self.seeds).reshape(
            blocks, LAYERS
        )
        saves = [
            WriteRequest(name, address + n * LAYERS * LAYER_BYTES, sums[n])
            for n, name in enumerate(names)
        ]
        for done in self._tier.write(BlockShape(DIGEST, LAYERS, LAYER_BYTES), saves):
            if not done.result(60):
                raise RuntimeError("the tier did not write a block")
        found = [self._tier.locate(DIGEST, name) for name in names]
        self.places: list[Location] = [place for place in found if place is not None]
        caches = {
            f"layers.{n}": torch.zeros((blocks, LAYER_BYTES), dtype=torch.uint8, device=device)
            for n in range(LAYERS)
        }
        self.cache = DeviceCache(caches, BlockLayout.of_tensors(caches, blocks), saves=False)
        self.size_bytes = size

    def load(self, way: ReadPath) -> float:
        """Seconds. Raises RuntimeError for wrong bytes."""
        began_s = time.perf_counter()
        source = FileLayerSource(way, self.cache, self.places, self.blocks, self.seeds, DEPTH)
        LayerPipeline([source], LAYERS, InlineExecutor(), source.depth).finish()
        if source.bad.any():
            raise RuntimeError(f"{int(source.bad.sum())} blocks were wrong: {source.cause()}")
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._tier.close()
        self._file_io.close()
        self.cache.close()


def measured(dry: bool, report: Report) -> dict[str, Any]:
    """Return the GB/s by way; and why there is no direct one."""
    blocks, backend = (FEW, DRY_BACKEND) if dry else (BLOCKS, DIRECT_BACKEND)
    found: dict[str, Any] = {"blocks": blocks, "lacking": ""}
    parent = os.environ.get("HEADRACE_GPU_DISK", "/var/tmp")
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="headrace-gpu-", dir=parent)
        )
        disk = Disk(Path(folder) / "nvme", blocks, DEVICE)
        stack.callback(disk.close)
        host = BounceBufferPath(disk.cache, STAGING_BYTES, FileIo())
        stack.callback(host.close)
        arms: dict[str, Callable[[], float]] = {"host": partial(disk.load, host)}
        try:
            direct = GdsPath(disk.cache, backend)
        except Exception as error:
            found["lacking"] = str(error)
        else:
            stack.callback(direct.close)
            arms["direct"] = partial(disk.load, direct)
        taken: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn in range(WARM + (1 if dry else TURNS)):
            for arm, load in arms.items():
                seconds = load()
                taken[arm] += [seconds] if turn >= WARM else []
    for arm, each in taken.items():
        found[arm] = disk.size_bytes / statistics.median(each) / 1e9
    return found


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Directly over through host memory."""
    if "direct" not in found:
        return {}
    return {"nvme_direct_vs_host": found["direct"] / found["host"]}


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table, or why there is but one way."""
    lines = ["| blocks of 1 MiB | through host memory, GB/s | directly, GB/s |", "|---:|---:|---:|"]
    direct = f"{found['direct']:.2f}" if "direct" in found else "none"
    lines.append(f"| {found['blocks']} | {found['host']:.2f} | {direct} |")
    if found["lacking"]:
        lines.append(f"\nNo direct reads: {found['lacking']}.")
    return "\n".join(lines)
