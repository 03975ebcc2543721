"""An engine on a GPU with the store: its graphs stay full, and loaded KV gives the same answers.

One engine for all of these tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.engine import make_llm, settle, store_connector
from tests.support.gpu_answers import answers, assert_alike

pytestmark = pytest.mark.gpu

PROMPT = [100 + i * 7 % 1900 for i in range(1500)]
GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    name = f"headrace-gpu-{os.getpid()}"
    made = make_llm(store_connector(name, "2GiB"), positions=4096, memory=0.3)
    yield made
    del made
    (Path("/dev/shm") / name).unlink(missing_ok=True)


@pytest.mark.skipif(not GPU, reason="graphs are a GPU's")
def test_full_graphs_are_on(llm: Any) -> None:
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    assert mode.has_full_cudagraphs()


def test_loaded_blocks_give_the_same_answer(llm: Any) -> None:
    cold = answers(llm, [PROMPT], cached=False)
    settle(llm)
    assert_alike(answers(llm, [PROMPT], cached=True), cold)


def test_a_prompt_of_which_one_token_is_missing_is_loaded_under_a_full_graph(llm: Any) -> None:
    size = llm.llm_engine.vllm_config.cache_config.block_size
    prompt = [token + 1 for token in PROMPT[: 1024 // size * size + 1]]
    cold = answers(llm, [prompt], cached=False)
    settle(llm)
    assert_alike(answers(llm, [prompt], cached=True), cold)


def test_loads_beside_decodes_change_no_answer(llm: Any) -> None:
    prompts = [[token + 2 + n for token in PROMPT] for n in range(8 if GPU else 3)]
    cold = answers(llm, prompts, cached=False)
    settle(llm)
    assert_alike(answers(llm, prompts, cached=True), cold)
