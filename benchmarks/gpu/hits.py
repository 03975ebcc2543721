"""Time to first token of prompts whose KV is stored, and what running requests notice of loads.

The model has the shape of Llama 3 8B with random weights, in bfloat16 with vLLM's own graphs
(`models`). A prompt is computed and saved, removed from the engine's own cache, and sent again, in
turns with a new prompt. Its KV is loaded from DRAM, then from a StoreNode's files after DRAM was
emptied, and, for the first context, from a second StoreNode on the same machine, which has the
blocks in its own arena. For inter-token latencies, requests decode while prompts whose KV is in
DRAM arrive, in turns with no such prompts.
"""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import quantile
from benchmarks.gpu.engine import Engine
from benchmarks.gpu.models import prompt
from benchmarks.gpu.parts import Report
from benchmarks.kvstore.engines import NodeTool, node
from headrace_engine.kv_transfer.ports import free_port_block
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY

WARM = 1
"""Turns before those that are measured."""
TAIL = 32
"""Tokens of a prompt after those that are stored."""
WRITE_S, NODE_BACK_S = 120.0, 2.0
SECRET = "of the two nodes of this benchmark"
MEDIA = ("dram", "nvme", "peer")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement.

    Attributes:
        contexts: stored tokens, and measured turns.
        dram, nvme: bytes of the store's tiers.
        running, gaps, loaded, arriving: requests that decode, gaps of each, and tokens and number
            of the prompts that arrive meanwhile.
        rounds: of latencies, after one that warms up.
    """

    contexts: tuple[tuple[int, int], ...] = ((8192, 5), (2048, 5), (32768, 1))
    dram: str = "40GiB"
    nvme: str = "40GiB"
    running: int = 8
    gaps: int = 200
    loaded: int = 4096
    arriving: int = 8
    rounds: int = 3

    @property
    def positions(self) -> int:
        """Tokens of the longest request."""
        return max(tokens for tokens, _ in self.contexts) + 2 * TAIL


SMALL = Sizes(
    contexts=((512, 1), (256, 1)),
    dram="256MiB",
    nvme="256MiB",
    running=2,
    gaps=8,
    loaded=256,
    arriving=2,
    rounds=1,
)


def measured(dry: bool, report: Report) -> dict[str, Any]:
    """Seconds, by context and kind; latencies by arm."""
    sizes = SMALL if dry else Sizes()
    name = f"headrace-gpu-bench-{uuid.uuid4().hex[:8]}"
    store = {"name": name, "dram_bytes": sizes.dram}
    found: dict[str, Any] = {}
    try:
        engine = Engine(name, sizes.dram, sizes.positions)
        for tokens, turns in sizes.contexts:
            with node(store, sizes.nvme) as tool:
                found[str(tokens)] = _first_tokens(engine, tokens, turns, tool)
                report(found)
                tool.forget_dram()
        found["itl"] = _latencies(engine, sizes)
        report(found)
        tokens, turns = sizes.contexts[0]
        found[str(tokens)] |= _from_peer(engine, tokens, turns, store)
        return found
    finally:
        for each in (name, f"{name}-peer"):
            (Path("/dev/shm") / each).unlink(missing_ok=True)


def _first_tokens(engine: Engine, tokens: int, turns: int, tool: NodeTool) -> dict[str, float]:
    """Return the medians for a node whose files are empty at first."""
    prompts = [prompt(tokens + TAIL, seed=tokens + n) for n in range(turns + WARM)]
    wanted = len(prompts) * (tokens // engine.block_tokens)
    for each in prompts:
        engine.first_token_s(each)
    taken: dict[str, list[float]] = {"cold": []}
    for number, medium in enumerate(("dram", "nvme")):
        engine.settle()
        if medium == "nvme":
            tool.wait_for(lambda stats: stats["tiers"]["nvme"]["blocks"] >= wanted, WRITE_S)
            tool.forget_dram()
        taken[medium], cold = _in_turns(engine, tokens, prompts, 1_000_000 + 100 * number)
        taken["cold"] += cold
    return {kind: statistics.median(each) for kind, each in taken.items()}


def _from_peer(engine: Engine, tokens: int, turns: int, store: dict[str, Any]) -> dict[str, float]:
    """The engine's node has no disk here, and is started when its arena is empty."""
    prompts = [prompt(tokens + TAIL, seed=3_000_000 + tokens + n) for n in range(turns + WARM)]
    for each in prompts:
        engine.first_token_s(each)
    engine.settle()
    address = f"127.0.0.1:{free_port_block(1, '127.0.0.1')}"
    own = {**store, "secret": SECRET, "peers": address, "pull_limit_s": 60.0, "peer_lease_s": 90.0}
    other = {**store, "name": f"{store['name']}-peer", "secret": SECRET, "listen": address}
    blocks = move_blocks(store["name"], other["name"])

    def knows(stats: dict[str, Any]) -> bool:
        peers = stats.get("remote", {}).get("peers", {}).values()
        return sum(sum(peer["blocks"].values()) for peer in peers) >= blocks

    with node(other, None), node(own, None) as tool:
        tool.wait_for(knows, WRITE_S)
        # The engine did without a node until now: its first lookup finds that there is one again.
        engine.first_token_s(prompt(tokens + TAIL, seed=5_000_000))
        time.sleep(NODE_BACK_S)
        hits, cold = _in_turns(engine, tokens, prompts, 4_000_000)
    return {"peer": statistics.median(hits), "cold_beside_peer": statistics.median(cold)}


def move_blocks(here: str, there: str) -> int:
    """Copy all blocks of one arena into another one, which is made; how many."""
    count = 0
    with Arena.attach(here) as source:
        spaces, table = source.namespaces(), source.table
        target = Arena.create_or_attach(
            there,
            source.geometry.size_bytes,
            block_bytes=spaces[0].block_bytes,
            layers=spaces[0].layers,
        )
        for row, space in enumerate(spaces):
            ready = (table["state"] == READY) & (table["namespace"] == row)
            slots = np.flatnonzero(ready).astype(np.int64)
            names = [table["hash"][slot].tobytes() for slot in slots]
            at = target.register_namespace(*space)
            places = target.reserve(at, names, table["parent"][slots], table["depth"][slots])
            if (places < 0).any():
                raise RuntimeError("the second arena has no room for the blocks of the first")
            for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
                target.view(place)[:] = source.view(slot)
            target.publish(places, source.sums(slots))
            count += len(slots)
        source.clear()
        target.close()
    return count


def _in_turns(
    engine: Engine, tokens: int, prompts: list[list[int]], seed: int
) -> tuple[list[float], list[float]]:
    """Return the seconds to the first tokens of stored prompts, and of unseen ones."""
    hits, cold = [], []
    for turn, each in enumerate(prompts):
        seconds, found = engine.first_token_s(each)
        if turn >= WARM and found < tokens - engine.block_tokens - TAIL:
            raise RuntimeError(f"{found} of {tokens} tokens were found")
        cold_s, found = engine.first_token_s(prompt(tokens + TAIL, seed=seed + tokens + turn))
        if found:
            raise RuntimeError(f"{found} tokens of an unseen prompt were found")
        if turn >= WARM:
            hits.append(seconds)
            cold.append(cold_s)
    return hits, cold


def _latencies(engine: Engine, sizes: Sizes) -> dict[str, Any]:
    prompts = [prompt(sizes.loaded, seed=2_000_000 + n) for n in range(sizes.arriving)]
    for each in prompts:
        engine.first_token_s(each)
    gaps: dict[str, list[float]] = {"loads": [], "none": []}
    for turn in range(1 + sizes.rounds):
        for arm, given in (("loads", prompts), ("none", [])):
            engine.settle()
            taken = engine.gaps_s(given, sizes.running, sizes.gaps)
            gaps[arm] += taken if turn else []
    return {
        f"{arm}_p{p}_s": quantile(each, p / 100) for arm, each in gaps.items() for p in (50, 99)
    } | {"running": sizes.running, "tokens": sizes.loaded}


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """Ratios."""
    ratios: dict[str, float] = {}
    for tokens in _contexts(found):
        one = found[str(tokens)]
        for medium in ("dram", "nvme"):
            ratios[f"ttft_{medium}_vs_cold_{tokens}"] = one[medium] / one["cold"]
        if "peer" in one:
            ratios[f"ttft_peer_vs_cold_{tokens}"] = one["peer"] / one["cold_beside_peer"]
    if itl := found.get("itl"):
        for p in (50, 99):
            ratio = itl[f"loads_p{p}_s"] / itl[f"none_p{p}_s"]
            ratios[f"itl_p{p}_beside_loads_vs_none"] = ratio
    return ratios


def _contexts(found: Mapping[str, Any]) -> list[int]:
    return sorted(int(name) for name in found if name != "itl")


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table, and a line on latencies."""
    lines = [
        "| tokens found | TTFT from DRAM, ms | from NVMe, ms | from a peer, ms | cold, ms |",
        "|---:" * 5 + "|",
    ]
    for tokens in _contexts(found):
        one = found[str(tokens)]
        each = (one.get(kind) for kind in (*MEDIA, "cold"))
        times = " | ".join("-" if taken is None else f"{1e3 * taken:.1f}" for taken in each)
        lines.append(f"| {tokens:,} | {times} |")
    itl = {name: 1e3 * value for name, value in found["itl"].items() if name.endswith("_s")}
    lines.append(
        f"\nWhile prompts of {found['itl']['tokens']:,} stored tokens come, "
        f"{found['itl']['running']} running requests have latencies of "
        f"{itl['loads_p50_s']:.2f} ms (p50) and {itl['loads_p99_s']:.2f} ms (p99); without them "
        f"{itl['none_p50_s']:.2f} and {itl['none_p99_s']:.2f}."
    )
    return "\n".join(lines)
