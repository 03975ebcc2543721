"""A real vLLM engine drops KV of contexts while it computes them, and serves contexts longer than
its cache so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.prompts import noise
from tests.support.sparse_engine import SparseEngine
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BLOCKS = 22
LONG, OTHER = noise(3000, 70), noise(3000, 71)
PROMPTS = [noise(2900 + 40 * n, 80 + n) for n in range(3)]
SHORT = noise(300, 90)
KEPT, SEGMENT, STEP = 6, 8, 2


@pytest.fixture(scope="module")
def engine() -> Iterator[SparseEngine]:
    """The only one of this file. Its cache holds 21 blocks, and a long context has 24. Exact
    requests leave for host memory."""
    engine = SparseEngine(
        tiny_llama(),
        blocks=BLOCKS,
        longest=4096,
        batch=256,
        bounded=True,
        has_predictor=True,
        offload_gib=1,
    )
    try:
        yield engine
    finally:
        engine.end()


def asking(prompt: list[int], bounded: float | None = None, tokens: int = 40) -> dict[str, Any]:
    return {"tokens": prompt, "max_tokens": tokens, "compression": bounded}


def nothing_is_left(engine: SparseEngine) -> bool:
    engine.do("answers", requests=[asking(SHORT[:64], tokens=2)])
    found = engine.do("bounded")
    return not (found["followed"] or found["courses"] or found["taken"])


def test_a_context_longer_than_the_cache_is_computed_over_what_is_held_of_it(
    engine: SparseEngine,
) -> None:
    found = engine.do("streamed_answer", tokens=LONG, share=0.25, count=200)
    assert len(found["tokens"]) == 200 and found["right"]
    assert found["chosen"] == [14 * 128, 22 * 128, 23 * 128]
    assert found["most"] <= KEPT + SEGMENT + STEP
    assert found["after"] == KEPT + 1 + 1
    assert nothing_is_left(engine)


def test_a_prompt_goes_on_from_what_is_held_of_its_beginning(engine: SparseEngine) -> None:
    first = engine.do("streamed_answer", tokens=OTHER, share=0.25, count=20)
    assert first["cached"] == 0
    turn = [*OTHER, *first["tokens"], *noise(200, 72)]
    found = engine.do("streamed_answer", tokens=turn, share=0.25, count=60)
    assert found["cached"] == 23 * 128, "the first prompt's whole blocks"
    assert found["chosen"] == [14 * 128, 22 * 128, 23 * 128, 25 * 128] and found["right"]
    another = [*OTHER[: 23 * 128 - 1], *noise(200, 73)]
    found = engine.do("streamed_answer", tokens=another, share=0.25, count=60)
    assert found["cached"] == 22 * 128, "what was held before that"
    assert found["chosen"] == [14 * 128, 22 * 128, 24 * 128] and found["right"]
    assert nothing_is_left(engine)


def test_a_shorter_prompt_goes_on_from_what_a_longer_one_held(engine: SparseEngine) -> None:
    longer = noise(3400, 74)
    engine.do("streamed_answer", tokens=longer, share=0.25, count=2)
    shorter = [*longer[: 24 * 128], *noise(100, 75)]
    found = engine.do("streamed_answer", tokens=shorter, share=0.25, count=40)
    assert found["cached"] == 24 * 128, "in seven blocks, and it keeps six"
    assert found["chosen"] == [16 * 128, 24 * 128] and found["right"]
    assert nothing_is_left(engine)


def test_what_is_held_is_forgotten_when_others_need_its_blocks(engine: SparseEngine) -> None:
    engine.do("answers", requests=[asking(OTHER, 0.25)])
    assert engine.do("answers", requests=[asking(OTHER, 0.25)])["cached"] == [23 * 128]
    assert engine.do("answers", requests=[asking(OTHER, 0.24)])["cached"] == [0], "another share"
    engine.do("answers", requests=[asking(LONG[: 20 * 128], tokens=2)])
    assert engine.do("answers", requests=[asking(OTHER, 0.25)])["cached"] == [0]
    assert nothing_is_left(engine)


def test_several_are_served_and_exact_ones_among_them_are_as_ever(engine: SparseEngine) -> None:
    alone = [engine.do("answers", requests=[asking(p)])["tokens"][0] for p in (LONG, SHORT)]
    requests = [asking(prompt, 0.25) for prompt in PROMPTS] + [asking(LONG), asking(SHORT)]
    found = engine.do("answers", requests=requests)
    assert [len(answer) for answer in found["tokens"]] == [40] * 5
    assert found["tokens"][3:] == alone
    assert nothing_is_left(engine)
    found = engine.do("answers", requests=requests)  # some go on from what is held, others wait
    assert [len(answer) for answer in found["tokens"]] == [40] * 5
    assert found["tokens"][3:] == alone
    assert nothing_is_left(engine)


def test_a_streamed_answer_is_the_same_whoever_is_beside_it(engine: SparseEngine) -> None:
    engine.do("answers", requests=[asking(PROMPTS[0], 0.25)])  # now all begin with what it held
    alone = engine.do("answers", requests=[asking(PROMPTS[0], 0.25)])["tokens"]
    again = engine.do("answers", requests=[asking(PROMPTS[0], 0.25), asking(PROMPTS[1], 0.25)])
    assert again["tokens"][:1] == alone


def test_preempted_ones_are_computed_from_their_beginning(engine: SparseEngine) -> None:
    requests = [asking(SHORT, tokens=700), *(asking(prompt, 0.1, 1000) for prompt in PROMPTS)]
    found = engine.do("answers", requests=requests)
    assert found["preemptions"] > 0
    assert [len(answer) for answer in found["tokens"]] == [700, 1000, 1000, 1000]
    assert nothing_is_left(engine)


@pytest.mark.parametrize("after", [3, 8, 14])
def test_aborted_requests_leave_nothing_behind(engine: SparseEngine, after: int) -> None:
    requests = [asking(LONG, 0.25), asking(PROMPTS[0], 0.25)]
    found = engine.do("aborted", requests=requests, after=after)
    assert found["before"]["courses"] == 2
    assert not (found["followed"] or found["courses"] or found["taken"])


def test_one_that_would_not_fit_even_so_leaves_for_host_memory(engine: SparseEngine) -> None:
    alone = engine.do("answers", requests=[asking(LONG)])["tokens"]
    assert engine.do("answers", requests=[asking(LONG, 0.9)])["tokens"] == alone
