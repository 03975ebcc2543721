"""The drafting benchmark's replay: what counts as a query, as drafted and as accepted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.draft_memory import isolation
from benchmarks.draft_memory.arms import Ours
from benchmarks.draft_memory.corpora import Exchange
from benchmarks.draft_memory.replay import EQUAL, MOST, Outcome, at_equal_drafts, replay


class Oracle:
    """Knows the answer; its drafts are right up to `right` tokens and `length` long."""

    def __init__(self, answer: NDArray[np.int32], length: int, right: int) -> None:
        self.answer, self.length, self.right = answer, length, right
        self.seen: list[int] = []
        self.verdicts: list[tuple[int, int]] = []

    def open(self, prompt: NDArray[np.int32]) -> None:
        self.seen = []

    def extend(self, tokens: NDArray[np.int32]) -> None:
        self.seen += tokens.tolist()

    def draft(self, context: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        assert context[-len(self.seen) :].tolist() == self.seen
        ahead = self.answer[len(self.seen) :][: min(self.length, most)].copy()
        ahead[self.right :] = -7
        return ahead

    def verified(self, offered: int, accepted: int) -> None:
        self.verdicts.append((offered, accepted))

    def close(self) -> None:
        assert self.seen == self.answer.tolist()


def exchange(count: int) -> Exchange:
    return Exchange(np.arange(5, dtype=np.int32), np.arange(100, 100 + count, dtype=np.int32))


def test_without_drafts_every_token_but_the_first_is_a_query() -> None:
    one = exchange(10)
    assert replay(Oracle(one.answer, 0, 0), [one]) == Outcome(9, 0, 0)


def test_each_step_accepts_the_right_beginning_and_one_token_more() -> None:
    one = exchange(10)
    arm = Oracle(one.answer, 4, 2)
    assert replay(arm, [one]) == Outcome(3, 11, 6)
    assert arm.verdicts == [(4, 2), (4, 2), (3, 2)]


def test_a_draft_reaches_no_further_than_the_answer_and_the_limit() -> None:
    one = exchange(MOST + 12)
    arm = Oracle(one.answer, 1000, 1000)
    assert replay(arm, [one]) == Outcome(2, MOST + 10, MOST + 10)
    assert arm.verdicts == [(MOST, MOST), (10, 10)]


def test_an_answer_is_in_the_memory_of_those_behind_it() -> None:
    alone, twice = (replay(Ours(0.02), [exchange(60)] * n) for n in (1, 2))
    assert alone.accepted == 0
    assert twice.accepted > 40


def test_at_equal_drafts_about_as_much_is_drafted_as_asked_for() -> None:
    exchanges = [exchange(60)] * 8
    most = replay(Ours(0.02), exchanges).drafted
    outcome, arm, floor = at_equal_drafts(Ours, exchanges, most // 2)
    assert 0 < outcome.drafted <= (1 + EQUAL) * (most // 2)
    assert arm.memory.settings.floor == floor


def test_between_two_floors_the_outcome_is_their_mix() -> None:
    exchanges = [exchange(60)] * 3
    sparse, dense = (replay(Ours(floor), exchanges) for floor in (0.999, 0.0))
    wanted = (sparse.drafted + dense.drafted) // 2

    def make(floor: float) -> Ours:
        return Ours(0.0 if floor < 0.3 else 0.999)

    outcome, _, floor = at_equal_drafts(make, exchanges, wanted)
    assert outcome.drafted == wanted and floor >= 0.3
    assert sparse.accepted <= outcome.accepted <= dense.accepted


def test_isolation_finds_the_owners_drafts_and_no_others_changed() -> None:
    each = [np.arange(1000 * at, 1000 * at + 48, dtype=np.int32) for at in range(12)]
    figures = isolation.measure([Exchange(text[:5], text) for text in each], trials=2)
    assert figures["isolation.drafts_changed"] == 0
    assert figures["isolation.owner_tokens_drafted"] == isolation.ROWS * isolation.DRAFT_TOKENS
