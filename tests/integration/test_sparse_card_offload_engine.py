"""Sparse attention with offload as engines on GPUs have it, in a vLLM engine on a CPU: vLLM's
scheduler and both of its model runners, our worker, backend and kernels, in Triton's interpreter.

Steps are scheduled ahead. Answers are those of an engine whose cache holds all KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.prompts import noise
from tests.support.sparse_engine import SparseEngine
from tests.support.tiny import tiny_llama

pytest.importorskip("triton")

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCKS, BATCH, LONGEST = 16, 64, 544
LONG, SHORT = noise((BLOCKS - 1) * 32 + 10, 50), noise(60, 51)
SHARE, MANY = 0.3, 5
NOTHING = {"held": 0, "host_taken": 0, "host_promised": 0, "taken": 0}


def engine_of(runner: str, blocks: int, offload_gib: float) -> SparseEngine:
    return SparseEngine(
        tiny_llama(),
        calibrated=noise(512, 70),
        longest=LONGEST,
        batch=BATCH,
        blocks=blocks,
        runner=runner,
        offload_gib=offload_gib,
    )


def asking(tokens: list[int], share: float | None = None) -> dict[str, Any]:
    return {"tokens": tokens, "max_tokens": MANY, "sparse": share}


@pytest.fixture(scope="module")
def inside() -> dict[str, Any]:
    """Answers of an engine whose cache holds all KV."""
    engine = engine_of("1", 4 * BLOCKS, 0)
    try:
        found: dict[str, Any] = engine.do("answers", requests=[asking(LONG, SHARE)])
        return found
    finally:
        engine.end()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("0", id="first runner", marks=pytest.mark.soak),
        pytest.param("1", id="second runner"),
    ],
)
def engine(request: Any) -> Iterator[SparseEngine]:
    engine = engine_of(request.param, BLOCKS, 0.02)
    try:
        yield engine
    finally:
        engine.end()


def test_an_answer_is_the_same_if_its_context_does_not_fit_into_the_cache(
    engine: SparseEngine, inside: dict[str, Any]
) -> None:
    assert inside["sparse_rows"] == MANY - 1, "all but the prompt's"
    found = engine.do("answers", requests=[asking(LONG, SHARE)])
    assert found["tokens"] == inside["tokens"]
    offload = engine.do("offload")
    assert offload["sparse"] == MANY - 1 and offload["staged"] > 0


def test_exact_requests_longer_than_the_cache_are_plain_torchs_and_leave_nothing(
    engine: SparseEngine,
) -> None:
    found = engine.do("answers", requests=[asking(LONG), asking(SHORT)])
    for prompt, answer in zip((LONG, SHORT), found["tokens"], strict=True):
        assert engine.do("greedy", tokens=prompt, answer=answer)
    engine.do("answers", requests=[asking(SHORT)])  # a worker learns of the last end
    offload = engine.do("offload")
    assert {name: offload[name] for name in NOTHING} == NOTHING
