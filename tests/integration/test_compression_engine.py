"""A real vLLM engine drops KV of contexts, and frees what it held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.prompts import noise
from tests.support.sparse_engine import SparseEngine
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BLOCKS = 64
LONG = noise(3000, 70)
PROMPTS = [noise(2200 + 40 * n, 80 + n) for n in range(4)]
SHORT = noise(300, 90)
NOTHING = {"followed": False, "courses": 0, "taken": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[SparseEngine]:
    """The only one of this file. It holds two of the long contexts as they are. Some may leave for
    host memory."""
    engine = SparseEngine(
        tiny_llama(), blocks=BLOCKS, longest=4096, batch=512, bounded=True, offload_gib=1
    )
    try:
        yield engine
    finally:
        engine.end()


@pytest.fixture(scope="module")
def exact(engine: SparseEngine) -> list[list[int]]:
    """Answers of exact requests: the long one, and the short one."""
    found: list[list[int]] = engine.do("answers", requests=[asking(LONG), asking(SHORT)])["tokens"]
    return found


def asking(prompt: list[int], bounded: float | None = None, tokens: int = 60) -> dict[str, Any]:
    return {"tokens": prompt, "max_tokens": tokens, "compression": bounded}


def nothing_is_left(engine: SparseEngine) -> bool:
    """Whether all is forgotten and free; a worker learns of the last end with the next step."""
    engine.do("answers", requests=[asking(SHORT[:64], tokens=2)])
    found = engine.do("bounded")
    return {name: found[name] for name in NOTHING} == NOTHING


def test_exact_requests_of_such_an_engine_are_plain_torchs(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    assert engine.do("greedy", tokens=LONG, answer=exact[0])
    assert engine.do("greedy", tokens=SHORT, answer=exact[1])
    assert engine.do("bounded")["read"] == 0


def test_an_answer_goes_on_over_what_is_held_and_blocks_are_freed(engine: SparseEngine) -> None:
    found = engine.do("bounded_answer", tokens=LONG, share=0.25, count=900)
    assert len(found["tokens"]) == 900
    assert found["exact"] and found["held"]
    assert found["kept"] == pytest.approx(6 / 23, abs=0.001)
    assert found["before"] >= 24 and found["after"] == 6 + 1 + 7
    assert nothing_is_left(engine)


def test_many_at_once_are_served_and_exact_ones_among_them_are_as_ever(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    before = engine.do("bounded")["dropped"]
    requests = [asking(prompt, 0.25, 600) for prompt in PROMPTS] + [asking(LONG), asking(SHORT)]
    found = engine.do("answers", requests=requests)
    assert [len(answer) for answer in found["tokens"]] == [600] * 4 + [60] * 2
    assert found["tokens"][4:] == exact
    assert engine.do("bounded")["dropped"] - before >= 2
    assert nothing_is_left(engine)


def test_a_context_that_frees_too_little_keeps_all(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    requests = [asking(LONG, 0.95), asking(SHORT, 0.25)]
    assert engine.do("answers", requests=requests)["tokens"] == exact


def test_exact_requests_do_not_find_what_bounded_ones_computed(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    engine.do("answers", requests=[asking(LONG, 0.25)])
    assert engine.do("answers", requests=[asking(LONG), asking(SHORT)])["tokens"] == exact


def test_preempted_requests_are_read_and_dropped_again(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    requests = [asking(prompt, 0.5, 900) for prompt in PROMPTS[:3]] + [asking(LONG, tokens=900)]
    found = engine.do("answers", requests=requests)
    assert found["preemptions"] > 0
    assert [len(answer) for answer in found["tokens"]] == [900] * 4
    assert found["tokens"][3][:60] == exact[0] and nothing_is_left(engine)


@pytest.mark.parametrize("after", [3, 8, 25])
def test_aborted_requests_leave_nothing_behind(
    engine: SparseEngine, exact: list[list[int]], after: int
) -> None:
    requests = [asking(LONG, 0.25), asking(PROMPTS[0], 0.25)]
    found = engine.do("aborted", requests=requests, after=after)
    assert found["before"]["courses"] == 2 and {name: found[name] for name in NOTHING} == NOTHING
    assert engine.do("answers", requests=[asking(LONG)])["tokens"] == exact[:1]


def test_contexts_that_arrived_as_a_whole_leave_for_host_memory_and_all_are_served_at_once(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    requests = [asking(prompt, tokens=80) for prompt in PROMPTS]
    for each in requests:
        each |= {"sparse": 0.05, "arrives": True}
    found = engine.do("answers", requests=[*requests, asking(LONG), asking(SHORT)])
    assert [len(answer) for answer in found["tokens"]] == [80] * 4 + [60] * 2
    assert found["tokens"][4:] == exact and found["preemptions"] == 0
    assert engine.do("offload")["sparse"] > 0
    assert nothing_is_left(engine)
    left = engine.do("offload")
    assert left["host_taken"] == left["host_promised"] == 0
