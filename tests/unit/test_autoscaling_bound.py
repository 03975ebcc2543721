"""The bound on a day's GPU-seconds: no counts that keep the share cost less."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.autoscaling import causes
from benchmarks.autoscaling.bound import EACH, best_of, bound, cheapest, late_of

START_S = 120.0


@st.composite
def days(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Rates of a few minutes, and late requests a second with one to three replicas."""
    minutes = draw(st.integers(1, 5))
    rates = np.array(draw(st.lists(st.floats(0.5, 4.0), min_size=minutes, max_size=minutes)))
    shares = draw(
        st.lists(
            st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3).map(sorted),
            min_size=minutes,
            max_size=minutes,
        )
    )
    return rates, rates[:, None] * (1.0 - np.array(shares))


def paid(counts: tuple[int, ...]) -> float:
    starts = sum(max(0, b - a) for a, b in itertools.pairwise(counts))
    return 60.0 * sum(counts) + START_S * starts


def missed(counts: tuple[int, ...], late: np.ndarray) -> float:
    return 60.0 * sum(float(late[minute, count - 1]) for minute, count in enumerate(counts))


@settings(max_examples=50, deadline=None)
@given(days(), st.floats(0.1, 200.0))
def test_the_counts_that_cost_least_at_a_price_are_found(
    day: tuple[np.ndarray, np.ndarray], price: float
) -> None:
    _, late = day
    ways = itertools.product((1, 2, 3), repeat=len(late))
    best = min(paid(counts) + price * missed(counts, late) for counts in ways)
    counts, cost = cheapest(late, price, START_S)
    assert cost == pytest.approx(best)
    found = tuple(counts.tolist())
    assert paid(found) + price * missed(found, late) == pytest.approx(best)


@settings(max_examples=50, deadline=None)
@given(days(), st.floats(0.5, 0.99))
def test_no_counts_that_keep_the_share_cost_less_than_the_bound(
    day: tuple[np.ndarray, np.ndarray], share: float
) -> None:
    rates, late = day
    allowed = (1.0 - share) * 60.0 * float(rates.sum())
    ways = itertools.product((1, 2, 3), repeat=len(late))
    kept = [paid(counts) for counts in ways if missed(counts, late) <= allowed]
    if kept:
        assert bound(late, rates, share, START_S)[0] <= min(kept) * (1.0 + 1e-9)


def test_a_share_is_read_off_the_best_split_and_falls_with_the_load() -> None:
    falls = np.linspace(1.0, 0.3, len(EACH)).tolist()
    bump = [0.9] * (len(EACH) - 1) + [0.95]
    best = best_of({"0 + 2": falls, "1 + 1": bump})
    assert best == {2: pytest.approx(np.maximum(falls, 0.9).tolist())}
    late = late_of(best, np.array([0.0, 2 * EACH[0], 1000.0]))
    assert late[:, 0] == pytest.approx([0.0, 0.0, 1000.0])


def test_a_day_s_causes_are_read_off_the_same_table() -> None:
    table = {"0 + 1": [0.9] * len(EACH), "0 + 2": [0.99] * 4 + [0.8, 0.85] + [0.5] * 2}
    share = causes.measured(table)
    assert share(2 * EACH[5], 0, 2) == pytest.approx(0.8)  # never more at a higher load
    assert share(2 * EACH[0], 1, 1) == share(2 * EACH[0], 0, 2)  # a split that was not measured
    assert share(4 * EACH[0], 0, 4) == share(2 * EACH[0], 0, 2)  # more than it has
    found, asked = causes.least(lambda one: causes.Played(one, 100.0 * one, 1.0), 0.94)
    assert (found.in_time, found.gpu_hours, asked) == pytest.approx((0.94, 94.0, 0.94))
