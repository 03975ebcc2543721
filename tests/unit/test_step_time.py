"""The step-time model: what it learns from an engine's steps, and what it predicts before any."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from headrace_engine.step_time import StepTime, pairs_of

RNG = np.random.default_rng


def gpu_s(prompt: int, rows: int, speed: float = 1.0) -> float:
    """A machine far from the prior."""
    return (0.012 + 0.00004 * prompt + 0.0002 * rows + 1e-9 * prompt**2) / speed


def feed(model: StepTime, samples: int, seed: int, speed: float = 1.0) -> StepTime:
    rng = RNG(seed)
    for _ in range(samples):
        prompt, rows = int(rng.choice([0, 0, 0, 0, 50, 500, 2000])), int(rng.integers(0, 9))
        noise = 1 + 0.05 * rng.standard_normal()
        model.observe(prompt, rows, 0, 0, pairs_of(0, prompt), gpu_s(prompt, rows, speed) * noise)
    return model


def fresh_s(model: StepTime, prompt: int, rows: int) -> float:
    return model.seconds(prompt, rows, 0, 0, pairs_of(0, prompt))


def decode(seed: int = 0, noise: float = 0.0, steps: int = 200, factor: float = 1.0) -> StepTime:
    """A model that has seen 20 ms + 1 ms a row at 1 to 64 rows."""
    rng, model = RNG(seed), StepTime()
    for _ in range(steps):
        rows = int(rng.integers(1, 65))
        model.observe(0, rows, 0, 0, 0, factor * (0.02 + 0.001 * rows) * (1 + noise * rng.normal()))
    return model


def dear_to_verify(steps: int = 400, rows: int = 16) -> StepTime:
    """A model that has seen steps of so many rows, every other with 1 to 8 drafts, which make a
    step a fifth longer and cost 1 % a token."""
    rng, model = RNG(0), StepTime()
    for number in range(steps):
        count = int(rng.integers(1, 9)) if number % 2 else 0
        model.observe(0, rows, count, 0, 0, 0.12 + 0.001 * count if count else 0.1)
    return model


# Learning


def test_before_any_step_the_prior_answers() -> None:
    model = StepTime()
    assert model.samples == 0
    assert model.seconds(96) == pytest.approx(0.0218 + 0.00075 * 96)


@pytest.mark.parametrize("prompt", [0, 50, 500, 2000])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_a_few_hundred_steps_overrule_the_prior(prompt: int, rows: int) -> None:
    model = feed(StepTime(), 300, seed=1)
    shape = prompt, rows, 0, 0, pairs_of(0, prompt)
    assert model.seconds(*shape) == pytest.approx(gpu_s(prompt, rows), rel=0.1)


def test_a_machine_that_halves_its_speed_is_followed_within_ten_steps() -> None:
    model = feed(feed(StepTime(), 500, seed=2), 10, seed=3, speed=0.5)
    for prompt in (0, 50, 500, 2000):
        assert fresh_s(model, prompt, 4) == pytest.approx(gpu_s(prompt, 4, 0.5), rel=0.25)


def test_500_steps_after_the_speed_halved_decode_steps_are_within_1_percent() -> None:
    errors = []
    for seed in range(8):
        model = feed(feed(StepTime(), 500, seed), 500, seed + 50, speed=0.5)
        errors += [model.seconds(0, rows) / gpu_s(0, rows, 0.5) - 1 for rows in (1, 2, 4, 8)]
    assert np.mean(np.abs(errors)) < 0.01


def test_what_was_measured_at_sizes_that_are_not_met_any_more_is_kept() -> None:
    """Steps are flat up to 64 tokens and dear beyond: a quiet night must not make one forget."""
    model = StepTime()
    for rows in (1, 8, 32, 64, 96, 128, 192, 256):
        for _ in range(3):
            model.observe(0, rows, 0, 0, 0, 0.02 + 0.001 * max(rows - 64, 0))
    rng = RNG(0)
    for _ in range(2000):
        model.observe(0, int(rng.integers(1, 9)), 0, 0, 0, 0.02)
    assert model.seconds(0, 128) == pytest.approx(0.084, rel=0.1)
    assert model.seconds(0, 256) == pytest.approx(0.212, rel=0.1)


def test_a_thousand_decode_steps_do_not_forget_what_a_prefill_costs() -> None:
    model = feed(StepTime(), 300, seed=4)
    before, rng = fresh_s(model, 2000, 4), RNG(5)
    for _ in range(3000):
        model.observe(0, 4, 0, 0, 0, gpu_s(0, 4) * (1 + 0.05 * rng.standard_normal()))
    assert fresh_s(model, 2000, 4) == pytest.approx(before, rel=0.1)


def test_one_stalled_step_hardly_moves_the_fit() -> None:
    model = feed(StepTime(), 300, seed=6)
    before = fresh_s(model, 500, 4)
    model.observe(500, 4, 0, 0, pairs_of(0, 500), 60.0)
    assert fresh_s(model, 500, 4) == pytest.approx(before, rel=0.1)


def test_a_straight_line_is_learned_and_continued() -> None:
    model = decode(noise=0.03)
    for rows in (1, 16, 64):
        assert model.seconds(0, rows) == pytest.approx(0.02 + 0.001 * rows, rel=0.05)
    assert model.seconds(0, 128) == pytest.approx(0.148, rel=0.15)


def test_a_bend_that_no_line_has_is_found() -> None:
    """Flat up to 16 tokens, then dear: a memory-bound step that becomes compute-bound."""
    rng, model = RNG(0), StepTime()
    for _ in range(600):
        rows = int(rng.integers(1, 65))
        model.observe(0, rows, 0, 0, 0, 0.02 + 0.002 * max(rows - 16, 0))
    for rows, seconds in ((2, 0.02), (16, 0.02), (32, 0.052), (64, 0.116)):
        assert model.seconds(0, rows) == pytest.approx(seconds, rel=0.2)


def test_a_token_of_context_and_a_pair_have_prices_of_their_own() -> None:
    """As on a CPU: a row reads its KV for one token, a prompt's tokens read it together."""
    rng, model = RNG(0), StepTime()
    for _ in range(800):
        prompt = int(rng.choice([0, 0, 64, 512]))
        rows, context = int(rng.integers(1, 33)), int(rng.integers(0, 60_000))
        pairs = prompt * int(rng.integers(prompt, 4000)) if prompt else 0
        seconds = 0.02 + 0.0006 * prompt + 0.001 * rows + 3e-6 * context + 4e-7 * pairs
        model.observe(prompt, rows, 0, context, pairs, seconds)
    context_s = model.seconds(0, 8, 0, 50_000) - model.seconds(0, 8)
    assert context_s == pytest.approx(0.15, rel=0.05)
    pair_s = model.seconds(512, pairs=10**6) - model.seconds(512)
    assert pair_s == pytest.approx(0.4, rel=0.05)


def test_how_far_predictions_were_off_of_late_is_told() -> None:
    assert decode(noise=0.0).relative_error < 0.05
    assert decode(noise=0.1).relative_error == pytest.approx(0.1, rel=0.5)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_not_learned(seconds: float) -> None:
    assert not StepTime().observe(4, 1, 0, 0, 0, seconds)


def test_a_step_that_computes_nothing_is_not_learned() -> None:
    assert not StepTime().observe(0, 0, 0, 0, 0, 0.1)
    assert not StepTime().observe(-1, 3, 0, 0, 0, 0.1)
    assert not StepTime().observe(math.nan, 3, 0, 0, 0, 0.1)


# Drafts


def test_what_verifying_costs_however_little_is_verified_is_told_apart() -> None:
    model = dear_to_verify()
    assert model.seconds(0, 16) == pytest.approx(0.1, rel=0.02)
    for drafts in (1, 4, 8):
        assert model.seconds(0, 16, drafts) == pytest.approx(0.12 + 0.001 * drafts, rel=0.03)


def test_where_steps_with_drafts_were_never_measured_those_without_tell() -> None:
    model = decode()
    for tokens in (8, 32):
        assert model.seconds(0, 1, tokens - 1) == pytest.approx(model.seconds(0, tokens), rel=0.02)


def test_a_machine_that_becomes_faster_does_not_leave_the_price_of_drafts_behind() -> None:
    """Drafting that does not pay is not measured: its price must follow that of other steps."""
    model = dear_to_verify()
    for _ in range(300):
        model.observe(0, 16, 0, 0, 0, 0.05)
    assert model.seconds(0, 16, 1) < 0.07


def test_each_number_of_drafts_is_priced_as_by_itself() -> None:
    model = dear_to_verify()
    many = model.seconds_each(np.arange(40), 30, 16, 4000, 500)
    assert many == pytest.approx([model.seconds(30, 16, k, 4000, 500) for k in range(40)])


def test_what_is_padded_costs_what_the_padding_costs() -> None:
    model = StepTime(padded_sizes=(1, 8, 16))
    assert model.seconds(0, 9) == model.seconds(0, 16) > model.seconds(0, 8)
    assert model.seconds(0, 17) > model.seconds(0, 16)
    assert model.seconds_each(np.array([0, 1, 7, 8]), 0, 9).tolist() == pytest.approx(
        [model.seconds(0, 9, k) for k in (0, 1, 7, 8)]
    )


# Prompts


def test_no_tokens_take_no_prefill_time() -> None:
    assert StepTime().prefill_s(0, step_tokens=2048, rows=5) == 0.0


def test_a_prompt_longer_than_a_step_pays_each_step() -> None:
    model = feed(StepTime(), 200, seed=1)
    pairs = pairs_of(0, 1000)
    steps = 2 * model.seconds(400, 3, 0, 900, 0.4 * pairs) + model.seconds(
        200, 3, 0, 900, 0.2 * pairs
    )
    found = model.prefill_s(1000, pairs, step_tokens=400, rows=3, context=900)
    assert found == pytest.approx(steps)


def test_what_tokens_add_to_a_step_leaves_the_step_out() -> None:
    model = StepTime()
    assert model.added_s(0, 0) == 0.0
    assert model.added_s(128, 0) == pytest.approx(0.00075 * 127)


@pytest.mark.parametrize(("base_s", "token_s"), [(0.05, 0.002), (0.012, 0.00004), (0.02, 0.0006)])
def test_the_tokens_that_are_as_dear_as_a_step_are_found(base_s: float, token_s: float) -> None:
    model = StepTime()
    for tokens in (1, 10, 30, 100, 300, 1000) * 10:
        model.observe(tokens, 0, 0, 0, 0, base_s + token_s * tokens)
    assert model.free_tokens() == pytest.approx(base_s / token_s, rel=0.1)


# Telling others


def test_another_process_prices_with_the_numbers_that_it_is_told() -> None:
    model = feed(StepTime((1, 2, 4, 8, 16)), 200, seed=1)
    told = StepTime.from_dict(json.loads(json.dumps(model.to_dict())))
    for shape in ((0, 1, 0, 0, 0), (0, 9, 4, 5000, 0), (700, 3, 0, 900, 10**6)):
        assert told.seconds(*shape) == model.seconds(*shape)
    assert (told.samples, told.relative_error) == (model.samples, model.relative_error)


def test_a_fit_that_was_told_can_go_on_learning() -> None:
    told = StepTime.from_dict(feed(StepTime(), 200, seed=1).to_dict())
    feed(told, 100, seed=2, speed=0.5)
    assert told.seconds(0, 4) == pytest.approx(gpu_s(0, 4, 0.5), rel=0.05)
    assert told.samples > 200


@pytest.mark.parametrize(
    "change",
    [
        {"state": [0.0]},
        {"state": None},
        {"state": [math.nan] * 62},
        {"state": [1e3] * 62},
        {"square": math.inf},
        {"samples": -1},
        {"padded_sizes": "no"},
    ],
)
def test_numbers_that_are_no_fit_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not the state of a step-time model"):
        StepTime.from_dict({**StepTime().to_dict(), **change})


def test_people_are_shown_a_line() -> None:
    shown = decode(noise=0.02).summary()
    assert shown["base_s"] == pytest.approx(0.02, rel=0.2)
    assert shown["samples"] == 200


def test_a_prompt_of_one_token_costs_what_a_row_does() -> None:
    model = StepTime()
    one = model.prefill_s(1, 2000, step_tokens=512, rows=3, context=500)
    assert one == model.seconds(0, 4, 0, 2500)


@pytest.mark.parametrize("padded", [(), (1, 2, 4, 8, 16, 32)])
@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.022, 0.0265, 0.04, 0.2, 30.0])
def test_the_most_rows_within_a_time_are_those_of_which_one_more_takes_longer(
    padded: tuple[int, ...], seconds: float
) -> None:
    model = StepTime(padded)
    rows = model.rows_within(seconds)
    assert rows == 0 or model.seconds(rows=rows) <= seconds
    assert model.seconds(rows=rows + 1) > seconds or model.seconds(rows=rows) == 0
