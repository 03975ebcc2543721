"""A vLLM engine continues from the node's copy of an incrementally compressed context."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.prompts import noise
from tests.support.sparse_engine import SparseEngine
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LONG, SHORT = noise(3000, 70), noise(100, 90)
KEPT, DESCRIBED, SEGMENT, STEP = 6, 1, 8, 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparseEngine]:
    """The only one of this file. Its cache holds 21 blocks, and the context has 24."""
    engine = SparseEngine(
        tiny_llama(),
        blocks=22,
        longest=4096,
        batch=256,
        bounded=True,
        has_predictor=True,
        offload_gib=1,
        store=tmp_path_factory.mktemp("shm"),
    )
    try:
        yield engine
    finally:
        engine.end()


def test_what_was_held_is_the_same_when_it_comes_from_the_store(engine: SparseEngine) -> None:
    first = engine.do("streamed_answer", tokens=LONG, share=0.25, count=20)
    assert first["right"] and first["most"] <= KEPT + DESCRIBED + SEGMENT + STEP
    engine.do("answers", requests=[{"tokens": SHORT}])  # by then its copy has ended
    turn = [*LONG, *first["tokens"], *noise(200, 72)]
    engine.do("forget")
    stored = engine.do("streamed_answer", tokens=turn, share=0.25, count=60)
    assert stored["cached"] == 23 * 128, "the first prompt's whole blocks"
    assert stored["chosen"] == [14 * 128, 22 * 128, 23 * 128, 25 * 128] and stored["right"]
    engine.do("answers", requests=[{"tokens": SHORT}])
    assert engine.do("bounded")["taken"] == 0


def test_several_that_come_together_all_begin_with_it(engine: SparseEngine) -> None:
    engine.do("forget")
    turns = [{"tokens": [*LONG, *noise(200, 73 + n)], "compression": 0.25} for n in range(3)]
    found = engine.do("answers", requests=turns)
    assert found["cached"] == [23 * 128] * 3 and found["preemptions"] == 0
    engine.do("answers", requests=[{"tokens": SHORT}])
    assert engine.do("bounded")["taken"] == 0
