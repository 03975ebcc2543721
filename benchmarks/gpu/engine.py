"""An engine on one card with the KV store: time to first token of hits, and cost for others.

The model is SmolLM2-135M in bfloat16 with vLLM's own graphs, or the one that HEADRACE_GPU_MODEL
names; a folder without weights gets random ones. A prompt is computed and saved, removed from the
engine's own cache, and sent again, in turns with a new prompt. Its KV is loaded from DRAM, from a
StoreNode's files after DRAM was emptied, and from a second StoreNode on the same machine, which has
the blocks in its own arena; HEADRACE_GPU_TIERS selects fewer tiers. For inter-token latencies,
requests decode while prompts whose KV is in DRAM arrive, in turns with no such prompts.
"""

from __future__ import annotations

import os
import statistics
import time
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kvstore.engine_node import noise
from benchmarks.kvstore.engines import NodeTool, node
from benchmarks.kvstore.timing import quantile
from headrace_engine.kv_transfer.ports import free_port_block
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY

TIERS = os.environ.get("HEADRACE_GPU_TIERS", "dram,nvme,peer").split(",")
CONTEXTS = (512, 2048, 7680)
TURNS, WARM = 7, 2
RUNNING, GAPS, LOADED = 8, 200, 4096
SETTLE_S, WRITE_S = 0.5, 120.0
DRAM = "24GiB"
SECRET = "of the two nodes of this benchmark"


def store_connector(name: str, dram_bytes: str = DRAM) -> dict[str, Any]:
    """Return the connector's settings for an engine with the store `name`."""
    return {
        "kv_connector": "HeadraceConnector",
        "kv_connector_module_path": "headrace_engine.store_connector",
        "kv_connector_extra_config": {"name": name, "dram_bytes": dram_bytes},
    }


def make_llm(
    connector: dict[str, Any] | None, positions: int = 8192, memory: float = 0.8, **also: Any
) -> Any:
    """vLLM in this process, with its own graphs.

    Args:
        connector: what moves its KV; None: nothing does.
        positions: most tokens of a request.
        memory: share of the card's.
        also: vLLM's arguments.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if connector is not None:
        also["kv_transfer_config"] = KVTransferConfig(
            **connector, kv_role="kv_both", kv_load_failure_policy="recompute"
        )
    return LLM(
        the_model(),
        dtype="bfloat16",
        max_model_len=positions,
        gpu_memory_utilization=memory,
        **random_weights(),
        **also,
    )


def the_model() -> str:
    """Its folder, or its name on the hub."""
    from headrace.model import resolve

    return os.environ.get("HEADRACE_GPU_MODEL") or str(resolve(None))


def model_config() -> dict[str, Any]:
    """Its config.json."""
    from transformers import AutoConfig

    found: dict[str, Any] = AutoConfig.from_pretrained(the_model()).to_dict()
    return found


def random_weights() -> dict[str, Any]:
    """vLLM's arguments for a model of which there is a folder, but no weights."""
    folder = Path(the_model())
    given = not folder.is_dir() or any(folder.glob("*.safetensors"))
    return {} if given else {"load_format": "dummy", "skip_tokenizer_init": True}


class Engine:
    """vLLM in this process, driven a step at a time."""

    def __init__(self, name: str) -> None:
        self._llm = make_llm(store_connector(name))
        self._engine = self._llm.llm_engine
        self.block_tokens = self._engine.vllm_config.cache_config.block_size

    def add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        name = uuid.uuid4().hex
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def first_token_s(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds, and how many of its tokens were found."""
        began_s, name, found, first_s = time.perf_counter(), self.add(prompt, 1), 0, 0.0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.request_id == name and not first_s:
                    first_s = time.perf_counter() - began_s
                    found = output.num_cached_tokens or 0
        return first_s, found

    def settle(self) -> None:
        """Let saves end, then forget what the engine itself keeps."""
        for _ in range(4):
            self.first_token_s(noise(16, seed=0))
            time.sleep(SETTLE_S)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the engine's own prefix cache was not reset")

    def gaps_s(self, arrivals: list[list[int]]) -> list[float]:
        """Gaps between the tokens of running requests while these prompts come, evenly spread."""
        names = {self.add(noise(64, 10_000 + n), GAPS + 1) for n in range(RUNNING)}
        last: dict[str, float] = {}
        gaps: list[float] = []
        steps, every = 0, max(1, GAPS // (len(arrivals) + 1))
        waiting = list(arrivals)
        while self._engine.has_unfinished_requests():
            outputs, now_s = self._engine.step(), time.perf_counter()
            for output in outputs:
                if output.request_id in names:
                    if output.request_id in last:
                        gaps.append(now_s - last[output.request_id])
                    last[output.request_id] = now_s
            steps += 1
            if waiting and steps % every == 0:
                self.add(waiting.pop(), 1)
        return gaps


def measured() -> dict[str, Any]:
    """Seconds, by context and kind; latencies by arm."""
    name = f"headrace-gpu-bench-{uuid.uuid4().hex[:8]}"
    store = {"name": name, "dram_bytes": DRAM}
    try:
        engine = Engine(name)
        with node(store, "32GiB") if "nvme" in TIERS else nullcontext() as tool:
            found: dict[str, Any] = {str(n): _first_tokens(engine, n, tool) for n in CONTEXTS}
        for n in CONTEXTS if "peer" in TIERS else ():
            found[str(n)] |= _from_peer(engine, n, store)
        found["itl"] = _latencies(engine)
        return found
    finally:
        for each in (name, f"{name}-peer"):
            (Path("/dev/shm") / each).unlink(missing_ok=True)


def _first_tokens(engine: Engine, tokens: int, tool: NodeTool | None) -> dict[str, float]:
    prompts = [noise(tokens + 32, seed=tokens + n) for n in range(TURNS + WARM)]
    before = tool.stats()["tiers"]["nvme"]["blocks"] if tool else 0
    wanted = before + len(prompts) * (tokens // engine.block_tokens)
    for prompt in prompts:
        engine.first_token_s(prompt)
    taken: dict[str, list[float]] = {"cold": []}
    for number, medium in enumerate(("dram", "nvme") if tool else ("dram",)):
        engine.settle()
        if tool and medium == "nvme":
            tool.wait_for(lambda stats: stats["tiers"]["nvme"]["blocks"] >= wanted, WRITE_S)
            tool.forget_dram()
        hits, cold = _in_turns(engine, tokens, prompts, 1_000_000 + 100 * number)
        taken[medium] = hits
        taken["cold"] += cold
    return {kind: statistics.median(each) for kind, each in taken.items()}


def _from_peer(engine: Engine, tokens: int, store: dict[str, Any]) -> dict[str, float]:
    """The engine's node has no disk here, and is started when its arena is empty."""
    prompts = [noise(tokens + 32, seed=3_000_000 + tokens + n) for n in range(TURNS + WARM)]
    for prompt in prompts:
        engine.first_token_s(prompt)
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
        hits, cold = _in_turns(engine, tokens, prompts, 4_000_000)
    (Path("/dev/shm") / other["name"]).unlink(missing_ok=True)
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
    for turn, prompt in enumerate(prompts):
        seconds, found = engine.first_token_s(prompt)
        if found < tokens - engine.block_tokens - 32:
            raise RuntimeError(f"{found} of {tokens} tokens were found")
        cold_s, found = engine.first_token_s(noise(tokens + 32, seed=seed + tokens + turn))
        if found:
            raise RuntimeError(f"{found} tokens of an unseen prompt were found")
        if turn >= WARM:
            hits.append(seconds)
            cold.append(cold_s)
    return hits, cold


def _latencies(engine: Engine) -> dict[str, float]:
    prompts = [noise(LOADED, seed=2_000_000 + n) for n in range(8)]
    for prompt in prompts:
        engine.first_token_s(prompt)
    gaps: dict[str, list[float]] = {"loads": [], "none": []}
    for turn in range(4):
        for arm, given in (("loads", prompts), ("none", [])):
            engine.settle()
            taken = engine.gaps_s(given)
            gaps[arm] += taken if turn else []
    return {
        f"{arm}_p{p}_s": quantile(each, p / 100) for arm, each in gaps.items() for p in (50, 99)
    }


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Ratios."""
    itl = found["itl"]
    ratios = {
        f"ttft_{medium}_vs_cold_{n}": found[str(n)][medium] / found[str(n)]["cold"]
        for medium in ("dram", "nvme")
        if medium in TIERS
        for n in CONTEXTS
    }
    ratios |= {
        f"ttft_peer_vs_cold_{n}": found[str(n)]["peer"] / found[str(n)]["cold_beside_peer"]
        for n in CONTEXTS
        if "peer" in TIERS
    }
    return ratios | {
        f"itl_p{p}_beside_loads_vs_none": itl[f"loads_p{p}_s"] / itl[f"none_p{p}_s"]
        for p in (50, 99)
    }


def markdown(found: dict[str, Any]) -> str:
    """Return a table, and a line on latencies."""
    lines = [
        "| tokens found | TTFT from DRAM, ms | from NVMe, ms | from a peer, ms | cold, ms |",
        "|---:" * 5 + "|",
    ]
    for tokens in CONTEXTS:
        one = found[str(tokens)]
        each = (one.get(kind) for kind in ("dram", "nvme", "peer", "cold"))
        times = " | ".join("-" if taken is None else f"{1e3 * taken:.1f}" for taken in each)
        lines.append(f"| {tokens:,} | {times} |")
    itl = {name: 1e3 * seconds for name, seconds in found["itl"].items()}
    lines.append(
        f"\nWhile prompts of {LOADED:,} stored tokens come, {RUNNING} running requests have "
        f"latencies of {itl['loads_p50_s']:.2f} ms (p50) and {itl['loads_p99_s']:.2f} ms (p99); "
        f"without them {itl['none_p50_s']:.2f} and {itl['none_p99_s']:.2f}."
    )
    return "\n".join(lines)
