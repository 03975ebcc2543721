"""The online models: what they learn, forget and refuse."""

import math

import numpy as np
import pytest

from headrace.router.cost import (
    CallModel,
    RecursiveLeastSquares,
    StepTimeModel,
    TransferModel,
)

RNG = np.random.default_rng


def step_s(tokens: int, running: int, speed: float = 1.0) -> float:
    """A GPU-like machine, far from the prior."""
    return (0.012 + 0.00004 * tokens + 0.0008 * running + 1e-9 * tokens**2) / speed


def feed(model: StepTimeModel, samples: int, seed: int, speed: float = 1.0) -> None:
    rng = RNG(seed)
    for _ in range(samples):
        tokens, running = int(rng.choice([0, 0, 0, 0, 50, 500, 2000])), int(rng.integers(0, 9))
        noise = 1 + 0.05 * rng.standard_normal()
        model.observe(tokens, running, step_s(tokens, running, speed) * noise)


def test_before_any_sample_the_prior_answers() -> None:
    model = StepTimeModel()
    assert model.samples == 0
    assert model.seconds(100, 0) == pytest.approx(0.0218 + 0.075)


@pytest.mark.parametrize("tokens", [0, 50, 500, 2000])
@pytest.mark.parametrize("running", [0, 4, 8])
def test_a_hundred_steps_overrule_the_prior(tokens: int, running: int) -> None:
    model = StepTimeModel()
    feed(model, 100, seed=1)
    assert model.seconds(tokens, running) == pytest.approx(step_s(tokens, running), rel=0.08)


def test_the_step_model_follows_a_machine_that_gets_slower() -> None:
    model = StepTimeModel()
    feed(model, 500, seed=2)
    feed(model, 1500, seed=3, speed=0.5)
    for tokens in (0, 50, 500, 2000):
        assert model.seconds(tokens, 4) == pytest.approx(step_s(tokens, 4, 0.5), rel=0.1)


def test_a_thousand_decode_steps_do_not_forget_what_a_prefill_costs() -> None:
    model = StepTimeModel()
    feed(model, 300, seed=4)
    before = model.seconds(2000, 4)
    rng = RNG(5)
    for _ in range(5000):
        model.observe(0, 4, step_s(0, 4) * (1 + 0.05 * rng.standard_normal()))
    model.observe(500, 4, 1.5 * step_s(500, 4))
    assert model.seconds(2000, 4) == pytest.approx(before, rel=0.1)


def test_one_stalled_step_hardly_moves_the_fit() -> None:
    model = StepTimeModel()
    feed(model, 300, seed=6)
    before = model.seconds(500, 4)
    model.observe(500, 4, 60.0)
    assert model.seconds(500, 4) == pytest.approx(before, rel=0.1)


def test_more_tokens_are_never_predicted_to_take_less_time() -> None:
    model = StepTimeModel()
    rng = RNG(7)
    for _ in range(300):
        tokens = int(rng.integers(0, 2000))
        model.observe(tokens, 0, 1.0 - 0.0004 * tokens)
    times = [model.seconds(n, 0) for n in range(0, 4000, 100)]
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_concave_law_is_fitted_by_the_best_line_not_by_a_clipped_parabola() -> None:
    model = StepTimeModel()
    rng = RNG(8)
    for _ in range(500):
        tokens = int(rng.integers(1, 2000))
        model.observe(tokens, 0, 0.02 + 0.001 * tokens - 1e-7 * tokens**2)
    for tokens in (200, 1000, 1900):
        law = 0.02 + 0.001 * tokens - 1e-7 * tokens**2
        assert model.seconds(tokens, 0) == pytest.approx(law, rel=0.12)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_an_unusable_duration_is_ignored(seconds: float) -> None:
    step, transfer = StepTimeModel(), TransferModel()
    assert not step.observe(10, 1, seconds)
    assert not transfer.observe(1000, seconds)
    assert step.samples == transfer.samples == 0


def test_no_tokens_take_no_prefill_time() -> None:
    assert StepTimeModel().prefill_s(0, 5, 2048) == 0.0


def test_the_transfer_model_finds_latency_and_bandwidth() -> None:
    model = TransferModel()
    rng = RNG(9)
    for _ in range(200):
        size = int(rng.integers(1, 30)) * 2_949_120
        model.observe(size, (0.002 + size / 3e9) * (1 + 0.05 * rng.standard_normal()))
    found = model.to_dict()
    assert found["bytes_per_s"] == pytest.approx(3e9, rel=0.1)
    assert found["alpha_s"] == pytest.approx(0.002, rel=0.2)


def test_a_call_overhead_is_a_mean_that_forgets() -> None:
    model = CallModel(0.02, 0.05)
    for _ in range(100):
        model.observe(0.01)
    assert model.seconds() == pytest.approx(0.01, abs=0.001)
    for _ in range(200):
        model.observe(0.08)
    assert model.seconds() == pytest.approx(0.08, rel=0.05)


def test_a_call_overhead_is_never_negative() -> None:
    model = CallModel(0.02, 0.05)
    for _ in range(100):
        model.observe(-0.5)
    assert model.seconds() == 0.0


def test_a_prediction_is_never_negative() -> None:
    fit = RecursiveLeastSquares((-1.0,), (1.0,), error=1.0)
    assert fit.predict((1.0,)) == 0.0


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
