"""Tokens per second with drafts and without, at 1 to 256 requests at once.

The model has the shape of Llama 3 8B with random weights (`models`). A prompt is a passage of
random words, so often repeated that the memory finds drafts in the prompt itself; how many are
right is the model's affair. Each arm is an engine in a process of its own. Drafts need vLLM's first
model runner and no asynchronous scheduling. The arm `off` has vLLM's defaults; `first` has no
drafts, either, but the first runner.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.parts import Report

AT_ONCE, FEW = (1, 4, 16, 64, 256), (1, 2)
TOKENS, PASSAGE, REPEATS, DRAFT_TOKENS = 128, 64, 6, 8
ARMS = ("on", "off", "first")


def measured(dry: bool, report: Report) -> dict[str, Any]:
    """Tokens per second by arm and requests at once. Raises CalledProcessError."""
    found: dict[str, Any] = {}
    for arm in ARMS:
        command = [sys.executable, "-m", "benchmarks.gpu.drafting", arm, str(int(dry))]
        environment = os.environ | ({"VLLM_USE_V2_MODEL_RUNNER": "0"} if arm == "first" else {})
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        found[arm] = json.loads(done.stdout.strip().splitlines()[-1])
        report(found)
    return found


def engine(arm: str, dry: bool) -> dict[str, float]:
    """One arm, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from benchmarks.gpu.models import model_arguments, prompt, the_model
    from headrace_decode.speculative.settings import engine_arguments

    at_once, tokens = (FEW, 16) if dry else (AT_ONCE, TOKENS)
    llm = LLM(
        the_model(),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max(at_once),
        gpu_memory_utilization=0.8,
        **model_arguments(),
        **(engine_arguments(DRAFT_TOKENS) if arm == "on" else {}),
    )
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    found = {}
    for count in at_once:
        for turn in range(2):  # the first warms up
            prompts: Any = [
                {"prompt_token_ids": prompt(PASSAGE, seed=1000 * count + 500 * turn + n) * REPEATS}
                for n in range(count)
            ]
            began_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            found[str(count)] = count * tokens / (time.perf_counter() - began_s)
    return found


def figures(found: Mapping[str, Any]) -> dict[str, float]:
    """With drafts over without, and the first model runner over vLLM's default."""
    ratios: dict[str, float] = {}
    for name, arm in (("drafting", "on"), ("first_runner", "first")):
        if arm in found and "off" in found:
            for count, rate in found[arm].items():
                ratios[f"{name}_{count}_at_once"] = rate / found["off"][count]
    return ratios


def markdown(found: Mapping[str, Any]) -> str:
    """Return a table."""
    lines = [
        "| at once | tokens/s with drafts | without | without, first model runner |",
        "|---:" * 4 + "|",
    ]
    for count in found["off"]:
        rates = " | ".join(f"{found[arm][count]:,.0f}" for arm in ARMS)
        lines.append(f"| {count} | {rates} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(engine(sys.argv[1], sys.argv[2] == "1")))
