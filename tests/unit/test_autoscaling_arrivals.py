"""Counts of arrivals by step, from totals that replicas report at other times than steps end."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.autoscaling import arrivals
from headrace.autoscaling.arrivals import METRICS_DELAY_S, ArrivalCounter
from headrace.autoscaling.forecast import STEP_S
from headrace.autoscaling.replica_metrics import AGE_S, AT_S, REQUESTS

Poll = tuple[float, dict[str, tuple[float, float]]]
"""When, and by replica the requests and the seconds of its life."""


def fed(*polls: Poll) -> ArrivalCounter:
    counter = ArrivalCounter()
    for at_s, told in polls:
        metrics = {name: {REQUESTS: came, AGE_S: age_s} for name, (came, age_s) in told.items()}
        counter.record(metrics, at_s)
    return counter


def counted(*polls: Poll) -> float:
    """All that is counted of these reports, a minute after the last of them."""
    return sum(count for count, _ in fed(*polls).closed(polls[-1][0] + 60.0))


def test_a_step_is_closed_some_time_after_its_end_and_the_next_one_begins_there() -> None:
    counter = fed((100.0, {}))
    assert list(counter.closed(100.0 + STEP_S + METRICS_DELAY_S - 0.1)) == []
    ends = [end_s for _, end_s in counter.closed(100.0 + 3 * STEP_S + METRICS_DELAY_S)]
    assert ends == [100.0 + STEP_S, 100.0 + 2 * STEP_S, 100.0 + 3 * STEP_S]


def test_a_steady_replica_has_the_same_count_in_each_step_whenever_it_reports() -> None:
    """It takes its numbers every 6 s and sends them every 10 s; the policy looks every 5 s."""
    counter, counts = ArrivalCounter(), []
    for n in range(60):
        now_s = 5.0 * n
        taken_s = (now_s // 10.0 * 10.0) // 6.0 * 6.0
        counter.record({"a": {REQUESTS: 2.0 * taken_s, AT_S: taken_s}}, now_s)
        counts += [count for count, _ in counter.closed(now_s)]
    assert len(counts) > 15
    assert counts[2:] == pytest.approx([2.0 * STEP_S] * len(counts[2:]))


def test_what_was_estimated_too_high_is_missing_in_the_next_step() -> None:
    counter = ArrivalCounter()
    for now_s, came in ((0.0, 0.0), (10.0, 100.0), (20.0, 100.0), (30.0, 100.0)):
        counter.record({"a": {REQUESTS: came}}, now_s)
        if now_s == 10.0:  # 10 requests a second were seen
            counter.totals["a"].count_until(15.0)
    assert [count for count, _ in counter.closed(30.0 + METRICS_DELAY_S)] == [0.0, 0.0]


def test_a_replica_that_is_gone_is_estimated_for_some_seconds_only() -> None:
    polls: list[Poll] = [(0.0, {"a": (0.0, 900.0)}), (10.0, {"a": (10.0, 910.0)}), (600.0, {})]
    assert counted(*polls) == pytest.approx(10.0 + arrivals.AHEAD_S)


def test_a_replica_that_restarts_is_not_counted_twice_or_below_zero() -> None:
    reports = ((0.0, 1000.0), (10.0, 1030.0), (20.0, 5.0), (30.0, 10.0), (80.0, 10.0))
    assert counted(*((at_s, {"a": (came, 9000.0)}) for at_s, came in reports)) == 35.0


def test_a_new_replica_counts_from_its_first_request() -> None:
    first, then = {"a": (0.0, 900.0)}, {"a": (5.0, 930.0), "b": (7.0, 20.0)}
    still = {"a": (5.0, 980.0), "b": (7.0, 70.0)}
    assert counted((0.0, first), (30.0, then), (80.0, still)) == 12.0


def test_requests_that_wake_a_role_without_replicas_count() -> None:
    polls: list[Poll] = [
        (0.0, {}),
        (10.0, {}),
        (50.0, {"a": (5.0, 35.0)}),
        (90.0, {"a": (5.0, 75.0)}),
    ]
    assert counted(*polls) == 5.0


def test_a_replica_that_is_older_than_the_counter_counts_from_when_it_is_seen() -> None:
    """After a restart of Serve's controller replicas are recovered one after the other."""
    first, then = {"a": (1e5, 9000.0)}, {"a": (1e5 + 3, 9010.0), "b": (1e5, 9000.0)}
    later = {"a": (1e5 + 3, 9015.0), "b": (1e5 + 4, 9005.0)}
    last = {"a": (1e5 + 3, 9065.0), "b": (1e5 + 4, 9055.0)}
    assert counted((0.0, first), (10.0, then), (15.0, later), (65.0, last)) == 7.0


@pytest.mark.parametrize("life", [2_000.0, 20_000.0, 500_000.0])
def test_a_replica_that_is_missing_in_one_look_counts_only_what_is_new(life: float) -> None:
    both = {"a": (life, 9000.0), "b": (life, 9000.0)}
    back = {"a": (life + 9, 9012.0), "b": (life + 9, 9012.0)}
    last = {"a": (life + 9, 9060.0), "b": (life + 9, 9060.0)}
    polls = (0.0, both), (6.0, {"a": (life + 4, 9006.0)}), (12.0, back), (60.0, last)
    assert counted(*polls) == 18.0


def test_a_replica_that_was_missing_for_long_counts_no_more_than_a_minute_of_it() -> None:
    away: list[Poll] = [(5.0 * n, {}) for n in range(1, 361)]
    back = {"a": (3008.0, 10_805.0)}, {"a": (3008.0, 10_855.0)}
    polls = (0.0, {"a": (0.0, 9000.0)}), *away, (1805.0, back[0]), (1855.0, back[1])
    assert counted(*polls) == pytest.approx(100.0, rel=0.01)


def test_after_a_long_pause_counting_begins_again() -> None:
    counter = fed((0.0, {"a": (0.0, 900.0)}), (5000.0, {"a": (9000.0, 5900.0)}))
    assert counter.end_s == 5000.0 + STEP_S


def test_what_is_kept_of_replicas_that_left_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_REPLICAS", 8)
    counter = fed(*((float(n), {f"r{n}": (1.0, 1.0)}) for n in range(50)))
    assert len(counter.totals) == 8
    late_s = 50.0 + arrivals.REPLICA_TIMEOUT_S + 1
    counter.record({"last": {REQUESTS: 1.0, AGE_S: 1.0}}, late_s)
    assert list(counter.totals) == ["last"]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_a_number_that_no_replica_has_is_not_counted(wrong: float) -> None:
    counter = ArrivalCounter()
    counter.record({"a": {REQUESTS: 5.0}}, 0.0)
    counter.record({"a": {REQUESTS: wrong}, "b": {REQUESTS: 1.0, AT_S: -math.inf}}, 10.0)
    assert list(counter.totals) == ["a"]
    assert counter.totals["a"].requests == 5.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0.5, 30.0), st.integers(0, 200)), min_size=2, max_size=30))
def test_in_the_end_every_request_is_counted_once(reports: list[tuple[float, int]]) -> None:
    """Whatever the times of the reports, if no two are more than a minute apart."""
    at_s, came, counter = 0.0, 0.0, ArrivalCounter()
    counter.record({"a": {REQUESTS: 0.0}}, 0.0)
    total = 0.0
    for pause_s, new in [*reports, (30.0, 0), (30.0, 0), (30.0, 0)]:
        at_s, came = at_s + pause_s, came + new
        counter.record({"a": {REQUESTS: came}}, at_s)
        total += sum(count for count, _ in counter.closed(at_s))
    highest = max(new / pause_s for pause_s, new in reports)
    assert came - 1e-6 <= total <= came + highest * arrivals.AHEAD_S + 1e-6
