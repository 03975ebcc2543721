"""An engine on a GPU with the store: its graphs stay full, and what it loads gives the same tokens.

One engine for all of these tests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.engine import make_llm, store_connector

pytestmark = pytest.mark.gpu

PROMPT = [20 + i * 7 % 4000 for i in range(1500)]
WITHIN = 0.1
"""Nats, of bfloat16."""


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    name = f"headrace-gpu-{os.getpid()}"
    made = make_llm(store_connector(name, "2GiB"), positions=4096, memory=0.3)
    yield made
    del made
    (Path("/dev/shm") / name).unlink(missing_ok=True)


Answer = list[tuple[int, float]]
"""Tokens, and the log-probability of each."""


def answers(llm: Any, prompts: list[list[int]], cached: bool) -> list[Answer]:
    """Greedy answers of 16 tokens.

    Args:
        cached: whether most of each prompt must be found, or none of it.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=0)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for prompt, one in zip(prompts, llm.generate(given, sampling, use_tqdm=False), strict=True):
        hit = one.num_cached_tokens or 0
        assert hit > len(prompt) // 2 if cached else hit == 0
        [output] = one.outputs
        chosen = zip(output.token_ids, output.logprobs, strict=True)
        found.append([(token, logprobs[token].logprob) for token, logprobs in chosen])
    return found


def assert_alike(some: list[Answer], others: list[Answer]) -> None:
    """The same tokens, but where two are about equally likely: rows that are computed beside
    others, or in other chunks, are rounded otherwise. Behind such a token answers may differ."""
    for one, other in zip(some, others, strict=True):
        for (token, logprob), (its, likely) in zip(one, other, strict=True):
            assert logprob == pytest.approx(likely, abs=WITHIN)
            if token != its:
                break


def stored(llm: Any) -> None:
    """Wait until what was computed is in the store, and forget it in the engine."""
    for n in range(3):
        time.sleep(0.5)
        answers(llm, [[n, 1, 2]], cached=False)
    assert llm.reset_prefix_cache()


def test_full_graphs_are_on(llm: Any) -> None:
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    assert mode.has_full_cudagraphs()


def test_loaded_blocks_give_the_same_tokens(llm: Any) -> None:
    cold = answers(llm, [PROMPT], cached=False)
    stored(llm)
    assert_alike(answers(llm, [PROMPT], cached=True), cold)


def test_a_prompt_of_which_one_token_is_missing_is_loaded_under_a_full_graph(llm: Any) -> None:
    size = llm.llm_engine.vllm_config.cache_config.block_size
    prompt = [token + 1 for token in PROMPT[: 64 * size + 1]]
    cold = answers(llm, [prompt], cached=False)
    stored(llm)
    assert_alike(answers(llm, [prompt], cached=True), cold)


def test_loads_beside_decodes_change_no_token(llm: Any) -> None:
    prompts = [[token + 2 + n for token in PROMPT] for n in range(8)]
    cold = answers(llm, prompts, cached=False)
    stored(llm)
    assert_alike(answers(llm, prompts, cached=True), cold)
