"""A prefill and a decode engine that share one card, against one engine that has it all.

Requests decode while long prompts come, evenly spread over the steps. The one engine computes them
itself. The decode engine has them computed by the prefill engine, a process with half of the
memory, and pulls the KV over NIXL; both take turns on the card as the driver has them. Each arm is
a process of its own, and its first round warms up. SmolLM2-135M or what HEADRACE_GPU_MODEL names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import make_llm
from benchmarks.kvstore.child import Child, serve
from benchmarks.kvstore.engine_node import noise
from benchmarks.kvstore.timing import quantile
from headrace_engine.handoff import PARAMS_KEY, produce_params
from headrace_engine.ports import free_port_block

ARMS = "one", "handoff"
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "headrace_engine.integrity.connector",
}
RUNNING, STEPS, PROMPTS, PROMPT_TOKENS = 8, 200, 8, 4096


class Prefiller:
    """The prefill engine: a program, see `child`."""

    def __init__(self) -> None:
        self._llm = make_llm(NIXL, memory=0.4)

    def prefill(self, prompt: list[int]) -> Any:
        """With what the KV is pulled."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=1, temperature=0.0, extra_args={PARAMS_KEY: produce_params()}
        )
        [done] = self._llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return done.kv_transfer_params

    def close(self) -> None:
        """Nothing is left to do."""


class Round:
    """One round of an arm.

    Args:
        llm: computes, or decodes.
        prefiller: None where the engine computes all itself.
    """

    def __init__(self, llm: Any, prefiller: Child | None) -> None:
        self._engine, self._prefiller = llm.llm_engine, prefiller
        self._came: dict[str, float] = {}
        self._first_s: list[float] = []

    def run(self, seed: int) -> dict[str, float]:
        """Seconds."""
        running = {self._add(noise(64, seed + n), STEPS + 1) for n in range(RUNNING)}
        waiting = [noise(PROMPT_TOKENS, seed + 1000 + n) for n in range(PROMPTS)]
        every, steps = max(1, STEPS // (PROMPTS + 1)), 0
        last: dict[str, float] = {}
        gaps: list[float] = []
        coming: list[tuple[float, list[int], Future[Any]]] = []
        with ThreadPoolExecutor(1) as calls:
            while self._engine.has_unfinished_requests() or coming:
                outputs, now_s = self._engine.step(), time.perf_counter()
                for name in (output.request_id for output in outputs):
                    if name in running and name in last:
                        gaps.append(now_s - last[name])
                    elif name in self._came:
                        self._first_s.append(now_s - self._came.pop(name))
                    last[name] = now_s
                steps += 1
                if waiting and steps % every == 0:
                    prompt = waiting.pop()
                    if self._prefiller is None:
                        self._came[self._add(prompt, 1)] = now_s
                    else:
                        call = calls.submit(self._prefiller.do, "prefill", prompt=prompt)
                        coming.append((now_s, prompt, call))
                while coming and coming[0][-1].done():
                    came_s, prompt, call = coming.pop(0)
                    self._came[self._add(prompt, 1, call.result())] = came_s
        times = {"itl_p50_s": quantile(gaps, 0.5), "itl_p99_s": quantile(gaps, 0.99)}
        return times | {"ttft_s": statistics.median(self._first_s)}

    def _add(self, prompt: list[int], tokens: int, transfer: Any = None) -> str:
        from vllm import SamplingParams

        extra = None if transfer is None else {PARAMS_KEY: transfer}
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, extra_args=extra
        )
        name = uuid.uuid4().hex
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name


def arm(name: str) -> dict[str, float]:
    """One arm, in this process."""
    if name == "one":
        return _rounds(make_llm(NIXL), None)
    port = free_port_block(2, "127.0.0.1")
    ports = [
        {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + n)}
        for n in range(2)
    ]
    os.environ |= ports[0]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **ports[1]}
        prefiller = Child(
            "handoff", {"arm": "prefill"}, environment, Path(folder) / "log", "benchmarks.gpu."
        )
        try:
            prefiller.answer()
            return _rounds(make_llm(NIXL, memory=0.4), prefiller)
        finally:
            prefiller.end()


def _rounds(llm: Any, prefiller: Child | None) -> dict[str, float]:
    Round(llm, prefiller).run(seed=0)
    return Round(llm, prefiller).run(seed=100_000)


def measured() -> dict[str, Any]:
    """Seconds by arm. Raises CalledProcessError."""
    found = {}
    for name in ARMS:
        command = [sys.executable, "-m", "benchmarks.gpu.handoff", f"--arm={name}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Two engines over one."""
    return {
        f"handoff_{kind}_vs_one": found["handoff"][f"{kind}_s"] / found["one"][f"{kind}_s"]
        for kind in ("itl_p99", "ttft")
    }


def markdown(found: dict[str, Any]) -> str:
    """A table."""
    lines = ["| | one engine, ms | two engines, ms |", "|---|---:|---:|"]
    for kind, words in (
        ("itl_p50_s", "latency of running requests, p50"),
        ("itl_p99_s", "p99"),
        ("ttft_s", f"TTFT of {PROMPT_TOKENS:,} tokens"),
    ):
        times = " | ".join(f"{1e3 * found[name][kind]:.2f}" for name in ARMS)
        lines.append(f"| {words} | {times} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=[*ARMS, "prefill"], required=True)
    name = parser.parse_args().arm
    if name == "prefill":
        serve(Prefiller)
    else:
        print(json.dumps(arm(name)))


if __name__ == "__main__":
    main()
