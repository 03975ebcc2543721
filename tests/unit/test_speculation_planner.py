"""The planner's decisions, one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace_decode.speculation.budget import best_budget, can_pay
from headrace_decode.speculation.planner import (
    LOOK_EVERY,
    Limits,
    Load,
    Mode,
    Planner,
    Step,
)
from headrace_decode.speculation.regret import Controls, Credit, Ledger
from headrace_engine.steptime import StepTime

BASE_S, TOKEN_S = 0.02, 0.001


def learned(seed: int = 0, noise: float = 0.0, steps: int = 200) -> StepTime:
    """A model that has seen `BASE_S + TOKEN_S n` at 1 to 64 tokens."""
    rng, model = np.random.default_rng(seed), StepTime()
    for _ in range(steps):
        rows = int(rng.integers(1, 65))
        seconds = (BASE_S + TOKEN_S * rows) * (1 + noise * rng.normal())
        model.observe(0, rows, 0, 0, 0, seconds)
    return model


def drafts(*rows: list[float]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    width = max(map(len, rows))
    survival = np.zeros((len(rows), width), np.float32)
    for row, values in enumerate(rows):
        survival[row, : len(values)] = values
    return survival, np.array([len(row) for row in rows], np.int32)


def take(planner: Planner, rows: tuple[NDArray[np.float32], NDArray[np.int32]],
         limits: Limits | None = None, **load: int) -> list[int]:  # fmt: skip
    return list(planner.choose(Load(len(rows[1]), **load), limits or Limits(), *rows).tolist())


def dear_to_verify(steps: int = 400, rows: int = 16) -> StepTime:
    """A model that has seen steps of so many rows, every other with 1 to 8 drafts, which make a
    step a fifth longer and cost 1 % a token."""
    rng, model = np.random.default_rng(0), StepTime()
    for number in range(steps):
        if number % 2:
            count = int(rng.integers(1, 9))
            model.observe(0, rows, count, 0, 0, 0.12 + 0.001 * count)
        else:
            model.observe(0, rows, 0, 0, 0, 0.1)
    return model


# Budgets


def test_alone_a_row_drafts_deep_and_in_a_crowd_it_does_not() -> None:
    planner, good = Planner(times=learned()), [0.7, 0.5, 0.35, 0.25]
    assert take(planner, drafts(good)) == [4]
    assert sum(take(planner, drafts(*[good] * 64))) < 64 * 2


def test_drafts_must_earn_what_verifying_them_costs_beyond_their_tokens() -> None:
    """Of 16 rows and 0.1 s, 0.02 s are worth 3.2 tokens."""
    planner = Planner(times=dear_to_verify())
    few, many = [[0.9]] * 3, [[0.9]] * 8
    assert sum(take(planner, drafts(*few, *[[]] * 13))) == 0
    assert sum(take(planner, drafts(*many, *[[]] * 8))) == 8


def test_of_equals_the_fewest_tokens_win() -> None:
    budget = best_budget(*drafts([0.0, 0.0]), np.array([1.0, 1.0, 1.0]))
    assert budget.take.tolist() == [0]


def test_a_gain_too_small_to_be_believed_is_left() -> None:
    seconds, likely = np.array([1.0, 1.5]), drafts([0.52])
    assert best_budget(*likely, seconds).take.tolist() == [1]
    assert best_budget(*likely, seconds, least_gain=0.02).take.tolist() == [0]
    assert can_pay(0.52, seconds, 1.0, 1)
    assert not can_pay(0.52, seconds, 1.0, 1, least_gain=0.02)


def test_a_local_maximum_does_not_hide_the_global_one() -> None:
    """The second token is dear and the third to fifth are free: a graph's next size."""
    seconds = np.array([1.0, 1.0, 1.9, 1.9, 1.9, 1.9])
    assert best_budget(*drafts([0.9] * 5), seconds).take.tolist() == [5]


def test_a_survival_that_is_no_number_ends_its_draft() -> None:
    seconds = np.full(4, 1.0)
    assert best_budget(*drafts([0.9, math.nan, 0.9]), seconds).take.tolist() == [1]


def test_a_row_without_a_draft_gets_none() -> None:
    assert take(Planner(times=learned()), drafts([0.9], [], [0.9])) == [1, 0, 1]


def test_prompts_go_before_drafts() -> None:
    planner, rows = Planner(times=learned()), drafts([0.9] * 8)
    limits = Limits(step_tokens=16)
    assert take(planner, rows, limits, prefill_tokens=12) == [3]
    assert take(planner, rows, limits, prefill_tokens=500) == [0]


def test_a_step_is_not_made_longer_than_its_tightest_target() -> None:
    planner, rows = Planner(times=learned()), drafts([0.95] * 16)
    [free] = take(planner, rows)
    [bound] = take(planner, rows, Limits(itl_s=BASE_S + 5.5 * TOKEN_S))
    assert free == 16
    assert bound == 4


def test_a_step_that_misses_its_target_anyway_is_made_no_longer() -> None:
    planner = Planner(times=learned())
    assert take(planner, drafts([0.95] * 4), Limits(itl_s=BASE_S / 2)) == [0]


def test_a_cap_from_outside_binds() -> None:
    planner = Planner(times=learned())
    assert take(planner, drafts([0.9] * 4), Limits(draft_tokens=2)) == [2]
    assert take(planner, drafts([0.9] * 4), Limits(draft_tokens=0)) == [0]


def test_static_takes_what_there_is_up_to_its_number_and_the_engines_budget() -> None:
    planner = Planner(times=learned())
    planner.mode = Mode.parse("static:3")
    assert take(planner, drafts([0.01] * 5, [0.01])) == [3, 1]
    assert take(planner, drafts([0.01] * 5, [0.01] * 5), Limits(step_tokens=6)) == [3, 1]


@pytest.mark.parametrize("text", ["", "on", "static", "static:0", "static:-1", "auto:3"])
def test_a_mode_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected auto, off or static:K"):
        Mode.parse(text)


# Whether to look at all


def test_off_looks_nothing_up() -> None:
    planner = Planner(times=learned())
    planner.mode = Mode.parse("off")
    assert {planner.looks(Load(4), Limits(), 64) for _ in range(100)} == {"nothing"}


def test_where_no_recent_draft_could_pay_drafts_are_looked_at_now_and_then_only() -> None:
    planner = Planner(times=learned(), controls=False)
    poor = drafts(*[[0.05]] * 64)
    for _ in range(400):
        planner.saw(*poor)
    looks = [planner.looks(Load(64), Limits(), 64 * 8) for _ in range(4 * LOOK_EVERY)]
    assert looks.count("compare") == 4
    assert looks.count("nothing") == 4 * (LOOK_EVERY - 1)
    planner.saw(*drafts([0.9]))
    assert planner.looks(Load(64), Limits(), 64 * 8) == "verify"


def test_no_room_no_look() -> None:
    planner = Planner(times=learned(), controls=False)
    assert planner.looks(Load(4, prefill_tokens=8192), Limits(), 64) == "nothing"
    assert planner.looks(Load(4), Limits(), 0) == "nothing"
    assert planner.looks(Load(0), Limits(), 64) == "nothing"


def test_some_steps_go_without_drafts_at_random_and_few_once_their_cost_is_known() -> None:
    planner = Planner(times=learned(), seed=3)
    ledger = planner.ledger(4)
    for _ in range(20):
        ledger.controls.observe(0.024, 0.024)
    looks = [planner.looks(Load(4), Limits(), 64) for _ in range(2000)]
    assert 0.005 < 1 - looks.count("verify") / len(looks) < 0.05


def test_the_more_drafting_saves_the_fewer_steps_go_without() -> None:
    planner = Planner(times=learned(), seed=3)
    ledger = planner.ledger(4)
    assert drafted(ledger, 3.0, 400) == 400
    looks = [planner.looks(Load(4), Limits(), 64) for _ in range(2000)]
    assert 0 < 1 - looks.count("verify") / len(looks) < 1 / 64 / 3


# Whether drafting pays


def drafted(ledger: Ledger, gain: float, steps: int, seed: int = 0, scatter: float = 0.3) -> int:
    """Steps of one second without drafts whose tokens per second differ by `gain`; how many there
    were until the ledger switched off, or all."""
    rng = np.random.default_rng(seed)
    for number in range(steps):
        seconds = float(1.5 * (1 + 0.05 * rng.normal()))
        emitted = 1.5 * (1 + gain) + scatter * rng.normal()
        ledger.drafted_step(1000 * emitted, 1000, seconds, 1.5, 1.0)  # type: ignore[arg-type]
        if number % 20 == 0:
            ledger.controls.observe(float(1 + 0.05 * rng.normal()), 1.0)
        if not ledger.on:
            return number + 1
    return steps


@pytest.mark.parametrize("seed", range(5))
def test_drafting_that_gains_or_does_no_harm_stays_on(seed: int) -> None:
    for gain in (0.5, 0.05, 0.0):
        ledger = Ledger()
        assert drafted(ledger, gain, 3000, seed) == 3000, gain
        assert ledger.on


@pytest.mark.parametrize(("loss", "within"), [(0.5, 60), (0.2, 150), (0.05, 700)])
def test_drafting_that_loses_is_switched_off_the_sooner_the_more_it_loses(
    loss: float, within: int
) -> None:
    ledger = Ledger()
    assert drafted(ledger, -loss, 5000) <= within
    assert ledger.switched_off == 1


def test_a_switch_off_is_followed_by_ever_longer_pauses_and_shorter_trials() -> None:
    ledger = Ledger()
    first = drafted(ledger, -0.5, 1000)
    pauses = []
    for _ in range(4):
        pause = 0
        while not ledger.on:
            ledger.idle_step()
            pause += 1
        pauses.append(pause)
        assert drafted(ledger, -0.5, 1000) < first / 2
    assert pauses == [32, 64, 128, 256]


def test_a_trial_that_succeeds_starts_the_pauses_anew() -> None:
    ledger = Ledger()
    drafted(ledger, -0.5, 1000)
    while not ledger.on:
        ledger.idle_step()
    assert drafted(ledger, 0.5, 300) == 300
    drafted(ledger, -0.9, 1000)
    pause = 0
    while not ledger.on:
        ledger.idle_step()
        pause += 1
    assert pause == 32


def test_the_regret_bound_falls_to_nothing_where_drafting_pays() -> None:
    ledger = Ledger()
    drafted(ledger, 0.5, 500)
    assert ledger.gain == pytest.approx(0.5, abs=0.1)
    assert ledger.regret_bound == 0.0


def test_who_does_not_keep_what_he_promises_loses_his_credit_within_some_steps() -> None:
    honest, liar = Credit(), Credit()
    assert honest.share == 1.0
    for _ in range(30):
        honest.book(0.03, 0.03, 1.0)
        liar.book(0.03, -0.02, 1.0)
    assert honest.share == 1.0
    assert liar.share == 0.1
    for _ in range(1500):
        liar.forget()
    assert liar.share > 0.8


def test_a_run_of_bad_luck_where_luck_decides_costs_little_credit() -> None:
    """Alone: one draft in ten comes true, as promised, and saves a whole step."""
    credit = Credit()
    for number in range(20):
        credit.book(0.06, 0.95 if number in (0, 19) else -0.05, 1.0)
        assert credit.share > 0.5
    unlucky = Credit()
    for _ in range(10):
        unlucky.book(0.06, -0.05, 1.0)
    assert 0.1 < unlucky.share < 0.5


def test_half_of_what_was_promised_is_half_the_credit_where_much_was_promised() -> None:
    credit = Credit()
    for _ in range(100):
        credit.book(1.0, 0.5, 1.0)
    assert credit.share == pytest.approx(0.5, abs=0.05)


def test_small_gains_that_did_not_come_are_left_and_great_ones_are_tried_again() -> None:
    planner, small = Planner(times=dear_to_verify(), controls=False), drafts(*[[0.45]] * 16)
    assert sum(take(planner, small)) > 0
    assert 0.01 < planner.promised < 0.1
    verified = 0
    for _ in range(200):
        k = sum(take(planner, small))
        verified += k > 0
        promised, step_s = (planner.promised, 0.12 + 0.001 * k) if k else (0.0, 0.1)
        planner.observe(Step(16 + k, k, 16, 16, 0, step_s, promised=promised))
    assert 0 < verified < 20
    assert sum(take(planner, drafts(*[[0.9, 0.8]] * 16))) > 0


def test_without_a_step_to_compare_with_doubt_remains() -> None:
    unknown, known = Controls(), Controls()
    for _ in range(50):
        known.observe(1.1, 1.0)
    assert known.mean == pytest.approx(1.1)
    assert known.variance_of_mean < unknown.variance_of_mean / 10


def test_a_planner_whose_model_is_wrong_stops_by_what_it_measures() -> None:
    """Survivals are promised at 0.9 and are 0: the budget believes them, the ledger does not."""
    planner, good = Planner(times=learned(), seed=1), drafts([0.9] * 8, [0.9] * 8)
    verified = 0
    for _ in range(600):
        load = Load(2)
        k = 0
        if planner.looks(load, Limits(), 16) == "verify":
            k = int(planner.choose(load, Limits(), *good).sum())
        verified += k > 0
        planner.observe(Step(2 + k, k, 2, 2, 0, BASE_S + TOKEN_S * (2 + k)))
    assert verified < 150
    assert planner.ledger(2).switched_off >= 1
