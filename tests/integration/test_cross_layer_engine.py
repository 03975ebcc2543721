"""Models whose upper layers keep no KV, in real vLLM engines, against plain torch.

One process, whose engines start one after the other in two seconds each. Prompts are computed in
chunks of 128 tokens, blocks are 32 tokens.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY
from tests.support import cross_layer_models
from tests.support.cross_layer_models import (
    BLOCK,
    FusingEngines,
    config,
    reference,
    true_logprobs,
    write_model,
)
from tests.support.machine import until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

SAME = 2e-5
"""Nats, from float64: what float32 rounds. Angles of the rotation are exact in these models."""
STEP_TOKENS = 128
BLOCK_BYTES = 3 * 2 * cross_layer_models.KV_HEADS * cross_layer_models.HEAD_DIM * BLOCK * 4
"""Of the three storage layers, in float32."""
KV_SPACE_BYTES = 1 << 30
"""As `tests.support.program` sets it."""
SCARCE_BLOCKS = 40
ANSWER = 12


def noise(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, cross_layer_models.VOCABULARY), k=tokens)


PROMPTS = [noise(n, n) for n in (1, 5, 31, 32, 33, 100, 128, 129, 300, 700)]


@pytest.fixture(scope="module")
def engines() -> Iterator[FusingEngines]:
    """The only process of this file."""
    engines = FusingEngines()
    try:
        yield engines
    finally:
        engines.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the folder of a model, once for each."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def made(kind: str, style: str, named: bool) -> Path:
        described = config(kind, style, readers=cross_layer_models.READERS if named else None)
        return write_model(root / f"{kind}-{style}-{named}", described)

    def make(kind: str, style: str, named: bool = False) -> Path:
        return made(kind, style, named)

    return make


def open_engine(engines: FusingEngines, model: Path, **options: Any) -> int:
    usual = {"max_num_batched_tokens": STEP_TOKENS, "kv_sharing_fast_prefill": True}
    return int(engines.do("open", model=str(model), **(usual | options)))


def ask(engines: FusingEngines, prompts: list[list[int]], tokens: int = ANSWER) -> Any:
    return engines.do("answers", prompts=prompts, max_tokens=tokens)


def assert_true(model: Path, prompts: list[list[int]], answers: Any) -> None:
    """Each token has the log-probability that plain torch computes for it, in one piece."""
    plain = reference(model)
    for prompt, answer in zip(prompts, answers, strict=True):
        truth = true_logprobs(plain, prompt, answer["tokens"])
        assert answer["logprobs"] == pytest.approx(truth, abs=SAME)


@pytest.mark.parametrize(
    ("kind", "style", "named"),
    [
        ("fused", "llama", False),
        ("lite", "qwen3", False),
        ("yoco", "llama", False),
        ("cla", "llama", False),
        ("fused", "llama", True),
        ("lite", "llama", True),
    ],
)
def test_chunks_decoding_and_prefix_hits_are_what_plain_torch_computes(
    engines: FusingEngines, folder: Any, kind: str, style: str, named: bool
) -> None:
    model = folder(kind, style, named)
    assert open_engine(engines, model) == KV_SPACE_BYTES // BLOCK_BYTES
    cold = ask(engines, PROMPTS)
    assert_true(model, PROMPTS, cold)
    longer = [[*prompt, 7, 8] for prompt in PROMPTS]
    warm = ask(engines, longer)
    assert [answer["cached"] for answer in warm] == [len(p) // BLOCK * BLOCK for p in PROMPTS]
    assert_true(model, longer, warm)


@pytest.mark.parametrize(("kind", "style"), [("fused", "qwen3"), ("lite", "llama")])
def test_preempted_requests_are_what_plain_torch_computes(
    engines: FusingEngines, folder: Any, kind: str, style: str
) -> None:
    model = folder(kind, style)
    open_engine(engines, model, num_gpu_blocks_override=SCARCE_BLOCKS)
    prompts = [noise(250 + n, n) for n in range(5)]
    answers = ask(engines, prompts, tokens=60)
    assert engines.do("counted", name="vllm:num_preemptions") > 0
    assert_true(model, prompts, answers)


class TestRows:
    def test_a_prompt_costs_the_upper_layers_a_row_for_each_chunk_and_token(
        self, engines: FusingEngines, folder: Any
    ) -> None:
        open_engine(engines, folder("fused", "llama"))
        engines.do("count_rows")
        ask(engines, [noise(300, 1)], tokens=5)
        assert engines.do("rows") == 3 + 4

    def test_drafts_are_verified_with_the_same_answers(
        self, engines: FusingEngines, folder: Any
    ) -> None:
        drafts = {"method": "custom_class", "model": "tests.support.cross_layer_models.Guesser"}
        drafts |= {"num_speculative_tokens": 3}
        model, prompt = folder("fused", "llama"), noise(40, 3) * 4
        open_engine(engines, model, speculative_config=drafts)
        answers = ask(engines, [prompt, noise(200, 4)], tokens=40)
        assert engines.do("counted", name="vllm:spec_decode_num_accepted_tokens") > 0
        assert_true(model, [prompt, noise(200, 4)], answers)

    def test_without_the_option_all_rows_run_and_prompt_logprobs_are_right(
        self, engines: FusingEngines, folder: Any
    ) -> None:
        model = folder("fused", "llama")
        open_engine(engines, model, kv_sharing_fast_prefill=False)
        engines.do("count_rows")
        answers = engines.do("answers", prompts=PROMPTS, max_tokens=4, prompt_logprobs=True)
        assert engines.do("rows") >= sum(map(len, PROMPTS))
        assert_true(model, PROMPTS, answers)
        plain = reference(model)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            truth = true_logprobs(plain, prompt[:1], prompt[1:])
            assert answer["prompt"] == pytest.approx(truth, abs=2 * SAME)


@pytest.mark.parametrize("kind", ["lite", "fused"])
def test_the_store_keeps_storage_layers_alone_and_gives_them_back(
    engines: FusingEngines, folder: Any, kind: str
) -> None:
    name, model, prompt = f"headrace-test-{uuid.uuid4().hex[:12]}", folder(kind, "llama"), 300
    store = {"name": name, "dram_bytes": 8 << 20, "node": False}
    try:
        open_engine(engines, model, store=store)
        cold = ask(engines, [noise(prompt, 9)])
        with Arena.create_or_attach(name, 8 << 20) as arena:
            until(lambda: int((arena.table["state"] == READY).sum()) == prompt // BLOCK)
            slot = int((arena.table["state"] == READY).nonzero()[0][0])
            assert arena.view(slot).nbytes == BLOCK_BYTES
        until(lambda: engines.do("forget"))
        warm = ask(engines, [noise(prompt, 9)])
        assert warm[0]["cached"] == prompt // BLOCK * BLOCK
        assert_true(model, [noise(prompt, 9)] * 2, cold + warm)
    finally:
        (Path("/dev/shm") / name).unlink(missing_ok=True)  # the engine has it until the next opens
