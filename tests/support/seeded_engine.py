"""Engines that answer seeded requests, with the prompts computed in one step and in several.

told("seeded_engine", MODEL)
"""

from __future__ import annotations

import sys
from typing import Any

from tests.support.program import say

LENGTHS = (20, 130, 200)


def answers(model: str, step_tokens: int) -> list[list[int]]:
    """Sampled answers, all at once, of an engine with so many tokens a step."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.inputs import TokensPrompt

    from headrace_engine.extensions.extension import EXTENSIBLE_WORKER

    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=step_tokens,
        max_num_seqs=8,
        num_gpu_blocks_override=64,
        worker_cls=EXTENSIBLE_WORKER,
    )
    prompts = [TokensPrompt(prompt_token_ids=[5 + i * n % 900 for i in range(n)]) for n in LENGTHS]
    params = [
        SamplingParams(temperature=1.0, seed=n, max_tokens=8, ignore_eos=True, detokenize=False)
        for n in LENGTHS
    ]
    found: Any = llm.generate(prompts, params, use_tqdm=False)
    tokens = [list(each.outputs[0].token_ids) for each in found]
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    return tokens


if __name__ == "__main__":
    say([answers(sys.argv[1], step_tokens) for step_tokens in (512, 64)])
