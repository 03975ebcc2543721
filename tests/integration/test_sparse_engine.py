"""Sparse attention in a real vLLM engine: exact requests do not notice sparse ones beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace_decode.attention.page_counts import MIN_TOKENS
from headrace_decode.sparse.basis import COORDINATES
from tests.support.prompts import noise
from tests.support.sparse_engine import SparseEngine
from tests.support.tiny import LAYERS, tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LONG = MIN_TOKENS + 232
PROMPTS = [noise(LONG + 10 * n, 50 + n) for n in range(3)]
SHORT = noise(300, 60)
MANY = 40


@pytest.fixture(scope="module")
def engine() -> Iterator[SparseEngine]:
    """The only one of this file."""
    engine = SparseEngine(tiny_llama(), calibrated=noise(1024, 70))
    try:
        yield engine
    finally:
        engine.end()


@pytest.fixture(scope="module")
def exact(engine: SparseEngine) -> list[list[int]]:
    """The prompts' answers without sparse requests beside them."""
    found = engine.do("answers", requests=[asking(tokens) for tokens in (*PROMPTS, SHORT)])
    assert found["sparse_rows"] == found["made"] == 0
    return found["tokens"]


def asking(tokens: list[int], share: float | None = None) -> dict[str, Any]:
    return {"tokens": tokens, "max_tokens": MANY, "sparse": share}


def test_the_engine_takes_the_bases_that_were_learned_of_its_model(engine: SparseEngine) -> None:
    assert engine.do("bases") == [COORDINATES] * LAYERS


def test_exact_answers_are_those_of_a_plain_llama(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    for tokens, answer in zip((*PROMPTS, SHORT), exact, strict=True):
        assert engine.do("greedy", tokens=tokens, answer=answer)


def test_a_share_of_one_answers_as_an_exact_request(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    found = engine.do("answers", requests=[asking(PROMPTS[0], 1.0), asking(SHORT, 1.0)])
    assert found["tokens"] == [exact[0], exact[3]] and found["sparse_rows"] == 0


def test_sparse_rows_begin_behind_the_prompt_and_soon(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    engine.do("forget")
    found = engine.do("answers", requests=[asking(PROMPTS[1], 0.05)])
    assert MANY - 3 <= found["sparse_rows"] < MANY
    assert found["tokens"][0][0] == exact[1][0], "the prompt's last row attends to all"
    assert found["tokens"][0] != exact[1]
    pages = (len(PROMPTS[1]) + MANY) // 32
    assert abs(found["made"] - LAYERS * pages) <= LAYERS


def test_summaries_of_a_cached_prefix_are_not_made_again(engine: SparseEngine) -> None:
    first, second = (engine.do("answers", requests=[asking(PROMPTS[2], 0.1)]) for _ in range(2))
    assert first["tokens"] == second["tokens"]
    assert second["sparse_rows"] >= first["sparse_rows"] and second["made"] <= first["made"] / 4


def test_exact_requests_among_sparse_ones_answer_as_ever(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    engine.do("forget")
    mixed = [asking(PROMPTS[1], 0.05), asking(PROMPTS[0]), asking(SHORT)]
    found = engine.do("answers", requests=mixed)
    assert found["tokens"][1:] == [exact[0], exact[3]]
    assert found["sparse_rows"] > 0 and found["preemptions"] == 0


def test_they_do_under_preemption_too(engine: SparseEngine, exact: list[list[int]]) -> None:
    engine.do("forget")
    requests = [asking(PROMPTS[0]), asking(PROMPTS[1], 0.05), asking(PROMPTS[2])]
    requests += [asking(PROMPTS[1], 0.3), asking(SHORT), asking(PROMPTS[2], 0.05)]
    found = engine.do("answers", requests=requests)
    assert found["preemptions"] > 0 and found["sparse_rows"] > 0
    assert [found["tokens"][n] for n in (0, 2, 4)] == [exact[0], exact[2], exact[3]]
