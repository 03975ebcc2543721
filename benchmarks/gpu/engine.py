"""An engine on one card with the KV store: first tokens of hits, and what loads cost others.

SmolLM2-135M in bfloat16 with vLLM's own graphs, or the model that HEADRACE_GPU_MODEL names. A
prompt is computed and saved, forgotten by the engine's own cache, and asked again, in turns with
one that nobody has seen: from DRAM, and from a StoreNode's files once DRAM is emptied. For
inter-token latencies, requests decode while prompts come whose KV is in DRAM, in turns with no such
prompts.
"""

from __future__ import annotations

import os
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

from benchmarks.kvstore.engine_node import noise
from benchmarks.kvstore.engines import NodeTool, node
from benchmarks.kvstore.timing import quantile

CONTEXTS = (512, 2048, 7680)
TURNS, WARM = 7, 2
RUNNING, GAPS, LOADED = 8, 200, 4096
SETTLE_S, WRITE_S = 0.5, 120.0


class Engine:
    """vLLM in this process, driven a step at a time."""

    def __init__(self, name: str) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM
        from vllm.config import KVTransferConfig

        from headrace.model import resolve

        self._llm = LLM(
            os.environ.get("HEADRACE_GPU_MODEL") or str(resolve(None)),
            dtype="bfloat16",
            max_model_len=8192,
            gpu_memory_utilization=0.8,
            kv_transfer_config=KVTransferConfig(
                kv_connector="HeadraceConnector",
                kv_connector_module_path="headrace_engine.store_connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={"name": name, "dram_bytes": "8GiB"},
            ),
        )
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
    try:
        engine = Engine(name)
        with node({"name": name, "dram_bytes": "8GiB"}, "32GiB") as tool:
            found: dict[str, Any] = {str(n): _first_tokens(engine, n, tool) for n in CONTEXTS}
        found["itl"] = _latencies(engine)
        return found
    finally:
        (Path("/dev/shm") / name).unlink(missing_ok=True)


def _first_tokens(engine: Engine, tokens: int, tool: NodeTool) -> dict[str, float]:
    prompts = [noise(tokens + 32, seed=tokens + n) for n in range(TURNS + WARM)]
    before = tool.stats()["tiers"]["nvme"]["blocks"]
    wanted = before + len(prompts) * (tokens // engine.block_tokens)
    for prompt in prompts:
        engine.first_token_s(prompt)
    taken: dict[str, list[float]] = {"dram": [], "nvme": [], "cold": []}
    for number, medium in enumerate(("dram", "nvme")):
        engine.settle()
        if medium == "nvme":
            tool.wait_for(lambda stats: stats["tiers"]["nvme"]["blocks"] >= wanted, WRITE_S)
            tool.forget_dram()
        for turn, prompt in enumerate(prompts):
            seconds, found = engine.first_token_s(prompt)
            if found < tokens - 64:
                raise RuntimeError(f"{found} of {tokens} tokens were found in {medium}")
            unseen = noise(tokens + 32, seed=1_000_000 + tokens + turn + 100 * number)
            cold_s, found = engine.first_token_s(unseen)
            if found:
                raise RuntimeError(f"{found} tokens of an unseen prompt were found")
            if turn >= WARM:
                taken[medium].append(seconds)
                taken["cold"].append(cold_s)
    return {kind: statistics.median(each) for kind, each in taken.items()}


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
        for n in CONTEXTS
    }
    return ratios | {
        f"itl_p{p}_beside_loads_vs_none": itl[f"loads_p{p}_s"] / itl[f"none_p{p}_s"]
        for p in (50, 99)
    }


def markdown(found: dict[str, Any]) -> str:
    """A table, and a line on latencies."""
    lines = ["| tokens found | TTFT from DRAM, ms | from NVMe, ms | cold, ms |", "|---:" * 4 + "|"]
    for tokens in CONTEXTS:
        one = found[str(tokens)]
        times = " | ".join(f"{1e3 * one[kind]:.1f}" for kind in ("dram", "nvme", "cold"))
        lines.append(f"| {tokens:,} | {times} |")
    itl = {name: 1e3 * seconds for name, seconds in found["itl"].items()}
    lines.append(
        f"\nWhile prompts of {LOADED:,} stored tokens come, {RUNNING} running requests have "
        f"latencies of {itl['loads_p50_s']:.2f} ms (p50) and {itl['loads_p99_s']:.2f} ms (p99); "
        f"without them {itl['none_p50_s']:.2f} and {itl['none_p99_s']:.2f}."
    )
    return "\n".join(lines)
