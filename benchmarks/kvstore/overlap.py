"""Loading during the computation: how much of a slow tier's time adds to a step.

A layer source emulates a slow tier with a latency and a bandwidth; the received bytes are really
copied into the engine's cache and verified. The computation is one matrix product for each layer on
one thread. Bandwidth and product are set so that loading alone (deep enough to hide the latency)
and computing alone take equally long, where overlapping can save most:

    total_vs_max = step / max(load alone, compute alone)      1 at best, 2 without any overlap

`overlap.total_vs_max` is with the pipeline's own depth; `overlap.depth_N` and `overlap.serial` are
the curve. The latency is 1.5 times the transfer time of a layer's bytes. A step must at least wait
for the first layer, so the best possible value is 1 + 2.5 / 30 here.

`overlap.engine_total_vs_max` is a real engine's step: a prompt of 6,016 tokens found in the arena
and 512 new ones. Each layer's load sleeps so long that the loads and the step without the sleep
take equally long. Only bandwidth is reduced there, since the arena's layers are not requested
ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from benchmarks.kvstore.engines import engines, store
from benchmarks.kvstore.stage import LAYERS, Stage
from benchmarks.kvstore.timing import Figures, ratios, seconds, take_turns
from headrace_engine.connector.loading.layer_pipeline import DEPTH, LayerPipeline

ROUNDS, QUICK_ROUNDS = 10, 3
DEPTHS = (1, 2, 4, 8)
LAYER_S = 0.012
"""Seconds to transfer a layer's bytes, and to compute a layer."""
LATENCY_LAYERS = 1.5
ROWS, SIDE = 64, 1024
CALIBRATION_STEPS = 3
PREFIX, TAIL, ENGINE_ROUNDS = 6_016, 512, 6


class SlowTier:
    """A `LayerSource`: a latency and a bandwidth in front of a real, verified copy.

    Args:
        stage: whose arena holds the blocks.
        latency_s: from asking for a layer until its bytes begin to come.
        layer_s: for a layer's bytes to come, one layer after the other.
    """

    def __init__(self, stage: Stage, latency_s: float, layer_s: float) -> None:
        self._stage, self._latency_s, self._layer_s = stage, latency_s, layer_s
        slots = stage.arena.lookup(stage.row, stage.hashes)
        self._payloads = stage.arena.addresses(slots).astype(np.uint64)
        self._expected = stage.arena.sums(slots)
        self._seeds = stage.seeds(stage.hashes)
        self._arrives_s = [0.0] * LAYERS

    def begin(self, layer: int) -> None:
        free_s = self._arrives_s[layer - 1] if layer else 0.0
        begins_s = max(time.perf_counter() + self._latency_s, free_s)
        self._arrives_s[layer] = begins_s + self._layer_s

    def end(self, layer: int) -> None:
        time.sleep(max(0.0, self._arrives_s[layer] - time.perf_counter()))
        stage = self._stage
        mine = stage.cache.columns(layer)
        sums = stage.cache.load(layer, stage.blocks, self._payloads, self._seeds[:, mine])
        if (sums != self._expected[:, mine]).any():
            raise RuntimeError(f"layer {layer} does not verify")


class Compute:
    """A layer's computation: products of equal size, as many as fit the time."""

    def __init__(self, layer_s: float) -> None:
        self._a, self._b = torch.rand(ROWS, SIDE), torch.rand(SIDE, SIDE)
        self._times = 1
        one_s = min(seconds(self.layer) for _ in range(50))
        self._times = max(1, round(layer_s / one_s))

    def layer(self) -> None:
        for _ in range(self._times):
            torch.mm(self._a, self._b)

    def layers(self) -> None:
        for _ in range(LAYERS):
            self.layer()


def measure(figures: Figures, quick: bool = False) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Stage() as stage, ThreadPoolExecutor(1) as threads:
            stage.save()
            _measure(figures, stage, threads, QUICK_ROUNDS if quick else ROUNDS)
    finally:
        torch.set_num_threads(before)
    if not quick:
        _in_engine(figures)


def _in_engine(figures: Figures) -> None:
    with store("1GiB") as settings, engines(settings) as [engine]:
        engine.do("first_token", tokens=PREFIX, seed=0, tail=1)
        engine.do("settle")
        engine.do("saving", on=False)

        def step(layer_s: float, number: int) -> tuple[float, float]:
            """Return the seconds of one prompt to its first token, and of its loads."""
            engine.do("slow", layer_s=layer_s)
            total_s, found = engine.do(
                "first_token", tokens=PREFIX, seed=0, tail=TAIL, tail_seed=1 + number
            )
            if found != PREFIX:
                raise RuntimeError(f"{found} of {PREFIX} tokens were found in the store")
            return total_s, engine.do("slow", layer_s=0.0)

        fast_s, copies_s = sorted(step(0.0, number) for number in range(3))[1]
        layer_s = max(0.0, fast_s - copies_s) / LAYERS
        turns = [(step(0.0, 10 + 2 * n), step(layer_s, 11 + 2 * n)) for n in range(ENGINE_ROUNDS)]
    longest = [max(fast, loads) for (fast, _), (_, loads) in turns]
    figures.add("overlap.engine_total_vs_max", ratios([slow for _, (slow, _) in turns], longest))
    figures.add("overlap.engine_load_s", [loads for _, (_, loads) in turns])
    figures.add("overlap.engine_compute_s", [fast for (fast, _), _ in turns])


def _measure(figures: Figures, stage: Stage, threads: ThreadPoolExecutor, rounds: int) -> None:
    compute = Compute(LAYER_S)
    link_s = calibrate(
        lambda layer_s: _load(stage, threads, layer_s),
        lambda: seconds(compute.layers),
    )

    def step(depth: int) -> float:
        tier = SlowTier(stage, LATENCY_LAYERS * link_s, link_s)
        began = time.perf_counter()
        pipeline = LayerPipeline([tier], LAYERS, threads, depth)
        for layer in range(LAYERS):
            pipeline.wait(layer)
            compute.layer()
        pipeline.finish()
        return time.perf_counter() - began

    def serial() -> float:
        tier = SlowTier(stage, LATENCY_LAYERS * link_s, link_s)
        began = time.perf_counter()
        pipeline = LayerPipeline([tier], LAYERS, threads, max(DEPTHS))
        pipeline.finish()
        compute.layers()
        return time.perf_counter() - began

    arms: dict[str, Callable[[], float]] = {
        "load": lambda: _load(stage, threads, link_s),
        "compute": lambda: seconds(compute.layers),
        "total_vs_max": lambda: step(DEPTH),
        "serial": serial,
    }
    for depth in DEPTHS:
        arms[f"depth_{depth}"] = partial(step, depth)
    taken = take_turns(arms, rounds)
    longest = [max(pair) for pair in zip(taken["load"], taken["compute"], strict=True)]
    for arm in ("total_vs_max", *(f"depth_{depth}" for depth in DEPTHS), "serial"):
        figures.add(f"overlap.{arm}", ratios(taken[arm], longest))
    figures.add("overlap.load_s", taken["load"])
    figures.add("overlap.compute_s", taken["compute"])
    figures.note(
        "overlap",
        f"{LAYERS} layers of {stage.size_bytes / LAYERS / 1e6:.1f} MB, "
        f"{1e3 * link_s:.1f} ms on the link and {1e3 * LATENCY_LAYERS * link_s:.1f} ms latency",
    )


def calibrate(load: Callable[[float], float], compute: Callable[[], float]) -> float:
    """Return seconds a layer on the link for which `load(seconds)` takes as long as `compute()`."""
    wanted_s = sorted(compute() for _ in range(CALIBRATION_STEPS))[CALIBRATION_STEPS // 2]
    layer_s = wanted_s / LAYERS
    for _ in range(CALIBRATION_STEPS):
        layer_s *= wanted_s / load(layer_s)
    return layer_s


def _load(stage: Stage, threads: ThreadPoolExecutor, layer_s: float) -> float:
    """Return the seconds of a load alone, deep enough."""
    tier = SlowTier(stage, LATENCY_LAYERS * layer_s, layer_s)
    return seconds(LayerPipeline([tier], LAYERS, threads, max(DEPTHS)).finish)
