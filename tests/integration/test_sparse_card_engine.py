"""Sparse attention as engines on GPUs have it, in a vLLM engine on a CPU: vLLM's scheduler and both
of its model runners, our worker, backend and kernels, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.as_card import MIN_TOKENS
from tests.support.prompts import noise
from tests.support.sparse_engine import SparseEngine
from tests.support.tiny import tiny_llama

pytest.importorskip("triton")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EXACT, SPARSE = noise(MIN_TOKENS + 40, 50), noise(MIN_TOKENS + 33, 51)
MANY = 4


@pytest.fixture(scope="module", params=["0", "1"], ids=["first runner", "second runner"])
def engine(request: Any) -> Iterator[SparseEngine]:
    engine = SparseEngine(
        tiny_llama(), calibrated=noise(512, 70), longest=512, runner=request.param
    )
    try:
        yield engine
    finally:
        engine.end()


def asking(tokens: list[int], share: float | None = None) -> dict[str, Any]:
    return {"tokens": tokens, "max_tokens": MANY, "sparse": share}


def test_rows_that_ask_are_sparse_and_others_beside_them_exact(engine: SparseEngine) -> None:
    found = engine.do("answers", requests=[asking(EXACT), asking(SPARSE, 0.7)])
    assert found["sparse_rows"] == MANY - 1, "all but the prompt's"
    exact, sparse = found["tokens"]
    assert engine.do("greedy", tokens=EXACT, answer=exact)
    assert engine.do("greedy", tokens=SPARSE, answer=sparse[:1]), "the prompt is exact"
    assert len(sparse) == MANY
