"""Reading our own latency out of /metrics."""

import math

import pytest

from benchmarks.serving.prometheus import histogram

PAGE = """\
# HELP ray_headrace_planning_seconds Seconds to make a plan.
# TYPE ray_headrace_planning_seconds histogram
ray_headrace_planning_seconds_bucket{Component="a",le="0.001"} 2.0
ray_headrace_planning_seconds_bucket{Component="a",le="0.002"} 6.0
ray_headrace_planning_seconds_bucket{Component="a",le="+Inf"} 8.0
ray_headrace_planning_seconds_sum{Component="a"} 0.02
ray_headrace_planning_seconds_count{Component="a"} 8.0
ray_headrace_planning_seconds_bucket{le="0.001",Component="b"} 2.0
ray_headrace_planning_seconds_bucket{le="0.002",Component="b"} 2.0
ray_headrace_planning_seconds_bucket{le="+Inf",Component="b"} 2.0
ray_headrace_planning_seconds_sum{Component="b"} 0.001
ray_headrace_planning_seconds_other_bucket{le="+Inf"} 99.0
"""
NAME = "ray_headrace_planning_seconds"


def test_a_histogram_is_summed_over_its_label_sets() -> None:
    known = histogram(PAGE, NAME)
    assert known.counts == {0.001: 4, 0.002: 8, math.inf: 10}
    assert known.count == 10
    assert known.mean == pytest.approx(0.0021)


def test_quantiles_lie_within_their_bucket() -> None:
    known = histogram(PAGE, NAME)
    assert known.quantile(0.2) == pytest.approx(0.0005)
    assert known.quantile(0.5) == pytest.approx(0.00125)
    assert known.quantile(0.99) == 0.002  # in the last bucket: at least its lower bound


def test_only_what_came_since_counts() -> None:
    known = histogram(PAGE, NAME)
    assert known.since(histogram("", NAME)).count == 10
    assert known.since(known).count == 0
    assert math.isnan(known.since(known).quantile(0.5))


def test_what_is_not_there_is_empty() -> None:
    assert histogram(PAGE, "nothing").count == 0
