"""The forecast of arrivals: what it says of plain series, and that nobody's numbers break it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.autoscaling.forecast import AHEAD_S, BIN_S, STEP_S, RateForecast, RateForecaster

STEPS = round(BIN_S / STEP_S)


def fed(counts: list[float]) -> RateForecaster:
    """A forecaster that has seen counts a minute, evenly over each."""
    forecast = RateForecaster()
    for count in np.repeat(np.array(counts) / STEPS, STEPS).tolist():
        forecast.observe(count)
    return forecast


def drawn(rng: np.random.Generator, rate: float, minutes: int) -> RateForecaster:
    """A forecaster that has seen independent arrivals, so many a minute."""
    forecast = RateForecaster()
    for count in rng.poisson(rate / STEPS, minutes * STEPS).tolist():
        forecast.observe(float(count))
    return forecast


def test_nothing_seen_is_nothing_expected() -> None:
    assert RateForecaster().at_horizon(120.0).rate == 0.0


def test_a_steady_rate_is_expected_to_stay() -> None:
    forecast = fed([60.0] * 120)
    for ahead_s in AHEAD_S:
        assert forecast.at_horizon(ahead_s).rate == pytest.approx(1.0, rel=1e-6)


def test_a_steady_rise_is_expected_to_go_on_for_a_while() -> None:
    forecast = fed([60.0 + n for n in range(300)])
    expected = forecast.at_horizon(600.0).rate * BIN_S
    assert 359.0 < expected < 359.0 + 15.0


def test_noise_is_smoothed() -> None:
    rng = np.random.default_rng(0)
    steps = rng.poisson(30.0 / STEPS, (600, STEPS)).astype(float)
    counts = steps.sum(axis=1)
    forecast, wrong, naive = RateForecaster(), [], []
    for n, minute in enumerate(steps[:-2], 1):
        for count in minute:
            forecast.observe(float(count))
        if n > 200:
            said = forecast.at_horizon(120.0).rate * BIN_S
            wrong.append(abs(said - counts[n + 1]))
            naive.append(abs(minute.sum() - counts[n + 1]))
    assert np.mean(wrong) < 0.8 * np.mean(naive)


def test_a_burst_is_followed_within_a_minute_and_forgotten_after_it() -> None:
    """Traffic has been steady; then it rises tenfold in two minutes, and stays there."""
    calm, rise = [60.0] * 120, [200.0, 400.0, 600.0]
    forecast = fed(calm + rise)
    assert forecast.at_horizon(120.0).rate * BIN_S > 500.0
    after = fed(calm + rise + [600.0] * 4)
    assert after.at_horizon(120.0).rate * BIN_S == pytest.approx(600.0, rel=0.2)


def test_a_wave_of_a_quarter_of_an_hour_is_followed() -> None:
    """The rate goes from 1 to 24 requests a second and back in 900 s; its mean is 12.5."""
    rng, wrong = np.random.default_rng(0), []
    forecast = RateForecaster()

    def rate(at_s: float) -> float:
        return 12.5 - 11.5 * math.cos(2 * math.pi * at_s / 900.0)

    for n in range(1, 241):
        forecast.observe(float(rng.poisson(rate((n - 0.5) * STEP_S) * STEP_S)))
        if n > 60:
            wrong.append(forecast.at_horizon(90.0).rate - rate(n * STEP_S + 90.0))
    assert np.sqrt(np.mean(np.square(wrong))) < 5.0


def test_independent_arrivals_have_roots_with_a_deviation_of_a_half() -> None:
    forecast = drawn(np.random.default_rng(1), 200.0, 700)
    assert forecast.at_horizon(120.0).root_sd == pytest.approx(0.6, abs=0.2)


def test_a_rate_above_the_expected_is_so_by_deviations_of_the_root() -> None:
    ahead = RateForecast(rate=100.0 / BIN_S, root_sd=0.5)
    assert ahead.at(0.0) == pytest.approx(ahead.rate)
    assert ahead.at(2.0) * BIN_S == pytest.approx(121.0)
    assert ahead.at(-100.0) == 0.0


@pytest.mark.parametrize("count", [-1.0, math.inf, math.nan])
def test_a_count_that_is_none_is_refused(count: float) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        RateForecaster().observe(count)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.0, 1e9), min_size=1, max_size=120))
def test_a_forecast_is_a_number_within_what_was_seen(counts: list[float]) -> None:
    forecast = RateForecaster()
    for count in counts:
        forecast.observe(count)
    for ahead_s in AHEAD_S:
        ahead = forecast.at_horizon(ahead_s)
        assert 0.0 <= ahead.rate * STEP_S <= 40.0 * max(counts) + 1e-6
        assert math.isfinite(ahead.root_sd)


def test_memory_does_not_grow() -> None:
    forecast = fed([5.0] * 200)
    longest = max(len(each.open) for each in forecast._ahead)
    assert longest <= max(AHEAD_S) / STEP_S + STEPS
