"""A real vLLM engine serves contexts that are longer than its KV cache.

Its steps are scheduled ahead (vLLM's default), the harder case for what is freed when.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace_decode.attention.page_counts import MIN_TOKENS
from tests.support.prompts import noise
from tests.support.sparse_engine import SparseEngine
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BLOCKS, BATCH = 11, 256
POOL_TOKENS = (BLOCKS - 1) * 128
LONG = noise(4 * POOL_TOKENS, 30)
PROMPTS = [noise(MIN_TOKENS + 200 + 8 * n, 40 + n) for n in range(8)]
SHORT = noise(500, 60)
NOTHING = {"held": 0, "host_taken": 0, "host_promised": 0, "taken": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[SparseEngine]:
    """The only one of this file."""
    longest = 4 * POOL_TOKENS + 256
    engine = SparseEngine(tiny_llama(), offload_gib=1, blocks=BLOCKS, longest=longest, batch=BATCH)
    try:
        yield engine
    finally:
        engine.end()


@pytest.fixture(scope="module")
def exact(engine: SparseEngine) -> list[list[int]]:
    """Answers of exact requests: the long one, and the short one."""
    found: list[list[int]] = engine.do(
        "answers", requests=[asking(LONG), asking(SHORT, tokens=150)]
    )["tokens"]
    return found


def asking(prompt: list[int], share: float | None = None, tokens: int = 12) -> dict[str, Any]:
    return {"tokens": prompt, "max_tokens": tokens, "sparse": share}


def nothing_is_left(engine: SparseEngine) -> bool:
    """Whether all memory is free; a worker learns of the last end with the next step."""
    engine.do("answers", requests=[asking(SHORT[:64], tokens=2)])
    found = engine.do("offload")
    return {name: found[name] for name in NOTHING} == NOTHING


def test_exact_requests_are_plain_torchs_at_four_times_the_cache(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    assert engine.do("greedy", tokens=LONG, answer=exact[0])
    assert engine.do("greedy", tokens=SHORT, answer=exact[1])
    found = engine.do("offload")
    assert found["staged"] > 0 and found["sparse"] == 0


def test_a_share_of_one_answers_as_an_exact_request(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    assert engine.do("answers", requests=[asking(LONG, 1.0)])["tokens"] == [exact[0]]


def test_eight_at_once_are_served_and_exact_ones_among_them_are_as_ever(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    before = engine.do("offload")["sparse"]
    requests = [asking(prompt, 0.05, 40) for prompt in PROMPTS] + [asking(SHORT, tokens=150)]
    found = engine.do("answers", requests=requests)
    assert [len(answer) for answer in found["tokens"]] == [40] * 8 + [150]
    assert found["tokens"][8] == exact[1]
    assert engine.do("offload")["sparse"] - before > 8 * 30
    assert nothing_is_left(engine)


def test_requests_that_are_preempted_are_right_and_end(
    engine: SparseEngine, exact: list[list[int]]
) -> None:
    requests = [asking(SHORT, tokens=450), asking(PROMPTS[0], 0.03, 400), asking(LONG)]
    found = engine.do("answers", requests=requests)
    assert found["preemptions"] > 0
    assert found["tokens"][0][:150] == exact[1] and found["tokens"][2] == exact[0]
    assert len(found["tokens"][1]) == 400 and nothing_is_left(engine)


@pytest.mark.parametrize("after", [4, 30])
def test_aborted_requests_leave_nothing_behind(
    engine: SparseEngine, exact: list[list[int]], after: int
) -> None:
    requests = [asking(LONG, None, 60), asking(PROMPTS[1], 0.05, 60)]
    found = engine.do("aborted", requests=requests, after=after)
    assert found["before"]["held"] > 0 and {name: found[name] for name in NOTHING} == NOTHING
    assert engine.do("answers", requests=[asking(LONG)])["tokens"] == [exact[0]]
