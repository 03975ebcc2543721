"""Models whose upper layers keep no KV, prefilled by one engine and decoded by one of another
process, over NIXL.

The decode engine gets the KV of the storage layers. Its readers must make all they need of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace_engine.kv_transfer.handoff import produce_params
from tests.support.cross_layer_models import (
    FusingEngines,
    config,
    reference,
    true_logprobs,
    write_model,
)
from tests.support.prompts import noise

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

SAME = 2e-5
"""Nats, from float64, as in `test_cross_layer_engine`."""
STEP_TOKENS = 128
ANSWER = 12
VOCABULARY = 512
PROMPTS = [[token % VOCABULARY for token in noise(n, n)] for n in (31, 33, 128, 300, 700)]


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[FusingEngines, FusingEngines]]:
    """For a prefill engine and for a decode engine."""
    both = FusingEngines(hands_over=True), FusingEngines(hands_over=True)
    try:
        yield both
    finally:
        for each in both:
            each.end()


@pytest.mark.parametrize("kind", ["fused", "lite"])
def test_answers_from_handed_over_kv_are_what_plain_torch_computes(
    processes: tuple[FusingEngines, FusingEngines], tmp_path: Path, kind: str
) -> None:
    model = write_model(tmp_path / kind, config(kind))

    def start(engines: FusingEngines) -> None:
        options = {"max_num_batched_tokens": STEP_TOKENS, "kv_sharing_fast_prefill": True}
        engines.do("open", model=str(model), hands_over=True, **options)

    with ThreadPoolExecutor() as pool:
        list(pool.map(start, processes))
    prefill, decode = processes
    keep = [produce_params()] * len(PROMPTS)
    kept = prefill.do("answers", prompts=PROMPTS, max_tokens=1, transfers=keep)
    decode.do("count_rows")
    pulled = [answer["transfer"] for answer in kept]
    answers = decode.do("answers", prompts=PROMPTS, max_tokens=ANSWER, transfers=pulled)

    plain = reference(model)
    for prompt, first, answer in zip(PROMPTS, kept, answers, strict=True):
        assert answer["tokens"][0] == first["tokens"][0]
        truth = true_logprobs(plain, prompt, answer["tokens"])
        assert answer["logprobs"] == pytest.approx(truth, abs=SAME)
        assert answer["cached"] >= len(prompt) - 1, "the decode engine computed a part of it"
    assert decode.do("rows") == ANSWER * len(PROMPTS)
    assert decode.do("transfers") == {"proved": len(PROMPTS), "checked": len(PROMPTS)}
