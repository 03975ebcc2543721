"""Greedy answers of one plain vLLM engine: the truth that Headrace is compared with.

Run as a program, so that the engine leaves with its process:
    python -m tests.support.plain MODEL_FOLDER < prompts.json > answers.json
Prompts are lists of token ids, answered one after the other with an empty prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def plain_answers(
    model: str, prompts: list[list[int]], max_tokens: int, timeout_s: float = 400.0
) -> list[list[int]]:
    """Token ids that a plain engine answers with, in a process of its own.

    Raises:
        RuntimeError: the engine failed; with the end of its log.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.plain", model],
        input=json.dumps({"prompts": prompts, "max_tokens": max_tokens}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        cwd=ROOT,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the plain engine failed: {done.stderr[-3000:]}")
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers


async def _answer(model: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**30,
        )
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    answers = []
    try:
        for number, prompt in enumerate(prompts):
            outputs: list[Any] = [
                output
                async for output in engine.generate(
                    TokensPrompt(prompt_token_ids=prompt), params, f"plain-{number}"
                )
            ]
            answers.append(list(outputs[-1].outputs[0].token_ids))
    finally:
        engine.shutdown()
    return answers


def main() -> None:
    """Answer the prompts on stdin; the answer is the last line on stdout."""
    request = json.load(sys.stdin)
    answers = asyncio.run(_answer(sys.argv[1], request["prompts"], request["max_tokens"]))
    print(f"\n{json.dumps(answers)}", flush=True)


if __name__ == "__main__":
    main()
