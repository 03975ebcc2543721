"""A vLLM engine whose usage is counted: answers, a cached prompt, preemptions, aborts.

told("usage_engine", MODEL)
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any

from tests.support.program import fork_what_would_be_spawned, say

BLOCKS = 12
"""Of 128 tokens, fewer than the answers at once need."""


async def served(model: str) -> dict[str, Any]:
    """What became of the requests, what was counted, and what vLLM itself counts."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import Executor

    from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS
    from headrace_engine.meter import EngineMeter
    from headrace_engine.vllm.engine import MeterStatLogger
    from headrace_engine.vllm.usage_stats import ask_for_usage

    ask_for_usage()
    fork_what_would_be_spawned()
    config = AsyncEngineArgs(
        model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        num_gpu_blocks_override=BLOCKS,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[False],
        async_scheduling=False,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
        },
    ).create_engine_config()
    config.observability_config.enable_logging_iteration_details = True
    meter = EngineMeter()
    llm = AsyncLLM(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
        stat_loggers=[partial(MeterStatLogger, meter)],
    )
    book = meter.usage
    preempted = 0

    async def answer(name: str, prompt: list[int], tokens: int, stop_after: int = 0) -> int:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        record = book.record_of("shop", name)
        book.follow(name, record)
        inputs = TokensPrompt(prompt_token_ids=prompt, cache_salt="tenant:shop:")
        got = 0
        async for output in llm.generate(inputs, params, name):
            got = len(output.outputs[0].token_ids)
            if stop_after and got >= stop_after:
                break  # the client leaves
        return got

    def prompt(seed: int, length: int) -> list[int]:
        return [20 + (seed * 31 + n * 7) % 900 for n in range(length)]

    await answer("first", prompt(0, 5), 2)  # the engine reports from now on
    book.restart()
    answers = [
        await answer("new", prompt(1, 500), 4),
        await answer("cached", prompt(1, 500), 4),
    ]
    answers += await asyncio.gather(
        *(answer(f"together-{n}", prompt(2 + n, 250), 200) for n in range(5)),
        *(answer(f"left-{n}", prompt(9 + n, 100), 300, stop_after=3) for n in range(2)),
    )
    await answer("last", prompt(20, 5), 2)
    records = [each for (_, _), each in book._records.items() if each.request_id != "first"]
    for record in records:
        await record.completed(30.0)
    await asyncio.sleep(1.0)
    preempted = meter.snapshot()
    result = {
        "answers": answers,
        "totals": {tenant: usage.to_dict() for tenant, usage in book.totals.items()},
        "requests": {each.request_id: each.usage.to_dict() for each in records},
        "vllm": book.counters,
        "step_s": book.step_s,
        "meter": preempted["prompt_tokens_computed"],
    }
    llm.shutdown()
    return result


if __name__ == "__main__":
    say(asyncio.run(served(sys.argv[1])))
