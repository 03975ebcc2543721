"""Greedy answers of one vLLM engine, plain or with a KV store: a truth to compare with, or a test.

Run as a program, so that the engine leaves with its process:
    python -m tests.support.stored MODEL_FOLDER < task.json > answers.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Stored:
    """One answer: token ids, their log-probabilities, and prompt tokens found in a cache."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


def stored_answers(
    model: str,
    prompts: list[list[int]],
    store: dict[str, Any] | None,
    *,
    salts: list[str | None] | None = None,
    max_tokens: int = 8,
    prefix_caching: bool = True,
    timeout_s: float = 800.0,
) -> list[Stored]:
    """Answers to prompts of token ids, one after the other, from an engine of its own.

    Args:
        store: the connector's `kv_connector_extra_config`; None for an engine without a store.
        salts: a cache salt a prompt.
        prefix_caching: whether the engine keeps a prompt's KV for the next one, store or not.

    Raises:
        RuntimeError: the engine failed; with the end of its log.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCH_COMPILE_DISABLE": "1",
        "PYTHONPATH": str(ROOT),
    }
    task = {
        "prompts": prompts,
        "salts": salts,
        "max_tokens": max_tokens,
        "store": store,
        "prefix_caching": prefix_caching,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.stored", model],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"answers"')]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"the engine failed: {done.stderr[-3000:]}")
    return [Stored(**answer) for answer in json.loads(lines[-1])["answers"]]


def _answer(model: str, task: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = None
    if task["store"] is not None:
        transfer = KVTransferConfig(
            kv_connector="HeadraceConnector",
            kv_connector_module_path="headrace_kvstore.connector.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=task["store"],
        )
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=8192,
        enable_prefix_caching=task["prefix_caching"],
        disable_hybrid_kv_cache_manager=True,
        kv_transfer_config=transfer,
    )
    params = SamplingParams(max_tokens=task["max_tokens"], temperature=0.0, logprobs=0)
    answers = []
    for prompt, salt in zip(
        task["prompts"], task["salts"] or [None] * len(task["prompts"]), strict=True
    ):
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            inputs["cache_salt"] = salt
        [result] = llm.generate(inputs, params, use_tqdm=False)
        [output] = result.outputs
        answers.append(
            {
                "tokens": list(output.token_ids),
                "logprobs": [
                    step[token].logprob
                    for step, token in zip(output.logprobs, output.token_ids, strict=True)
                ],
                "cached": result.num_cached_tokens,
            }
        )
    time.sleep(0.5)
    llm.llm_engine.engine_core.shutdown()
    return answers


if __name__ == "__main__":
    print(json.dumps({"answers": _answer(sys.argv[1], json.load(sys.stdin))}), flush=True)
