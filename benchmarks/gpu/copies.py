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
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace_engine.connector.caches.device_cache import DeviceCache
from headrace_engine.connector.loading.layer_pipeline import DEPTH
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.codec import CODECS, LayerShape, Order
from headrace_kvstore.device.clock import CudaClock

HEADS, TOKENS, DIM, LAYERS = 4, 16, 128, 32
BLOCKS = (16, 128, 1024)
"""Numbers of blocks, of 16 tokens each."""
TURNS = 15
MATMUL = 8192


class Stage:
    """A KV cache on the card and registered host memory for as many blocks.

    Args:
        codec: the store's, by name.
    """

    def __init__(self, blocks: int, codec: str = "raw") -> None:
        sizes = (blocks, HEADS, TOKENS, 2 * DIM)
        self.caches = {
            f"layers.{n}": torch.randn(sizes, dtype=torch.bfloat16, device="cuda")
            for n in range(LAYERS)
        }
        shape = None
        if codec != "raw":
            shape = LayerShape(HEADS, TOKENS, DIM, "bfloat16", Order.HND)
        layout = BlockLayout.of_tensors(self.caches, blocks)
        self.cache = DeviceCache(self.caches, layout, CODECS[codec](), shape)
        self.size_bytes = blocks * LAYERS * self.cache.stored_layer_bytes
        self._memory = mmap.mmap(-1, self.size_bytes)
        self.address = np.frombuffer(self._memory, np.uint8).ctypes.data
        self.cache.register(self.address, self.size_bytes)
        self.blocks = np.random.default_rng(0).permutation(blocks)
        stride = np.uint64(LAYERS * self.cache.stored_layer_bytes)
        self.payloads = np.uint64(self.address) + np.arange(blocks, dtype=np.uint64) * stride
        self.seeds = np.arange(blocks * LAYERS, dtype=np.uint64).reshape(blocks, LAYERS)
        self.save()

    def save(self) -> None:
        """Save the blocks. A codec stores decoded blocks as other bytes, so each save has its own
        sums."""
        self.sums = self.cache.save(self.blocks, self.payloads, self.seeds)

    def load(self) -> None:
        """Load as in a step, with `DEPTH` layers in flight. Raises RuntimeError for wrong bytes."""
        under_way: dict[int, Callable[[], np.ndarray]] = {}
        for layer in range(LAYERS + DEPTH):
            if layer < LAYERS:
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
        for layer in range(LAYERS):
            source = self.payloads + np.uint64(layer * size)
            for some in self.cache._batches(len(self.blocks)):
                steps = np.arange(some.stop - some.start, dtype=np.uint64) * np.uint64(size)
                with lane.exclusive():
                    lane.copy(np.uint64(lane.staging.data_ptr()) + steps, source[some], size)
        lane.drain()

    def close(self) -> None:
        self.cache.close()


def measured() -> dict[str, Any]:
    """Return the GB/s and ratios, by blocks and arm; and a product's slowdown beside loads."""
    found: dict[str, Any] = {}
    for blocks in BLOCKS:
        stage = Stage(blocks)
        pinned = torch.empty(stage.size_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(stage.size_bytes, dtype=torch.uint8, device="cuda")
        arms: dict[str, Callable[[], Any]] = {
            "plain copy in": partial(there.copy_, pinned, non_blocking=True),
            "plain copy out": partial(pinned.copy_, there, non_blocking=True),
            "load, verified": stage.load,
            "load, unverified": stage.copy_alone,
            "save, with sums": stage.save,
        }
        found[str(blocks)] = _bandwidths(arms, stage.size_bytes)
        stage.close()
        for codec in ("fp8", "int4"):
            coded = Stage(blocks, codec)
            raw_bytes = blocks * LAYERS * coded.cache.layout.layer_bytes
            each = _bandwidths(
                {f"load, {codec}": coded.load, f"save, {codec}": coded.save}, raw_bytes
            )
            found[str(blocks)] |= each
            coded.close()
        torch.cuda.empty_cache()
    found["overlap"] = _overlap()
    return found


def _bandwidths(arms: dict[str, Callable[[], Any]], size_bytes: int) -> dict[str, float]:
    """Return the GB/s of the engine's bytes, medians of turns."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(-1, TURNS):
        for name, arm in arms.items():
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            arm()
            torch.cuda.synchronize()
            if turn >= 0:
                times[name].append(time.perf_counter() - began_s)
    return {name: size_bytes / statistics.median(each) / 1e9 for name, each in times.items()}


def _overlap() -> dict[str, float]:
    """Return the seconds of products of matrices alone and beside loads, by the device's clock."""
    stage = Stage(max(BLOCKS))
    beside = stage.cache.beside()
    a, b = (torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    clock = CudaClock(torch.device("cuda"))

    def products(loads: bool) -> float:
        torch.cuda.synchronize()
        waits = []
        if loads:
            for layer in range(DEPTH):
                arguments = stage.blocks, stage.payloads, stage.seeds[:, layer : layer + 1]
                waits.append(beside.start(layer, *arguments))
        begin = clock.mark()
        for _ in range(8):
            a @ b
        end = clock.mark()
        torch.cuda.synchronize()
        for wait in waits:
            wait()
        return clock.seconds(begin, end) or 0.0

    taken: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(-1, TURNS):
        for loads in taken:
            seconds = products(loads)
            if turn >= 0:
                taken[loads].append(seconds)
    beside.close()
    stage.close()
    alone_s, loaded_s = (statistics.median(taken[loads]) for loads in (False, True))
    return {"alone_ms": 1e3 * alone_s, "beside_loads_ms": 1e3 * loaded_s}


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Return the ratios at the most blocks."""
    most = found[str(max(BLOCKS))]
    plain = most["plain copy in"]
    overlap = found["overlap"]
    return {
        "load_verified_vs_copy": most["load, verified"] / plain,
        "load_unverified_vs_copy": most["load, unverified"] / plain,
        "save_vs_copy": most["save, with sums"] / most["plain copy out"],
        "load_fp8_vs_raw": most["load, fp8"] / most["load, verified"],
        "load_int4_vs_raw": most["load, int4"] / most["load, verified"],
        "compute_beside_loads_vs_alone": overlap["beside_loads_ms"] / overlap["alone_ms"],
    }


def markdown(found: dict[str, Any]) -> str:
    """Return a table of GB/s, and a line on overlap."""
    arms = list(found[str(BLOCKS[0])])
    lines = ["| blocks | " + " | ".join(f"{arm}, GB/s" for arm in arms) + " |"]
    lines.append("|---:" * (1 + len(arms)) + "|")
    for blocks in BLOCKS:
        cells = [f"{found[str(blocks)][arm]:.1f}" for arm in arms]
        lines.append("| " + " | ".join([f"{blocks:,}", *cells]) + " |")
    overlap = found["overlap"]
    lines.append(
        f"\nProducts of matrices take {overlap['alone_ms']:.2f} ms alone and "
        f"{overlap['beside_loads_ms']:.2f} ms beside loads."
    )
    return "\n".join(lines)
