"""Tokens per second with drafts and without, at 1 to 256 requests at once.

SmolLM2-135M in bfloat16 or what HEADRACE_GPU_MODEL names. A prompt is a passage of random words, so
often repeated that the memory finds drafts in the prompt itself; how many are right is the model's
affair, and `accepted` is left to the engine's log. Each arm is an engine in a process of its own.
Drafts switch asynchronous scheduling off; the arm without them has vLLM's default.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.kvstore.engine_node import noise

AT_ONCE = (1, 4, 16, 64, 256)
TOKENS, PASSAGE, REPEATS, DRAFT_TOKENS = 128, 64, 6, 8


def measured() -> dict[str, Any]:
    """Tokens per second by arm and requests at once. Raises CalledProcessError."""
    found = {}
    for arm in ("on", "off"):
        command = [sys.executable, "-m", "benchmarks.gpu.drafting", arm]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[arm] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def engine(arm: str) -> dict[str, float]:
    """One arm, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from benchmarks.gpu.engine import random_weights, the_model
    from headrace_decode.speculative.settings import engine_arguments

    llm = LLM(
        the_model(),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max(AT_ONCE),
        gpu_memory_utilization=0.8,
        **random_weights(),
        **(engine_arguments(DRAFT_TOKENS) if arm == "on" else {}),
    )
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    found = {}
    for count in AT_ONCE:
        for turn in range(2):  # the first warms up
            prompts: Any = [
                {"prompt_token_ids": noise(PASSAGE, seed=1000 * count + 500 * turn + n) * REPEATS}
                for n in range(count)
            ]
            began_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            found[str(count)] = count * TOKENS / (time.perf_counter() - began_s)
    return found


def figures(found: dict[str, Any]) -> dict[str, float]:
    """With drafts over without."""
    return {f"drafting_{n}_at_once": found["on"][str(n)] / found["off"][str(n)] for n in AT_ONCE}


def markdown(found: dict[str, Any]) -> str:
    """Return a table."""
    lines = ["| at once | tokens/s with drafts | without |", "|---:|---:|---:|"]
    for n in AT_ONCE:
        lines.append(f"| {n} | {found['on'][str(n)]:,.0f} | {found['off'][str(n)]:,.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(engine(sys.argv[1])))
