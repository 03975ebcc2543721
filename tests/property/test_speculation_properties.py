"""The planner's budget against all possible ones, and the price curve against its promises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace_decode.speculative.planning.draft_budget import best_draft_budget
from headrace_decode.speculative.planning.draft_planner import DraftPlanner, StepLimits, StepLoad
from headrace_decode.speculative.session import kv_headroom
from headrace_engine.step_time import pairs_of

PLACES = 3
Batch = tuple[NDArray[np.float32], NDArray[np.int32]]


@st.composite
def batches(draw: st.DrawFn, rows_max: int = 4) -> Batch:
    """Survivals [n, PLACES] that do not increase along a row, and lengths [n]."""
    rows = draw(st.integers(1, rows_max))
    chance = st.floats(0, 1, width=32)
    survival = np.array(
        [sorted((draw(chance) for _ in range(PLACES)), reverse=True) for _ in range(rows)],
        np.float32,
    )
    lengths = np.array([draw(st.integers(0, PLACES)) for _ in range(rows)], np.int32)
    return survival, lengths


@st.composite
def prices(draw: st.DrawFn, tokens: int = 12) -> NDArray[np.float64]:
    """Seconds of steps with 0 to `tokens` draft tokens: non-decreasing, with steps and plateaus."""
    rises = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 1.0, 7.0]), min_size=tokens,
                          max_size=tokens))  # fmt: skip
    return draw(st.floats(0.5, 20)) + np.concatenate([[0.0], np.cumsum(rises)])


def every_choice(lengths: NDArray[np.int32]) -> itertools.product[tuple[int, ...]]:
    return itertools.product(*(range(int(length) + 1) for length in lengths))


def tokens_per_second(
    survival: NDArray[np.float32], take: tuple[int, ...], seconds: NDArray[np.float64]
) -> float:
    extra = sum(float(survival[row, :k].sum(dtype=np.float64)) for row, k in enumerate(take))
    return (len(take) + extra) / float(seconds[sum(take)])


@settings(max_examples=300)
@given(batches(), prices(), st.integers(0, 12))
def test_the_budget_is_the_best_of_all_choices(
    batch: Batch, seconds: NDArray[np.float64], room: int
) -> None:
    survival, lengths = batch
    budget = best_draft_budget(survival, lengths, seconds[: room + 1])
    best = max(
        tokens_per_second(survival, take, seconds)
        for take in every_choice(lengths)
        if sum(take) <= room
    )
    assert (budget.take <= lengths).all()
    assert int(budget.take.sum()) <= room
    chosen = tuple(budget.take.tolist())
    assert tokens_per_second(survival, chosen, seconds) == pytest.approx(best, rel=1e-9)
    assert budget.expected_tokens / budget.seconds == pytest.approx(best, rel=1e-9)


@settings(max_examples=100)
@given(batches(), prices())
def test_no_draft_pays_where_the_bound_says_so(batch: Batch, seconds: NDArray[np.float64]) -> None:
    survival, lengths = batch
    room = len(seconds) - 1
    bound = np.full((1, room), survival.max(), np.float32)
    if best_draft_budget(bound, np.array([room], np.int32), seconds, len(lengths)).take[0] == 0:
        assert int(best_draft_budget(survival, lengths, seconds).take.sum()) == 0


@settings(max_examples=100)
@given(
    batches(rows_max=8),
    st.integers(0, 20),
    st.integers(0, 40),
    st.one_of(st.none(), st.integers(0, 10)),
    st.floats(0.001, 0.2),
)
def test_a_budget_keeps_to_every_limit(
    batch: Batch, spare: int, prefill: int, cap: int | None, itl_s: float
) -> None:
    survival, lengths = batch
    rows = len(lengths)
    load = StepLoad(rows, prefill_tokens=prefill)
    limits = StepLimits(step_tokens=rows + prefill + spare, itl_s=itl_s, draft_tokens=cap)
    planner = DraftPlanner(controls=False)
    taken = int(planner.choose(load, limits, survival, lengths).sum())
    assert taken <= spare
    assert cap is None or taken <= cap
    step_s = planner.times.seconds(prefill, rows, taken, 0, pairs_of(0, prefill))
    assert taken == 0 or step_s <= itl_s


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3)), min_size=1, max_size=6),
    st.integers(0, 8),
    st.integers(1, 40),
)
def test_drafts_never_ask_for_more_kv_blocks_than_are_free(
    rows: list[tuple[int, int]], free: int, draft_tokens: int
) -> None:
    block = 16
    num_tokens = np.array([n for n, _ in rows])
    blocks = -(-num_tokens // block) + np.array([spare for _, spare in rows])
    room = kv_headroom(num_tokens, [blocks], [block], free, draft_tokens)
    take = np.full(len(rows), draft_tokens) if room is None else np.minimum(room, draft_tokens)
    needed = np.maximum(-(-(num_tokens + take) // block) - blocks, 0)
    assert int(needed.sum()) <= free
