"""When drafting is switched off and on, by what steps with drafts and without them have shown."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace_decode.speculative.planning.draft_guard import (
    DECIDED,
    LONGEST,
    OFF,
    UNDECIDED,
    Guard,
    Toss,
)


def observe(
    guard: Guard, rng: np.random.Generator, gain: float, noise: float = 0.05, scatter: float = 0.3
) -> None:
    """One step, with or without drafts as chance has it; those with drafts take half as long again
    and emit so much that they gain `gain` on average."""
    toss = Toss(rng.random() < guard.share, guard.share)
    seconds = 0.1 * float(np.exp(noise * rng.normal()))
    if toss.control:
        guard.observe(toss, 1.0, seconds, 0.1)
    else:
        tokens = max(1.5 * (1.0 + gain) + scatter * float(rng.normal()), 0.5)
        guard.observe(toss, tokens, 1.5 * seconds, 0.1)


def after(gain: float, steps: int, seed: int = 0, **kind: float) -> Guard:
    guard, rng = Guard(), np.random.default_rng(seed)
    for _ in range(steps):
        observe(guard, rng, gain, **kind)
    return guard


def switch_off(guard: Guard) -> None:
    """Have it see steps that lose."""
    rng = np.random.default_rng(0)
    while guard.on:
        observe(guard, rng, -0.5)


def test_nothing_is_known_at_first_and_drafting_is_on() -> None:
    guard = Guard()
    assert guard.on
    assert guard.bounds == (-math.inf, math.inf)
    assert (guard.saved_s, guard.lost_s) == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_drafting_that_gains_stays_on(seed: int) -> None:
    for gain in (0.5, 0.1):
        assert after(gain, 2000, seed).switched_off == 0, gain


@pytest.mark.parametrize(("loss", "within"), [(0.5, 60), (0.2, 300), (0.1, 1000)])
def test_drafting_that_loses_is_switched_off_the_sooner_the_more_it_loses(
    loss: float, within: int
) -> None:
    guard, rng, steps = Guard(), np.random.default_rng(0), 0
    while guard.on and steps < 5000:
        observe(guard, rng, -loss)
        steps += 1
    assert steps <= within


def test_one_that_loses_stays_off_most_of_the_time() -> None:
    guard, rng, on = Guard(), np.random.default_rng(0), 0
    for _ in range(4000):
        observe(guard, rng, -0.3)
        on += guard.on
    assert on < 400


def test_one_that_comes_to_pay_is_switched_on_again() -> None:
    guard, rng = Guard(), np.random.default_rng(0)
    switch_off(guard)
    for _ in range(2000):
        observe(guard, rng, 0.5)
    assert guard.on
    assert guard.saved > 0.0


def test_a_slower_machine_is_no_fault_of_drafting() -> None:
    """From one step to the next all take three times as long, and the model does not know it."""
    guard, rng = Guard(), np.random.default_rng(0)
    for number in range(1500):
        toss = Toss(rng.random() < guard.share, guard.share)
        slow = 1.0 if number < 500 else 3.0
        seconds, tokens = (0.1, 1.0) if toss.control else (0.12, 1.4)
        guard.observe(toss, tokens, slow * seconds, 0.1)
    assert guard.on


def test_a_step_that_hangs_counts_as_a_few() -> None:
    guard, calm = Guard(), Guard()
    for each, seconds in ((guard, 60.0), (calm, LONGEST * 0.1)):
        each.observe(Toss(control=True, share=0.5), 1.0, seconds, 0.1)
    assert guard.saved == calm.saved


def test_controls_are_rare_where_drafting_surely_pays_and_frequent_where_nobody_knows() -> None:
    assert Guard().share == UNDECIDED
    assert after(1.0, 400).share == DECIDED
    off = Guard()
    switch_off(off)
    assert off.share == OFF


def test_what_was_saved_is_told_in_seconds() -> None:
    guard = after(0.5, 1000)
    assert guard.lost_s == 0.0
    assert guard.saved_s == pytest.approx(0.75 * 0.1 * 400, rel=0.3)
