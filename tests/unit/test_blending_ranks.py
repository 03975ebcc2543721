"""Selective recompute of two tensor-parallel ranks: both compute the same rows, and KV that one of
them cannot use is used by none."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from headrace_prefill.blending.engine.kv_scatter import LostKV
from headrace_prefill.blending.engine.selective_recompute import Stepped
from tests.support.blending_ranks import LAYERS, Document, Meeting, Rank, on_ranks

BLOCKS = range(3, 11)
OTHERS = range(20, 28)
DEPTH = LAYERS - 1


def half(mass: Any) -> Any:
    """The tokens that are attended to most."""
    total = mass.sum(0)
    return np.where(total >= np.median(total), DEPTH, 0)


def all_tokens(_: Any) -> Any:
    return np.full(5 + 32 + 8, DEPTH)


def outcome(steps: list[Stepped]) -> tuple[list[list[str]], list[list[str]]]:
    return [each.finished for each in steps], [each.failed for each in steps]


def finished(steps: list[Stepped]) -> set[str]:
    return {name for step in steps for name in step.finished}


def failed(steps: list[Stepped]) -> set[str]:
    return {name for step in steps for name in step.failed}


def computed(meeting: Meeting) -> list[Any]:
    return [told for what, told in meeting.log if what == "compute"]


def test_both_ranks_choose_by_the_attention_of_all_heads() -> None:
    masses: list[list[Any]] = [[], []]

    def task(rank: Rank) -> Any:
        chosen = []

        def choose(mass: Any) -> Any:
            masses[rank.number].append(mass)
            chosen.append(half(mass))
            return chosen[0]

        rank.start("a", Document(1, 4), BLOCKS, choose, last=5 + 32)
        return rank.run(50), chosen

    (one, two), meeting = on_ranks(task)
    assert outcome(one[0]) == outcome(two[0]) and finished(one[0]) == {"a"}
    assert (one[1][0] == two[1][0]).all()
    mine = [told for what, told in meeting.log if what == "mean"]
    assert not np.allclose(mine[0], masses[0][0]), "the other rank's heads attend otherwise"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("budget", [1, 7, 1000])
def test_a_part_that_one_rank_cannot_verify_stops_both(rank: int, budget: int) -> None:
    damaged, whole = Document(1, 4), Document(2, 4)
    damaged.damage(2, rank)

    def task(mine: Rank) -> Any:
        mine.start("damaged", damaged, BLOCKS, all_tokens)
        mine.start("whole", whole, OTHERS, all_tokens)
        return mine.run(budget)

    (one, two), meeting = on_ranks(task)
    assert outcome(one) == outcome(two)
    assert (failed(one), finished(one)) == ({"damaged"}, {"whole"})
    rows = [position for positions, _ in computed(meeting) for position in positions]
    assert sorted(rows) == list(range(5 + 32 + 8)), "no row of the damaged one was computed"


@pytest.mark.parametrize("error", [LostKV("evicted"), MemoryError("of this rank alone")])
def test_a_request_that_one_rank_cannot_start_or_choose_for_stops_both(error: Exception) -> None:
    def task(mine: Rank) -> Any:
        def lost() -> Any:
            raise error

        def choose(mass: Any) -> Any:
            return half(mass) if mine.number else lost()

        if mine.number:
            mine.recompute.start("not started", lost)
        else:
            mine.start("not started", Document(1, 4), BLOCKS, all_tokens)
        mine.start("not chosen", Document(2, 4), BLOCKS, choose, last=5 + 32)
        mine.start("whole", Document(3, 4), OTHERS, all_tokens)
        return mine.run(10)

    (one, two), _ = on_ranks(task)
    assert outcome(one) == outcome(two)
    assert (failed(one), finished(one)) == ({"not started", "not chosen"}, {"whole"})


def test_a_request_without_rows_to_compute_ends_once_all_ranks_have_placed_its_runs() -> None:
    damaged = Document(2, 4)
    damaged.damage(3, 1)

    def task(mine: Rank) -> Any:
        def none(_: Any) -> Any:
            return np.zeros(5 + 32)

        mine.start("placed", Document(1, 4), BLOCKS, none, outside=False)
        mine.start("damaged", damaged, OTHERS, none, outside=False)
        return mine.run(20)

    (one, two), meeting = on_ranks(task)
    assert outcome(one) == outcome(two) and not computed(meeting)
    assert (failed(one), finished(one)) == ({"damaged"}, {"placed"})


def test_a_rank_that_is_late_is_waited_for() -> None:
    def task(mine: Rank) -> Any:
        def choose(mass: Any) -> Any:
            time.sleep(0.3 * mine.number)
            return half(mass)

        mine.start("a", Document(1, 4), BLOCKS, choose, last=5 + 32)
        mine.start("b", Document(2, 4), OTHERS, all_tokens)
        return mine.run(12)

    (one, two), _ = on_ranks(task)
    assert outcome(one) == outcome(two) and finished(one) == {"a", "b"}


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_on_either_rank_both_do_the_same(seed: int) -> None:
    """Requests of several kinds, which start and are cancelled at any step; `Meeting` sees that
    what the ranks compute and compare is the same."""
    draw = random.Random(seed)
    documents = [Document(seed * 10 + n, 2 + n % 3) for n in range(6)]
    wrong = {n: draw.randrange(2) for n in range(6) if draw.random() < 0.5}
    kinds = [draw.choice(["damaged", "start", "choose"]) for _ in range(6)]
    starts = sorted(draw.randrange(8) for _ in range(6))
    budgets = [draw.choice([1, 5, 40, 300]) for _ in range(400)]
    cancelled = {draw.randrange(20): str(draw.randrange(6)) for _ in range(2)}
    probes = [draw.random() < 0.5 for _ in range(6)]
    for n, rank in wrong.items():
        if kinds[n] == "damaged":
            documents[n].damage(1, rank)

    def task(mine: Rank) -> Any:
        def fails(n: int, kind: str) -> bool:
            return wrong.get(n) == mine.number and kinds[n] == kind

        def begin(n: int) -> None:
            def choose(mass: Any) -> Any:
                if fails(n, "choose"):
                    raise ValueError("not on this rank")
                return np.full(length + 13, DEPTH) if mass is None else half(mass)

            def lost() -> Any:
                raise LostKV("not on this rank")

            length = documents[n].tokens
            if fails(n, "start"):
                mine.recompute.start(str(n), lost)
            else:
                blocks = range(1 + 8 * n, 9 + 8 * n)
                last = 5 + length if probes[n] else None
                mine.start(str(n), documents[n], blocks, choose, last)

        steps, dropped = [], set()
        for number, budget in enumerate(budgets):
            for n in range(6):
                if starts[n] == number:
                    begin(n)
            name = cancelled.get(number, "")
            if mine.recompute.cancel(name):
                dropped.add(name)
            steps.append(mine.recompute.step(budget))
        assert not len(mine.recompute)
        return steps, dropped

    (one, two), _ = on_ranks(task)
    assert outcome(one[0]) == outcome(two[0]) and one[1] == two[1]
    ended = finished(one[0]) | failed(one[0]) | one[1]
    assert ended == {str(n) for n in range(6)}
    assert failed(one[0]) | one[1] == {str(n) for n in wrong} | one[1]
