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


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    name = f"headrace-gpu-{os.getpid()}"
    made = make_llm(store_connector(name, "2GiB"), positions=4096, memory=0.3)
    yield made
    del made
    (Path("/dev/shm") / name).unlink(missing_ok=True)


def answers(llm: Any, prompts: list[list[int]]) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = llm.generate(given, sampling, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


def stored(llm: Any) -> None:
    """Wait until what was computed is in the store, and forget it in the engine."""
    for _ in range(3):
        time.sleep(0.5)
        answers(llm, [[1, 2, 3]])
    assert llm.reset_prefix_cache()


def test_full_graphs_are_on(llm: Any) -> None:
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    assert mode.has_full_cudagraphs()


def test_loaded_blocks_give_the_same_tokens(llm: Any) -> None:
    cold = answers(llm, [PROMPT])
    stored(llm)
    assert answers(llm, [PROMPT]) == cold


def test_a_prompt_of_which_one_token_is_missing_is_loaded_under_a_full_graph(llm: Any) -> None:
    size = llm.llm_engine.vllm_config.cache_config.block_size
    prompt = PROMPT[: 64 * size + 1]
    cold = answers(llm, [prompt])
    stored(llm)
    assert answers(llm, [prompt]) == cold


def test_loads_beside_decodes_change_no_token(llm: Any) -> None:
    prompts = [PROMPT[n:] for n in range(0, 800, 100)]
    cold = answers(llm, prompts)
    stored(llm)
    assert answers(llm, prompts) == cold
