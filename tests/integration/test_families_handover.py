"""Models with several kinds of layers, prefilled by one engine and decoded by one of another
process, over NIXL; and computed by the decode engine if a pull fails."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.kv_transfer.handoff import produce_params
from headrace_engine.serving.model_limits import MAMBA2 as MAMBA2_ON_CPUS
from tests.support.cross_layer_models import BLOCK, FusingEngines
from tests.support.families import write_family
from tests.support.machine import until
from tests.support.prompts import noise

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

ANSWER, STEP_TOKENS = 12, 512
CLOSE = 0.1
"""Nats. vLLM computes GDN on CPUs in bfloat16 only, and steps of other lengths in another order."""
LONG = (900, 40, 700, 513)
"""Tokens of prompts that are longer than a block of states."""
LENGTHS = (31, 33, 128, 129, 159, 300, 415, 700)
"""Windows and chunks are 128 tokens, blocks 32. The last token of a prompt of 128, 159 or 415
tokens needs a block that the token after it does not need."""
PROMPTS = [[5 + token % 500 for token in noise(n, n)] for n in LENGTHS]


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[FusingEngines, FusingEngines]]:
    """For a prefill engine and for a decode engine."""
    both = FusingEngines(hands_over=True), FusingEngines(hands_over=True)
    try:
        yield both
    finally:
        for each in both:
            each.end()


def pulled(
    processes: tuple[FusingEngines, FusingEngines], order: list[int]
) -> list[dict[str, Any]]:
    """The answers with the KV of the prompts in this order."""
    prefill, decode = processes
    assert decode.do("forget")
    keep = [produce_params()] * len(PROMPTS)
    kept = prefill.do("answers", prompts=PROMPTS, max_tokens=1, transfers=keep)
    transfers = [kept[i]["transfer"] for i in order]
    found: list[dict[str, Any]] = decode.do(
        "answers", prompts=PROMPTS, max_tokens=ANSWER, transfers=transfers
    )
    return found


MAMBA2 = ("falcon_h1", "granite")
OF_MAMBA2 = [MAMBA2[0], pytest.param(MAMBA2[1], marks=pytest.mark.soak)]


@pytest.mark.parametrize(
    "family", ["gemma3", "gpt_oss", "mistral", "llama4", *OF_MAMBA2, "qwen3_next"]
)
def test_a_pulled_prompt_is_answered_as_one_that_was_computed(
    processes: tuple[FusingEngines, FusingEngines], tmp_path: Path, family: str
) -> None:
    model = write_family(tmp_path, family)
    exact = family != "qwen3_next"
    options: dict[str, Any] = {
        "max_num_batched_tokens": STEP_TOKENS,
        "dtype": "float32" if exact else "bfloat16",
    }
    if family in MAMBA2:
        options |= MAMBA2_ON_CPUS.arguments

    def start(engines: FusingEngines) -> None:
        engines.do("open", model=str(model), hands_over=True, **options)

    with ThreadPoolExecutor() as pool:
        list(pool.map(start, processes))
    _, decode = processes
    plain = decode.do("answers", prompts=PROMPTS, max_tokens=ANSWER)

    right = list(range(len(PROMPTS)))
    for answer, truth, prompt in zip(pulled(processes, right), plain, PROMPTS, strict=True):
        assert answer["cached"] >= len(prompt) - 1, "the decode engine computed a part of it"
        assert answer["logprobs"][0] == pytest.approx(truth["logprobs"][0], abs=CLOSE)
        assert not exact or answer["tokens"] == truth["tokens"]
    transfers = decode.do("transfers")
    assert transfers.pop("proved") == len(PROMPTS)
    # Bytes are compared if the layers are all of one kind.
    assert transfers == ({"checked": len(PROMPTS)} if family == "mistral" else {})

    wrong = [*right[1:], right[0]]
    for answer, truth in zip(pulled(processes, wrong), plain, strict=True):
        assert answer["cached"] == 0
        assert not exact or answer["tokens"] == truth["tokens"]
    assert decode.do("transfers")["unproved_reference"] == len(PROMPTS)


@pytest.mark.parametrize("family", ["gemma3", pytest.param("gpt_oss", marks=pytest.mark.soak)])
def test_a_prompt_whose_pull_fails_is_loaded_from_the_store(
    processes: tuple[FusingEngines, FusingEngines], tmp_path: Path, family: str
) -> None:
    model, (_, decode) = write_family(tmp_path, family), processes
    options = {"max_num_batched_tokens": STEP_TOKENS}
    decode.do("open", model=str(model), **options)
    plain = decode.do("answers", prompts=PROMPTS, max_tokens=ANSWER)
    name = f"headrace-test-{uuid.uuid4().hex[:12]}"
    store = {"name": name, "folder": str(tmp_path), "dram_bytes": 64 << 20, "node": False}
    for engines in processes:
        engines.do("open", model=str(model), store=store, hands_over=True, **options)

    right = list(range(len(PROMPTS)))
    until(lambda: decode.do("forget"))  # blocks are held until they are saved
    for answer, truth, prompt in zip(pulled(processes, right), plain, PROMPTS, strict=True):
        assert answer["cached"] >= len(prompt) - 1
        assert answer["tokens"] == truth["tokens"]
    assert decode.do("transfers") == {"proved": len(PROMPTS)}
    wrong = [*right[1:], right[0]]
    until(lambda: decode.do("forget"))
    for answer, truth, prompt in zip(pulled(processes, wrong), plain, PROMPTS, strict=True):
        assert answer["cached"] == (len(prompt) - 1) // BLOCK * BLOCK
        assert answer["tokens"] == truth["tokens"]
    assert decode.do("transfers")["unproved_reference"] == len(PROMPTS)


@pytest.mark.parametrize("family", OF_MAMBA2)
def test_mamba_2_computes_long_prompts_beside_each_other_without_a_prefix_cache(
    processes: tuple[FusingEngines, FusingEngines], tmp_path: Path, family: str
) -> None:
    """With it, such a step ends a CPU engine."""
    engines, prompts = processes[0], [[5 + t % 500 for t in noise(n, n)] for n in LONG]
    model = str(write_family(tmp_path, family))
    engines.do("open", model=model, max_num_batched_tokens=2048, **MAMBA2_ON_CPUS.arguments)
    together = engines.do("answers", prompts=prompts, max_tokens=ANSWER)
    for prompt, answer in zip(prompts, together, strict=True):
        [alone] = engines.do("answers", prompts=[prompt], max_tokens=ANSWER)
        assert answer["tokens"] == alone["tokens"]
    engines.do("open", model=model, max_num_batched_tokens=256, **MAMBA2_ON_CPUS.arguments)
    pieces = engines.do("answers", prompts=prompts, max_tokens=ANSWER)
    assert [each["tokens"] for each in pieces] == [each["tokens"] for each in together]
