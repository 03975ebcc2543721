"""Bandwidth of the store's copies between registered host memory and a KV cache on the card.

Blocks as Llama 3 8B has them at TP=2: 32 layers of 32 KiB. The physical limit is one plain copy of
pinned memory of the same size, in the same turn. *Verified* is the store's own load: batches of
copies, the kernel that puts blocks in place and sums them, and the comparison on the host.
*Unverified* leaves kernel and comparison out: the batches of copies alone.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.parts import Report
from benchmarks.gpu.timing import DEVICE, empty_cache, synchronize
from headrace_engine.connector.caches.device_cache import DeviceCache
from headrace_engine.connector.loading.layer_pipeline import DEPTH
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.codec import CODECS, LayerShape, Order
from headrace_kvstore.device.clock import Clock, CudaClock, HostClock

HEADS, TOKENS, DIM = 4, 16, 128


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement.

    Attributes:
        blocks: numbers of blocks, of 16 tokens each.
        layers: of the cache.
        turns: that are measured.
        matmul: rows and columns of the matrices that are multiplied beside loads.
    """

    blocks: tuple[int, ...] = (1024, 128, 16)
    layers: int = 32
    turns: int = 15
    matmul: int = 8192


SMALL = Sizes(blocks=(4, 2), layers=2, turns=1, matmul=64)


class Stage:
    """A KV cache on the card and registered host memory for as many blocks.

    Args:
        blocks, layers: of the cache.
        codec: the store's, by name.
    """

    def __init__(self, blocks: int, layers: int, codec: str = "raw") -> None:
        sizes = (blocks, HEADS, TOKENS, 2 * DIM)
        self._layers = layers
        self.caches = {
            f"layers.{n}": torch.randn(sizes, dtype=torch.bfloat16, device=DEVICE)
            for n in range(layers)
        }
        shape = None
        if codec != "raw":
            shape = LayerShape(HEADS, TOKENS, DIM, "bfloat16", Order.HND)
        layout = BlockLayout.of_tensors(self.caches, blocks)
        self.cache = DeviceCache(self.caches, layout, CODECS[codec](), shape)
        self.size_bytes = blocks * layers * self.cache.stored_layer_bytes
        self._memory = mmap.mmap(-1, self.size_bytes)
        self.address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self.cache.register(self.address, self.size_bytes)
        self.blocks = np.random.default_rng(0).permutation(blocks)
        stride = np.uint64(layers * self.cache.stored_layer_bytes)
        self.payloads = np.uint64(self.address) + np.arange(blocks, dtype=np.uint64) * stride
        self.seeds = np.arange(blocks * layers, dtype=np.uint64).reshape(blocks, layers)
        self.save()

    def save(self) -> None:
        """Save the blocks. A codec stores decoded blocks as other bytes, so each save has its own
        sums."""
        self.sums = self.cache.save(self.blocks, self.payloads, self.seeds)

    def load(self) -> None:
        """Load as in a step, with `DEPTH` layers in flight. Raises RuntimeError for wrong bytes."""
        under_way: dict[int, Callable[[], np.ndarray]] = {}
        for layer in range(self._layers + DEPTH):
            if layer < self._layers:
                seeds = self.seeds[:, self.cache.columns(layer)]
                under_way[layer] = self.cache.start(layer, self.blocks, self.payloads, seeds)
            if layer >= DEPTH:
                first = layer - DEPTH
                wanted = self.sums[:, self.cache.columns(first)]
                if (under_way.pop(first)() != wanted).any():
                    raise RuntimeError("blocks came back wrong")

    def copy_alone(self) -> None:
        """The batches of copies of a load, nothing else."""
        lane, size = self.cache._in, self.cache.stored_layer_bytes
        for layer in range(self._layers):
            source = self.payloads + np.uint64(layer * size)
            for some in self.cache._batches(len(self.blocks)):
                steps = np.arange(some.stop - some.start, dtype=np.uint64) * np.uint64(size)
                with lane.exclusive():
                    lane.copy(np.uint64(lane.staging.data_ptr()) + steps, source[some], size)
        lane.drain()

    def close(self) -> None:
        self.cache.close()


def measured(dry: bool, report: Report) -> dict[str, Any]:
    """Return the GB/s and ratios, by blocks and arm; and a product's slowdown beside loads."""
    sizes = SMALL if dry else Sizes()
    found: dict[str, Any] = {}
    for blocks in sizes.blocks:
        stage = Stage(blocks, sizes.layers)
        pinned = torch.empty(stage.size_bytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
        there = torch.empty(stage.size_bytes, dtype=torch.uint8, device=DEVICE)
        arms: dict[str, Callable[[], Any]] = {
            "plain copy in": partial(there.copy_, pinned, non_blocking=True),
            "plain copy out": partial(pinned.copy_, there, non_blocking=True),
            "load, verified": stage.load,
            "load, unverified": stage.copy_alone,
            "save, with sums": stage.save,
        }
        one = _bandwidths(arms, stage.size_bytes, sizes.turns)
        stage.close()
        for codec in ("fp8", "int4"):
            coded = Stage(blocks, sizes.layers, codec)
            raw_bytes = blocks * sizes.layers * coded.cache.layout.layer_bytes
            coded_arms = {f"load, {codec}": coded.load, f"save, {codec}": coded.save}
            one |= _bandwidths(coded_arms, raw_bytes, sizes.turns)
            coded.close()
        found[str(blocks)] = one
        report(found)
        empty_cache()
    found["overlap"] = _overlap(sizes)
    return found


def _bandwidths(
    arms: Mapping[str, Callable[[], Any]], size_bytes: int, turns: int
) -> dict[str, float]:
    """Return the GB/s of the engine's bytes, medians of turns."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(-1, turns):
        for name, arm in arms.items():
            synchronize()
            began_s = time.perf_counter()
            arm()
            synchronize()
            if turn >= 0:
                times[name].append(time.perf_counter() - began_s)
    return {name: size_bytes / statistics.median(each) / 1e9 for name, each in times.items()}


def _overlap(sizes: Sizes) -> dict[str, float]:
    """Return the milliseconds of products of matrices alone and beside loads, by the device's
    clock."""
    stage = Stage(max(sizes.blocks), sizes.layers)
    beside = stage.cache.beside()
    shape = (sizes.matmul, sizes.matmul)
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    clock: Clock = CudaClock(torch.device(DEVICE)) if DEVICE == "cuda" else HostClock()

    def products(loads: bool) -> float:
        synchronize()
        waits = []
        if loads:
            for layer in range(min(DEPTH, sizes.layers)):
                arguments = stage.blocks, stage.payloads, stage.seeds[:, layer : layer + 1]
                waits.append(beside.start(layer, *arguments))
        begin = clock.mark()
        for _ in range(8):
            a @ b
        end = clock.mark()
        synchronize()
        for wait in waits:
            wait()
        return clock.seconds(begin, end) or 0.0

    taken: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(-1, sizes.turns):
        for loads in taken:
            seconds = products(loads)
            if turn >= 0:
                taken[loads].append(seconds)
    beside.close()
    stage.close()
    alone_s, loaded_s = (statistics.median(taken[loads]) for loads in (False, True))
    return {"alone_ms": 1e3 * alone_s, "beside_loads_ms": 1e3 * loaded_s}


def _by_blocks(found: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    return {int(name): one for name, one in found.items() if name != "overlap"}


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios at the most blocks."""
    by_blocks = _by_blocks(found)
    most = by_blocks[max(by_blocks)]
    plain = most["plain copy in"]
    ratios = {
        "load_verified_vs_copy": most["load, verified"] / plain,
        "load_unverified_vs_copy": most["load, unverified"] / plain,
        "save_vs_copy": most["save, with sums"] / most["plain copy out"],
        "load_fp8_vs_raw": most["load, fp8"] / most["load, verified"],
        "load_int4_vs_raw": most["load, int4"] / most["load, verified"],
    }
    if overlap := found.get("overlap"):
        ratios["compute_beside_loads_vs_alone"] = overlap["beside_loads_ms"] / overlap["alone_ms"]
    return ratios


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table of GB/s, and a line on overlap."""
    by_blocks = sorted(_by_blocks(found).items())
    arms = list(by_blocks[0][1])
    lines = ["| blocks | " + " | ".join(f"{arm}, GB/s" for arm in arms) + " |"]
    lines.append("|---:" * (1 + len(arms)) + "|")
    for blocks, one in by_blocks:
        cells = [f"{one[arm]:.1f}" for arm in arms]
        lines.append("| " + " | ".join([f"{blocks:,}", *cells]) + " |")
    overlap = found["overlap"]
    lines.append(
        f"\nProducts of matrices take {overlap['alone_ms']:.2f} ms alone and "
        f"{overlap['beside_loads_ms']:.2f} ms beside loads."
    )
    return "\n".join(lines)
