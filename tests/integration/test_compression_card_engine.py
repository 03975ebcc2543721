"""KV cache compression as engines on GPUs have it, in a vLLM engine on a CPU: vLLM's scheduler and
both of its model runners, our worker and backend, and vLLM's Triton kernel in Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from headrace_decode.attention.settings import SparseSettings
from tests.support.as_card import SEGMENT_TOKENS
from tests.support.prompts import noise
from tests.support.sparse_engine import SparseEngine
from tests.support.tiny import tiny_llama

pytest.importorskip("triton")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCK = SparseSettings.page_tokens
CONTEXT, EXACT = noise(9 * BLOCK + 12, 50), noise(100, 51)
LONG = noise(13 * BLOCK + 4, 52)
KEPT = 3
"""Blocks that the context is kept in."""


READS_AGAIN = pytest.param("0", id="first runner")
STREAMS = pytest.param("1", id="second runner")
with_runners = partial(pytest.mark.parametrize, "engine", indirect=True, scope="module")


@pytest.fixture(scope="module")
def engine(request: Any) -> Iterator[SparseEngine]:
    """Contexts are read again with the first runner, and streamed with the second."""
    streams = request.param == "1"
    engine = SparseEngine(
        tiny_llama(),
        longest=1024,
        batch=128 if streams else 1024,
        runner=request.param,
        bounded=True,
        has_predictor=streams,
        stream=streams,
    )
    try:
        yield engine
    finally:
        engine.end()


def asking(tokens: list[int], share: float | None = None, count: int = 8) -> dict[str, Any]:
    return {"tokens": tokens, "max_tokens": count, "compression": share}


@with_runners([STREAMS])
def test_a_streamed_answer_continues_over_what_is_kept(engine: SparseEngine) -> None:
    """Its tokens are those of plain torch over all KV, then over the kept KV."""
    found = engine.do("streamed_answer", tokens=LONG, share=0.25, count=20)
    assert found["right"] and len(found["tokens"]) == 20
    assert found["chosen"] == [8 * BLOCK, 8 * BLOCK + SEGMENT_TOKENS + BLOCK, 13 * BLOCK]


@pytest.mark.soak
@with_runners([READS_AGAIN])
def test_an_answer_continues_over_what_is_kept_of_a_context_read_again(
    engine: SparseEngine,
) -> None:
    """Its tokens are those of plain torch over all KV, then over the kept KV."""
    found = engine.do("bounded_answer", tokens=CONTEXT, share=0.25, count=250)
    assert found["exact"] and found["held"] and len(found["tokens"]) == 250
    assert found["kept"] == pytest.approx(KEPT / 9)
    assert found["before"] >= 10
    assert found["after"] == KEPT - -(len(CONTEXT) % BLOCK + 249) // BLOCK


@with_runners([READS_AGAIN, STREAMS])
def test_exact_requests_beside_compressed_ones_get_their_own_answer(engine: SparseEngine) -> None:
    requests = [asking(EXACT), asking(CONTEXT, 0.25), asking(CONTEXT[BLOCK:], 0.25)]
    [exact, *others] = engine.do("answers", requests=requests)["tokens"]
    assert engine.do("greedy", tokens=EXACT, answer=exact)
    assert [len(each) for each in others] == [8, 8]
    engine.do("answers", requests=[asking(EXACT[:40], count=2)])  # workers learn of the last end
    left = engine.do("bounded")
    assert not (left["followed"] or left["courses"] or left["taken"])
