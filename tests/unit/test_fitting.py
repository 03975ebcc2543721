"""Linear models that are fitted online: what they learn, forget and refuse."""

import math

import numpy as np
import pytest

from headrace_kvstore.least_squares import LinearTime, RecursiveLeastSquares

RNG = np.random.default_rng
MIB = 2**20


def test_a_prediction_is_never_negative() -> None:
    fit = RecursiveLeastSquares((-1.0,), (1.0,), error=1.0)
    assert fit.nonnegative() == (0.0,)


def test_the_running_error_is_the_noise() -> None:
    fit = RecursiveLeastSquares((0.0, 0.0), (10.0, 10.0), error=1.0)
    rng = RNG(10)
    for _ in range(2000):
        x = float(rng.uniform(0, 10))
        fit.update((1.0, x), 3 + 2 * x + 0.1 * rng.standard_normal())
    assert fit.rms_error == pytest.approx(0.1, rel=0.35)
    assert fit.coefficients == pytest.approx((3, 2), abs=0.1)


def test_a_sample_without_features_is_ignored() -> None:
    fit = RecursiveLeastSquares((1.0, 1.0), (1.0, 1.0), error=1.0)
    assert not fit.update((0.0, 0.0), 5.0)
    assert fit.samples == 0


def test_a_fit_needs_as_many_deviations_as_means() -> None:
    with pytest.raises(ValueError, match="same length"):
        RecursiveLeastSquares((1.0, 2.0), (1.0,), error=1.0)


def test_a_lasting_change_is_told_from_an_outlier() -> None:
    fit = RecursiveLeastSquares((0.0,), (10.0,), error=1.0)
    for _ in range(50):
        fit.update((1.0,), 2.0)
    fit.update((1.0,), 9.0)
    assert fit.coefficients == pytest.approx((2.0,), abs=0.1)
    fit.update((1.0,), 9.0)
    assert fit.coefficients == pytest.approx((9.0,), abs=0.1)


# Times


def pull() -> LinearTime:
    """2 ms and 1 GB/s, as assumed; each may be 25 times as much."""
    return LinearTime(2e-3, 1e-9, 0.05, 2.5e-8, unit=2**26)


def unknown() -> LinearTime:
    """Of which nothing is assumed."""
    return LinearTime(0.0, 0.0, 10.0, 10.0)


def test_two_sizes_tell_the_fixed_part_from_the_rest() -> None:
    time, rng = pull(), RNG(9)
    for _ in range(60):
        for size in (MIB, 64 * MIB):
            time.observe(size, (0.004 + size / 2e9) * (1 + 0.02 * rng.standard_normal()))
    assert time.fixed_s == pytest.approx(0.004, rel=0.1)
    assert 1 / time.each_s == pytest.approx(2e9, rel=0.05)
    assert time.rms_error < 0.1


def test_a_line_that_becomes_slow_is_known_as_slow_soon() -> None:
    time = pull()
    for _ in range(30):
        time.observe(64 * MIB, 0.03)
    for _ in range(3):
        time.observe(64 * MIB, 3.0)
    assert time.seconds(64 * MIB) == pytest.approx(3.0, rel=0.1)


def test_one_slow_pull_changes_little() -> None:
    time = pull()
    for _ in range(30):
        time.observe(64 * MIB, 0.03)
    time.observe(64 * MIB, 3.0)
    assert time.seconds(64 * MIB) == pytest.approx(0.03, rel=0.1)


def test_where_nothing_is_assumed_one_sample_tells_the_size_of_others() -> None:
    time = unknown()
    time.observe(10, 5.0)
    assert time.seconds(20) == pytest.approx(10.0, rel=0.1)


def test_where_nothing_is_assumed_two_samples_tell_both_parts() -> None:
    time = unknown()
    for blocks in (2, 40):
        time.observe(blocks, 1.0 + 1e-3 * blocks)
    assert time.fixed_s == pytest.approx(1.0, rel=0.02)
    assert time.each_s == pytest.approx(1e-3, rel=0.2)


def test_neither_part_is_below_zero() -> None:
    time = unknown()
    for blocks, seconds in ((1, 1.0), (10, 20.0), (20, 45.0)):
        time.observe(blocks, seconds)
    assert time.fixed_s == 0.0 and time.each_s > 1.2


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_is_left_out(seconds: float) -> None:
    time = unknown()
    assert not time.observe(1.0, seconds)
    assert time.samples == 0


def test_nothing_takes_no_time() -> None:
    assert pull().seconds(0) == 0.0
