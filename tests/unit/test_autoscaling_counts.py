"""How many replicas a load takes, and when they are started and stopped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.autoscaling.traffic_means import KEPT, LEAST, TrafficMeans
from headrace.autoscaling.capacity import ReplicaBounds, Slo, expected_in_time, find_need, in_time
from headrace.autoscaling.forecast import STEP_S, RateForecast
from headrace.autoscaling.load_average import decayed_average
from headrace.autoscaling.replica_counts import ReplicaCosts, ReplicaCounts, decide
from headrace.disaggregation import TrafficLoad
from headrace_lab.simulate.hardware import default_steps

SLO = Slo(ttft_s=2.0, itl_s=0.05, attainment=0.95)
BOUNDS = ReplicaBounds((0, 16), (0, 16))
RISE = 6.0
"""Requests a second that four replicas are needed for."""
PRICES = ReplicaCosts(start_s=120.0, drain_s=30.0)


def load(**changes: Any) -> TrafficLoad:
    """A request a second: 0.3 s of prompt, 300 tokens of answer, 30 requests in a KV cache."""
    told: dict[str, Any] = {
        "rate": 1.0,
        "prompt_tokens": 8_000.0,
        "answer_tokens": 300.0,
        "local_s": 0.3,
        "local_square": 0.3,
        "remote_s": 0.3,
        "remote_square": 0.3,
        "move_s": 0.02,
        "steps": default_steps(),
        "most_running": 30,
    }
    return TrafficLoad(**{**told, **changes})


def sure(rate: float) -> RateForecast:
    return RateForecast(rate, 0.0)


def decided(
    now: tuple[int, int], rates: dict[float, float], bounds: ReplicaBounds = BOUNDS
) -> ReplicaCounts:
    """With a forecast of a rate from each time on."""

    def forecast(ahead_s: float) -> RateForecast:
        return sure(next(rate for from_s, rate in sorted(rates.items())[::-1] if ahead_s >= from_s))

    return decide(now, load(), forecast, SLO, PRICES, bounds)


def test_nobody_is_late_where_nobody_comes() -> None:
    assert in_time(load(rate=0.0), SLO, 1, 1) == 1.0


def test_without_decode_replicas_nothing_is_in_time() -> None:
    assert in_time(load(), SLO, 4, 0) == 0.0


def test_more_prompts_than_seconds_are_never_in_time() -> None:
    assert in_time(load(rate=8.0), SLO, 0, 1) == 0.0


def test_answers_that_fill_the_kv_caches_are_not_in_time() -> None:
    small, large = load(rate=4.0, most_running=4), load(rate=4.0)
    assert in_time(small, SLO, 4, 2) < 0.5 < in_time(large, SLO, 4, 2)


def test_decode_replicas_compute_no_more_prompts_than_the_streams_bear() -> None:
    """Prompts on the decode replicas take half of their time; a strict ITL target forbids it."""
    strict = replace(SLO, itl_s=0.02)
    both = load(rate=3.0)
    assert in_time(both, SLO, 0, 2) > 0.9 > in_time(both, strict, 0, 2)
    assert in_time(both, strict, 3, 2) > 0.95


def test_long_prompts_may_take_longer_where_the_target_says_so() -> None:
    heavy = load(local_s=3.0, remote_s=3.0, local_square=9.0, remote_square=9.0, rate=0.1)
    assert in_time(heavy, SLO, 2, 1) == 0.0
    assert in_time(heavy, replace(SLO, ttft_token_s=1e-3), 2, 1) > 0.9


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 12.0), st.integers(0, 6), st.integers(1, 6))
def test_a_replica_more_never_makes_it_much_worse(rate: float, prefill: int, decode: int) -> None:
    busy = load(rate=rate)
    here = in_time(busy, SLO, prefill, decode)
    assert 0.0 <= here <= 1.0
    assert in_time(busy, SLO, prefill + 1, decode) >= here - 0.02
    assert in_time(busy, SLO, prefill, decode + 1) >= here - 0.02


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 20.0), st.floats(0.0, 2.0))
def test_the_need_is_what_trying_all_counts_finds(rate: float, root_sd: float) -> None:
    bounds, ahead = ReplicaBounds((0, 5), (1, 5)), RateForecast(rate, root_sd)
    found = find_need(load(), ahead, SLO, bounds)
    kept = [
        p + d
        for p in range(6)
        for d in range(1, 6)
        if expected_in_time(load(), ahead, SLO, p, d) >= SLO.attainment
    ]
    assert found.total == min(kept, default=10)


def test_a_less_certain_rate_takes_no_fewer_replicas() -> None:
    sure_, unsure = (
        find_need(load(), RateForecast(4.0, sd), SLO, BOUNDS).total for sd in (0.0, 3.0)
    )
    assert sure_ <= unsure


def test_of_equal_totals_the_one_with_the_fewest_changes_is_taken() -> None:
    found = [find_need(load(), sure(4.0), SLO, BOUNDS, prefer) for prefer in ((0, 3), (1, 2))]
    assert len({one.total for one in found}) == 1
    assert (found[0].prefill, found[1].prefill) == (0, 1)


def test_replicas_are_ordered_as_far_ahead_as_a_start_takes() -> None:
    few = decided((0, 2), {0.0: 1.0, 100.0: 6.0})
    late = decided((0, 2), {0.0: 1.0, 120.0 + STEP_S + 1.0: 6.0})
    assert few.total > 2, "the rise is within a start"
    assert late.total == 2, "a replica that the next decision orders serves in time"


def test_a_replica_that_is_needed_again_before_a_start_pays_is_kept() -> None:
    """step 15 s + start 120 s + (start 120 s + drain 30 s) = 285 s."""
    kept = decided((0, 4), {0.0: 1.0, 260.0: RISE})
    gone = decided((0, 4), {0.0: 1.0, 600.0: RISE})
    assert kept.total == 4
    assert gone.total < 4


def test_a_longer_drain_makes_stopping_dearer() -> None:
    dear = replace(PRICES, drain_s=530.0)
    later = decide((0, 4), load(), lambda s: sure(RISE if s >= 600 else 1.0), SLO, dear, BOUNDS)
    assert later.total == 4


def test_all_stop_when_nobody_is_expected_and_only_then() -> None:
    """A start costs 120 s, and as long a wait, and a drain: 270 s."""
    assert decided((0, 1), {0.0: 1 / 280}).decode == 0
    assert decided((0, 1), {0.0: 1 / 260}).decode == 1
    assert decided((0, 1), {0.0: 0.0}, ReplicaBounds((0, 4), (1, 4))).decode == 1


def test_bounds_hold() -> None:
    most = decided((2, 2), {0.0: 100.0}, ReplicaBounds((1, 3), (1, 4)))
    assert (most.prefill, most.decode) == (3, 4)
    least = decided((3, 4), {0.0: 0.01}, ReplicaBounds((1, 3), (2, 4)))
    assert (least.prefill, least.decode) == (1, 2)


def test_the_reason_tells_the_rate_and_the_share() -> None:
    assert "6 requests/s in 120 s" in decided((0, 2), {0.0: 6.0}).reason


@pytest.mark.parametrize("bounds", [((0, 1), (0, 0)), ((2, 1), (1, 1)), ((-1, 1), (1, 1))])
def test_bounds_that_make_no_sense_are_refused(bounds: Any) -> None:
    with pytest.raises(ValueError, match=r"prefill|decode"):
        ReplicaBounds(*bounds)


def test_little_traffic_says_nothing_and_old_traffic_is_forgotten() -> None:
    import numpy as np

    traffic = TrafficMeans()
    row = np.array([[100.0, 10.0, 0.1, 0.2]])
    traffic.record_ended(np.repeat(row, LEAST - 1, axis=0))
    assert traffic.load(default_steps(), 1000, 0.0) is None
    traffic.record_ended(np.repeat(2 * row, 3 * KEPT, axis=0))
    told = traffic.load(default_steps(), 2100, 0.5)
    assert told is not None
    assert (told.prompt_tokens, told.answer_tokens, told.most_running) == (200.0, 20.0, 10)
    assert told.remote_square == pytest.approx(0.16)


def test_means_are_averaged_with_forgetting() -> None:
    import numpy as np

    row = np.array([[1000.0, 200.0, 0.5, 0.4]])
    traffic, other = TrafficMeans(), TrafficMeans()
    traffic.record_ended(np.repeat(row, LEAST, axis=0))
    other.record_ended(np.repeat(3 * row, LEAST, axis=0))
    one, three = (each.load(default_steps(), 330_000, 0.1) for each in (traffic, other))
    assert one is not None and three is not None
    assert decayed_average(None, one, 0.01) == one
    two = decayed_average(one, three, 0.5)
    assert (two.prompt_tokens, two.local_s, two.move_s) == (2000.0, 1.0, 0.1)
    assert two.most_running == pytest.approx(150, abs=1)
    assert decayed_average(one, three, 1.0) == three
