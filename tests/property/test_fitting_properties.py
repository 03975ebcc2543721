"""Fits against the laws that made their samples, and against samples that no law makes."""

import math
import warnings

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvstore.least_squares import LinearTime, RecursiveLeastSquares

COEFFICIENT = st.floats(-5, 5)


@given(theta=st.tuples(COEFFICIENT, COEFFICIENT), seed=st.integers(0, 2**16))
@settings(max_examples=60)
def test_a_noisy_linear_law_is_recovered(theta: tuple[float, float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    fit = RecursiveLeastSquares((0.0, 0.0), (10.0, 10.0), error=1.0)
    for _ in range(600):
        x = (1.0, float(rng.uniform(-1, 1)))
        fit.update(x, theta[0] + theta[1] * x[1] + 0.1 * rng.standard_normal())
    assert np.allclose(fit.coefficients, theta, atol=0.1)


@given(seed=st.integers(0, 2**16), outlier=st.sampled_from([1e3, -1e3, 1e9]))
@settings(max_examples=30)
def test_outliers_do_not_carry_the_fit_away(seed: int, outlier: float) -> None:
    rng = np.random.default_rng(seed)
    fit = RecursiveLeastSquares((0.0, 0.0), (10.0, 10.0), error=1.0)
    for i in range(800):
        x = (1.0, float(rng.uniform(-1, 1)))
        y = 3.0 + 2.0 * x[1] + 0.1 * rng.standard_normal()
        fit.update(x, outlier if i % 50 == 49 else y)
    assert np.allclose(fit.coefficients, (3.0, 2.0), atol=0.4)


ANYTHING = st.floats(allow_nan=True, allow_infinity=True)


@given(samples=st.lists(st.tuples(ANYTHING, ANYTHING, ANYTHING), max_size=60))
@settings(max_examples=150)
def test_no_input_breaks_a_fit(samples: list[tuple[float, float, float]]) -> None:
    fit = RecursiveLeastSquares((0.0, 0.0), (1.0, 1.0), error=1.0)
    for x0, x1, y in samples:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit.update((x0, x1), y)
        assert all(map(math.isfinite, fit.coefficients))
        assert all(v >= 0 and math.isfinite(v) for v in fit.nonnegative())
        assert math.isfinite(fit.rms_error)
        assert np.linalg.eigvalsh(fit._p).min() > -1e-9


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 10)), max_size=30),
    st.floats(0, 1e9),
)
def test_no_time_is_predicted_below_zero(seen: list[tuple[float, float]], amount: float) -> None:
    time = LinearTime(0.002, 1e-9, 0.05, 2.5e-8, unit=2**26)
    for size, seconds in seen:
        time.observe(size, seconds)
    assert time.fixed_s >= 0 and time.each_s >= 0 and time.seconds(amount) >= 0
