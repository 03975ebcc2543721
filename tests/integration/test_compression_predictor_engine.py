"""A real vLLM engine with a predictor drops KV of contexts without reading them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.prompts import noise
from tests.support.sparse_engine import SparseEngine
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LONG = noise(3000, 70)
PROMPTS = [noise(2200 + 40 * n, 80 + n) for n in range(4)]
SHORT = noise(300, 90)


@pytest.fixture(scope="module")
def engine() -> Iterator[SparseEngine]:
    """The only one of this file. It holds two of the long contexts as they are."""
    engine = SparseEngine(
        tiny_llama(), blocks=64, longest=4096, batch=512, bounded=True, has_predictor=True
    )
    try:
        yield engine
    finally:
        engine.end()


def asking(prompt: list[int], bounded: float | None = None, tokens: int = 60) -> dict[str, Any]:
    return {"tokens": prompt, "max_tokens": tokens, "compression": bounded}


def test_an_answer_goes_on_over_what_is_held_and_blocks_are_freed(engine: SparseEngine) -> None:
    found = engine.do("bounded_answer", tokens=LONG, share=0.25, count=400)
    assert len(found["tokens"]) == 400
    assert found["exact"] and found["held"]
    assert found["kept"] == pytest.approx(6 / 23, abs=0.001)
    assert found["after"] == 6 + 1 + 3
    assert engine.do("bounded")["read"] == 0, "no row repeats"


def test_many_at_once_are_served_and_exact_ones_among_them_are_as_ever(
    engine: SparseEngine,
) -> None:
    exact = engine.do("answers", requests=[asking(LONG), asking(SHORT)])["tokens"]
    before = engine.do("bounded")["dropped"]
    requests = [asking(prompt, 0.25, 300) for prompt in PROMPTS] + [asking(LONG), asking(SHORT)]
    found = engine.do("answers", requests=requests)
    assert [len(answer) for answer in found["tokens"]] == [300] * 4 + [60] * 2
    assert found["tokens"][4:] == exact
    assert engine.do("bounded")["dropped"] - before == 4
    engine.do("answers", requests=[asking(SHORT[:64], tokens=2)])
    left = engine.do("bounded")
    assert (left["followed"], left["courses"], left["taken"]) == (False, 0, 0)
