"""When drafting is switched off and on, by what steps with drafts and without them have shown."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace_decode.speculative.planning.draft_guard import (
    CONTROL_WHILE_DECIDED,
    CONTROL_WHILE_OFF,
    CONTROL_WHILE_UNDECIDED,
    MAX_RATIO,
    ControlDraw,
    DraftGuard,
)


def observe(
    guard: DraftGuard,
    rng: np.random.Generator,
    gain: float,
    noise: float = 0.05,
    scatter: float = 0.3,
) -> None:
    """One step, with or without drafts as chance has it; those with drafts take half as long again
    and emit so much that they gain `gain` on average."""
    control_draw = ControlDraw(rng.random() < guard.control_probability, guard.control_probability)
    seconds = 0.1 * float(np.exp(noise * rng.normal()))
    if control_draw.is_control:
        guard.observe(control_draw, 1.0, seconds, 0.1)
    else:
        tokens = max(1.5 * (1.0 + gain) + scatter * float(rng.normal()), 0.5)
        guard.observe(control_draw, tokens, 1.5 * seconds, 0.1)


def after(gain: float, steps: int, seed: int = 0, **kind: float) -> DraftGuard:
    guard, rng = DraftGuard(), np.random.default_rng(seed)
    for _ in range(steps):
        observe(guard, rng, gain, **kind)
    return guard


def switch_off(guard: DraftGuard) -> None:
    """Have it see steps that lose."""
    rng = np.random.default_rng(0)
    while guard.is_on:
        observe(guard, rng, -0.5)


def test_a_new_guard_is_on_and_has_no_bounds() -> None:
    guard = DraftGuard()
    assert guard.is_on
    assert guard.bounds == (-math.inf, math.inf)
    assert (guard.saved_s, guard.lost_s) == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_speculation_that_gains_stays_on(seed: int) -> None:
    for gain in (0.5, 0.1):
        assert after(gain, 2000, seed).switched_off == 0, gain


@pytest.mark.parametrize(("loss", "within"), [(0.5, 60), (0.2, 300), (0.1, 1000)])
def test_speculation_that_loses_more_is_switched_off_sooner(loss: float, within: int) -> None:
    guard, rng, steps = DraftGuard(), np.random.default_rng(0), 0
    while guard.is_on and steps < 5000:
        observe(guard, rng, -loss)
        steps += 1
    assert steps <= within


def test_one_that_loses_stays_off_most_of_the_time() -> None:
    guard, rng, on = DraftGuard(), np.random.default_rng(0), 0
    for _ in range(4000):
        observe(guard, rng, -0.3)
        on += guard.is_on
    assert on < 400


def test_speculation_that_begins_to_pay_is_switched_on_again() -> None:
    guard, rng = DraftGuard(), np.random.default_rng(0)
    switch_off(guard)
    for _ in range(2000):
        observe(guard, rng, 0.5)
    assert guard.is_on
    assert guard.saved > 0.0


def test_a_slower_machine_does_not_switch_speculation_off() -> None:
    """From one step to the next all take three times as long, and the model does not know it."""
    guard, rng = DraftGuard(), np.random.default_rng(0)
    for number in range(1500):
        control_draw = ControlDraw(
            rng.random() < guard.control_probability, guard.control_probability
        )
        slow = 1.0 if number < 500 else 3.0
        seconds, tokens = (0.1, 1.0) if control_draw.is_control else (0.12, 1.4)
        guard.observe(control_draw, tokens, slow * seconds, 0.1)
    assert guard.is_on


def test_a_step_that_hangs_counts_as_a_few() -> None:
    guard, calm = DraftGuard(), DraftGuard()
    for each, seconds in ((guard, 60.0), (calm, MAX_RATIO * 0.1)):
        each.observe(ControlDraw(is_control=True, probability=0.5), 1.0, seconds, 0.1)
    assert guard.saved == calm.saved


def test_controls_are_rare_while_speculation_surely_pays_and_frequent_while_undecided() -> None:
    assert DraftGuard().control_probability == CONTROL_WHILE_UNDECIDED
    assert after(1.0, 400).control_probability == CONTROL_WHILE_DECIDED
    off = DraftGuard()
    switch_off(off)
    assert off.control_probability == CONTROL_WHILE_OFF


def test_savings_are_reported_in_seconds() -> None:
    guard = after(0.5, 1000)
    assert guard.lost_s == 0.0
    assert guard.saved_s == pytest.approx(0.75 * 0.1 * 400, rel=0.3)
