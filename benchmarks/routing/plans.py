"""Cost of a placement, for prompts of 100,000 tokens with their blocks' keys given.

- ``plan.p50_us``, ``plan.p99_us``: looking a prompt up in the index and placing it, over 500
  prefill and 500 decode engines on 125 nodes. Queues, batches and step times differ. Of each
  prompt, 10 engines hold the beginning, up to different blocks, and the store of one node has
  runs on four media. ``plan.match_us`` is the index's part.
- ``plan_vs_dynamo``: the same over 100 engines, against Dynamo's placement as a library
  (``SelectionService.select``; it knows one kind of worker and no pairs, so here there are decode
  engines only). Both are given hashes and all cores, and are asked in turn.
  ``plan.dynamo_tokens_us`` is theirs from tokens.

Dynamo is left out if it is not installed; a line then says how to install it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.router.blocks.block_index import BlockIndex
from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.place import place
from headrace.router.placement.request import PlacementRequest
from headrace_engine.step_time import StepTime
from headrace_kvstore.lookup.availability import AvailableRun

BLOCK_TOKENS, TOKENS = 16, 100_000
BLOCKS = TOKENS // BLOCK_TOKENS
TOKEN_BYTES = 131_072.0
PROMPTS, ROUNDS = 40, 25
SHARED_BLOCKS = BLOCKS // 10
WORKERS = 100
NOW_S = 100.0

STORED = (
    [
        AvailableRun(medium, BLOCKS // 5 * BLOCK_TOKENS, wait_s)
        for medium, wait_s in (("dram", 0.0), ("nvme", 0.0), ("remote", 0.1), ("object", 0.5))
    ],
)
"""Runs that the store of the first node can supply."""

Keys = NDArray[np.uint64]


class Cluster:
    """A view and the index that it is filled from, busy in every part."""

    def __init__(self, prefills: int, decodes: int, nodes: int, seed: int = 0) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.index = BlockIndex(max_holders=prefills + decodes)
        self.engines = [self.index.open() for _ in range(prefills + decodes)]
        self.view = ClusterView(BLOCK_TOKENS, TOKEN_BYTES)
        for at in range(nodes):
            self.view.node(str(at))
        fits = [_steps(0.01 * slower) for slower in (1.0, 1.1, 1.2, 1.3)]
        for at, holder in enumerate(self.engines):
            decode = at >= prefills
            row = self.view.add(
                *(f"replica-{at}", "decode" if decode else "prefill", at % nodes),
                hbm=holder,
                step_tokens=8192,
            )
            engine = self.view.engines[row]
            if decode:
                engine["running"] = rng.integers(0, 64)
                engine["context"], engine["free_blocks"] = engine["running"] * 2000, 50_000
            engine["drift"] = 0.01
            self.view.set_steps(row, fits[rng.integers(len(fits))])
            tokens = int(rng.integers(0, 2_000 if decode else 60_000))
            self.view.set_queue(row, tokens, tokens * 1000, NOW_S - rng.uniform(0.0, 0.2))

    def fill(self, prompts: list[Keys]) -> None:
        """Store each prompt's beginning on a few engines, up to different blocks."""
        rng = self.rng
        for keys in prompts:
            for holder in rng.choice(self.engines, 10, replace=False):
                self.index.stored(int(holder), None, keys[: rng.integers(1, BLOCKS)])

    def plan(self, keys: Keys) -> Any:
        held = self.index.match(keys)
        request = PlacementRequest(
            *("request", TOKENS, NOW_S, held),
            available_runs=STORED,
            affinity=int(keys[0]),
        )
        return place(self.view, request)


def _steps(base_s: float) -> StepTime:
    fit = StepTime()
    for size in (1, 64, 512, 2048, 8192) * 20:
        fit.observe(size, 4, 0, 1000, size * size / 2, base_s + 2e-5 * size)
    return fit


def prompts(number: int, seed: int = 0) -> list[Keys]:
    """Prompts of `BLOCKS` keys whose first tenth is the same."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 1 << 63, SHARED_BLOCKS, np.uint64)
    rest = (rng.integers(1, 1 << 63, BLOCKS - SHARED_BLOCKS, np.uint64) for _ in range(number))
    return [np.concatenate([shared, each]) for each in rest]


def seconds(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the seconds of each call, `rounds` times in turn, after two that do not count."""
    times = []
    for at in range(-2, rounds):
        for call in calls:
            begin = time.perf_counter()
            call()
            if at >= 0:
                times.append(time.perf_counter() - begin)
    return times


def measure(report: dict[str, Any]) -> None:
    """Add the figures to a report; print a line on what is left out."""
    cluster, asked = Cluster(500, 500, 125), prompts(PROMPTS)
    cluster.fill(asked)
    plans: list[Callable[[], object]] = [partial(cluster.plan, keys) for keys in asked]
    matches: list[Callable[[], object]] = [partial(cluster.index.match, keys) for keys in asked]
    took, matched = seconds(plans, ROUNDS), seconds(matches, ROUNDS)
    report["plan"] = {
        "p50_us": float(np.percentile(took, 50)) * 1e6,
        "p99_us": float(np.percentile(took, 99)) * 1e6,
        "match_us": float(np.median(matched)) * 1e6,
    }
    told = _beside_dynamo()
    if "error" in told:
        print(f"plan_vs_dynamo is left out: {told['error']}")
        return
    report["plan"] |= told
    report["plan_vs_dynamo"] = told["ours_100_us"] / told["dynamo_us"]


def _beside_dynamo() -> dict[str, Any]:
    """Both in a process of its own, since Dynamo reads its settings from the environment, and
    writes into the home folder."""
    with tempfile.TemporaryDirectory() as home:
        paths = [os.environ.get("DYNAMO_TARGET", ""), os.environ.get("PYTHONPATH", "")]
        local = "127.0.0.1"
        settings = {
            "HOME": home,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "DYN_FILE_KV": home,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": local,
            "DYN_EVENT_PLANE_HOST": local,
            "DYN_TCP_RESPONSE_STREAM_HOST": local,
            "DYN_ROUTER_USE_KV_EVENTS": "false",  # the index is filled by reservations
            "DYN_LOG": "error",
        }
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.routing.plans"],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=300,
        )
    lines = child.stdout.splitlines()
    if child.returncode or not lines:
        return {"error": (child.stderr.strip().splitlines() or ["no answer"])[-1]}
    return dict(json.loads(lines[-1]))


async def _versus() -> dict[str, float]:
    """Medians: 100 engines that hold the beginning of one prompt, each a hundredth more."""
    try:
        from dynamo._core import SelectionService  # type: ignore[import-not-found]
        from dynamo.llm import compute_block_hash_for_seq  # type: ignore[import-not-found]
    except ImportError as error:
        install = "pip install --no-deps --target DIR ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1"
        why = f"Dynamo is not installed ({error}). {install}, and DYNAMO_TARGET=DIR"
        return {"error": why}  # type: ignore[dict-item]
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # Dynamo has threads of its own
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, 50_000, TOKENS)]
    service = SelectionService(indexer_threads=2)
    for worker in range(WORKERS):
        await service.upsert_worker(
            {
                "worker_id": worker,
                "endpoint": f"http://127.0.0.1:{9000 + worker}",
                "block_size": BLOCK_TOKENS,
                "total_kv_blocks": 1_000_000,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "max_num_batched_tokens": 8192,
            }
        )
    [keys] = prompts(1)
    cluster = Cluster(0, WORKERS, 1)
    for worker in range(WORKERS):
        depth = (worker + 1) * (BLOCKS // WORKERS)
        cluster.index.stored(cluster.engines[worker], None, keys[:depth])
        name = f"fill-{worker}"
        await service.create_reservation(
            {
                "selection_id": name,
                "worker_id": worker,
                "token_ids": tokens[: depth * BLOCK_TOKENS],
            }
        )
        await service.prefill_complete(name)
        await service.free_reservation(name)
    booked = await service.select_and_reserve({"selection_id": "hashes", "token_ids": tokens})
    await service.free_reservation("hashes")
    hashes = np.array(compute_block_hash_for_seq(tokens, BLOCK_TOKENS), np.uint64)
    hashed = {
        "block_hashes": hashes.view(np.int64).tolist(),
        "sequence_hashes": booked["sequence_hashes"],
        "isl_tokens": TOKENS,
    }
    await asyncio.sleep(2.0)  # it indexes in the background
    found = await service.overlap_scores({"token_ids": tokens})
    if sum(worker["device_blocks"] > 0 for worker in found["workers"]) < WORKERS:
        return {"error": "Dynamo's index was not filled"}  # type: ignore[dict-item]
    times: dict[str, list[float]] = {"ours_100_us": [], "dynamo_us": [], "dynamo_tokens_us": []}
    for _ in range(3):
        cluster.plan(keys)
    for _ in range(200):
        begin = time.perf_counter()
        cluster.plan(keys)
        times["ours_100_us"].append(time.perf_counter() - begin)
        for name, request in (("dynamo_us", hashed), ("dynamo_tokens_us", {"token_ids": tokens})):
            begin = time.perf_counter()
            await service.select(request)
            times[name].append(time.perf_counter() - begin)
    service.shutdown()
    return {name: float(np.median(took)) * 1e6 for name, took in times.items()}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_versus())))
