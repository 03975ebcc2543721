"""The planner's decisions, one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace_decode.speculative.planning.draft_budget import best_draft_budget
from headrace_decode.speculative.planning.draft_planner import (
    EXPLORE_EVERY,
    DraftMode,
    DraftPlanner,
    StepLimits,
    StepLoad,
    StepRecord,
)
from headrace_engine.step_time import StepTime

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


def take(planner: DraftPlanner, rows: tuple[NDArray[np.float32], NDArray[np.int32]],
         limits: StepLimits | None = None, **load: int) -> list[int]:  # fmt: skip
    return list(
        planner.choose(StepLoad(len(rows[1]), **load), limits or StepLimits(), *rows).tolist()
    )


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
    planner, good = DraftPlanner(times=learned()), [0.7, 0.5, 0.35, 0.25]
    assert take(planner, drafts(good)) == [4]
    assert sum(take(planner, drafts(*[good] * 64))) < 64 * 2


def test_drafts_must_earn_the_fixed_cost_of_verification() -> None:
    """Of 16 rows and 0.1 s, 0.02 s are worth 3.2 tokens."""
    planner = DraftPlanner(times=dear_to_verify())
    few, many = [[0.9]] * 3, [[0.9]] * 8
    assert sum(take(planner, drafts(*few, *[[]] * 13))) == 0
    assert sum(take(planner, drafts(*many, *[[]] * 8))) == 8


def test_of_equals_the_fewest_tokens_win() -> None:
    budget = best_draft_budget(*drafts([0.0, 0.0]), np.array([1.0, 1.0, 1.0]))
    assert budget.take.tolist() == [0]


def test_a_local_maximum_does_not_hide_the_global_one() -> None:
    """The second token is dear and the third to fifth are free: a graph's next size."""
    seconds = np.array([1.0, 1.0, 1.9, 1.9, 1.9, 1.9])
    assert best_draft_budget(*drafts([0.9] * 5), seconds).take.tolist() == [5]


def test_a_survival_that_is_no_number_ends_its_draft() -> None:
    seconds = np.full(4, 1.0)
    assert best_draft_budget(*drafts([0.9, math.nan, 0.9]), seconds).take.tolist() == [1]


def test_a_row_without_a_draft_gets_none() -> None:
    assert take(DraftPlanner(times=learned()), drafts([0.9], [], [0.9])) == [1, 0, 1]


def test_prompts_go_before_drafts() -> None:
    planner, rows = DraftPlanner(times=learned()), drafts([0.9] * 8)
    limits = StepLimits(step_tokens=16)
    assert take(planner, rows, limits, prefill_tokens=12) == [3]
    assert take(planner, rows, limits, prefill_tokens=500) == [0]


def test_a_step_is_not_made_longer_than_its_tightest_target() -> None:
    planner, rows = DraftPlanner(times=learned()), drafts([0.95] * 16)
    [free] = take(planner, rows)
    [bound] = take(planner, rows, StepLimits(itl_s=BASE_S + 5.5 * TOKEN_S))
    assert free == 16
    assert bound == 4


def test_a_step_that_misses_its_target_anyway_is_made_no_longer() -> None:
    planner = DraftPlanner(times=learned())
    assert take(planner, drafts([0.95] * 4), StepLimits(itl_s=BASE_S / 2)) == [0]


def test_a_cap_from_outside_binds() -> None:
    planner = DraftPlanner(times=learned())
    assert take(planner, drafts([0.9] * 4), StepLimits(draft_tokens=2)) == [2]
    assert take(planner, drafts([0.9] * 4), StepLimits(draft_tokens=0)) == [0]


def test_static_takes_all_drafts_up_to_its_number_and_the_engines_budget() -> None:
    planner = DraftPlanner(times=learned())
    planner.mode = DraftMode.parse("static:3")
    assert take(planner, drafts([0.01] * 5, [0.01])) == [3, 1]
    assert take(planner, drafts([0.01] * 5, [0.01] * 5), StepLimits(step_tokens=6)) == [3, 1]


@pytest.mark.parametrize("text", ["", "on", "static", "static:0", "static:-1", "auto:3"])
def test_a_mode_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected auto, off or static:K"):
        DraftMode.parse(text)


# Look-ups


def test_off_makes_no_lookup() -> None:
    planner = DraftPlanner(times=learned())
    planner.mode = DraftMode.parse("off")
    assert {planner.plan_lookup(StepLoad(4), StepLimits(), 64) for _ in range(100)} == {"nothing"}


def test_lookups_are_rare_while_no_recent_draft_could_pay() -> None:
    planner = DraftPlanner(times=learned(), controls=False)
    poor = drafts(*[[0.05]] * 64)
    for _ in range(400):
        planner.record_survival(*poor)
    looks = [
        planner.plan_lookup(StepLoad(64), StepLimits(), 64 * 8) for _ in range(4 * EXPLORE_EVERY)
    ]
    assert looks.count("compare") == 4
    assert looks.count("nothing") == 4 * (EXPLORE_EVERY - 1)
    planner.record_survival(*drafts([0.9]))
    assert planner.plan_lookup(StepLoad(64), StepLimits(), 64 * 8) == "verify"


def test_without_room_there_is_no_lookup() -> None:
    planner = DraftPlanner(times=learned(), controls=False)
    assert planner.plan_lookup(StepLoad(4, prefill_tokens=8192), StepLimits(), 64) == "nothing"
    assert planner.plan_lookup(StepLoad(4), StepLimits(), 0) == "nothing"
    assert planner.plan_lookup(StepLoad(0), StepLimits(), 64) == "nothing"


# The guard


def run(planner: DraftPlanner, rows: int, chance: float, steps: int, seed: int = 0) -> int:
    """Steps whose drafts are promised at 0.9 a token and right at `chance`, one row after another;
    how many verified drafts."""
    rng, verified, load = np.random.default_rng(seed), 0, StepLoad(rows)
    for _ in range(steps):
        k, right = 0, 0
        if planner.plan_lookup(load, StepLimits(), 8 * rows) == "verify":
            budgets = planner.choose(load, StepLimits(), *drafts(*[[0.9, 0.81, 0.73]] * rows))
            k = int(budgets.sum())
            right = int((rng.random((rows, 3)) < chance).cumprod(axis=1).sum()) if k else 0
        verified += k > 0
        seconds = BASE_S + TOKEN_S * (rows + k)
        control_draw, planner.control_draw = planner.control_draw, None
        planner.observe(
            StepRecord(rows + k, k, rows, rows + right, 0, seconds, control_draw=control_draw)
        )
    return verified


def test_controls_are_random_and_rarer_once_speculation_surely_pays() -> None:
    planner = DraftPlanner(times=learned(), seed=3)
    run(planner, 2, 0.9, 100)
    before = planner.counts["control_steps"]
    assert 0 < before < 30
    run(planner, 2, 0.9, 400)
    assert planner.counts["control_steps"] - before < 20


def test_a_planner_with_a_wrong_model_stops_because_of_its_measurements() -> None:
    planner = DraftPlanner(times=learned(), seed=1)
    assert run(planner, 2, 0.0, 600) < 200
    assert not planner.guard(2).is_on
    assert planner.guard(2).switched_off >= 1


def test_a_load_that_does_not_pay_is_no_verdict_on_another() -> None:
    planner = DraftPlanner(times=learned(), seed=1)
    run(planner, 2, 0.0, 600)
    assert planner.guard(8).is_on


def test_drafts_that_become_right_are_switched_on_again() -> None:
    planner = DraftPlanner(times=learned(), seed=1)
    run(planner, 2, 0.0, 600)
    assert not planner.guard(2).is_on
    run(planner, 2, 0.95, 3000)
    assert planner.guard(2).is_on


def test_without_controls_no_step_is_left_without_drafts() -> None:
    planner = DraftPlanner(times=learned(), controls=False)
    assert run(planner, 2, 0.0, 200) == 200
    assert planner.counts["control_steps"] == 0
