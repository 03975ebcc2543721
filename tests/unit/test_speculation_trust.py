"""How far drafts are believed, and what the benchmark and its simulator make of numbers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from benchmarks.speculation.arms import STEP_TOKENS_MAX, arms_of, static_lengths
from benchmarks.speculation.day import Oracle, Policy, Static, a_day
from benchmarks.speculation.report import figures, table, target
from benchmarks.speculation.workloads import BLOCK, Workload
from headrace_decode.speculation.calibrate import calibrate_steps
from headrace_decode.speculation.request import CALIBRATION_LENGTHS, facts_of
from headrace_decode.speculation.trust import MOST, SUREST, Kept, Trust

PROMISED = np.array([[0.9, 0.81, 0.729]], np.float32)


def test_a_promise_that_is_kept_is_believed() -> None:
    trust, own = Trust(), Kept()
    for _ in range(20):
        trust.learn(own, 3 * 0.9, 3 * 0.9)
    assert trust.believed(PROMISED, [own]) == pytest.approx(PROMISED)


def test_a_promise_that_is_broken_is_believed_less_from_the_first_time_on() -> None:
    trust, own = Trust(), Kept()
    trust.learn(own, 0.9, 0.0)
    first = trust.believed(PROMISED, [own])[0]
    assert first[0] < 0.8 * PROMISED[0, 0]
    assert first[2] / PROMISED[0, 2] == pytest.approx((first[0] / PROMISED[0, 0]) ** 3, rel=1e-4)
    for _ in range(10):
        trust.learn(own, 0.9, 0.0)
    assert trust.believed(PROMISED, [own])[0, 0] < 0.25


def test_one_requests_lies_are_not_held_against_others_that_keep_their_word() -> None:
    trust, liar, honest = Trust(), Kept(), Kept()
    for _ in range(20):
        trust.learn(liar, 0.9, 0.0)
        trust.learn(honest, 0.9, 0.9)
    believed = trust.believed(np.repeat(PROMISED, 2, axis=0), [liar, honest])
    assert believed[1, 0] > 0.8 > 0.25 > believed[0, 0]


def test_a_request_that_betters_itself_is_believed_again() -> None:
    trust, own = Trust(), Kept()
    for _ in range(20):
        trust.learn(own, 0.9, 0.0)
    for _ in range(40):
        trust.learn(own, 0.9, 1.0)
    assert trust.believed(PROMISED, [own])[0, 0] > 0.85


def test_one_that_keeps_more_than_it_promised_is_believed_somewhat_more() -> None:
    trust, own = Trust(), Kept()
    for _ in range(50):
        trust.learn(own, 0.1, 1.0)
    modest = np.array([[0.5, 0.25, 0.0]], np.float32)
    assert trust.believed(modest, [own]) == pytest.approx(
        np.array([[0.5 * MOST, 0.25 * MOST**2, 0.0]])
    )
    assert trust.believed(PROMISED, [own]) == pytest.approx(SUREST ** np.array([[1, 2, 3]]))
    certain = np.ones((1, 3), np.float32)
    assert trust.believed(certain, [own]) == pytest.approx(certain)


# The simulated day


def test_over_a_day_the_planner_is_near_one_who_knows_all_and_better_than_any_fixed_length() -> (
    None
):
    oracle, _ = a_day(Oracle(), 12)
    auto, _ = a_day(Policy(), 12)
    none, _ = a_day(Policy(auto=False), 12)
    static = max(a_day(Static(k), 12)[0] for k in (1, 2, 4))
    assert auto > 0.85 * oracle
    assert auto > static
    assert auto > none


# The benchmark


def test_arms_are_those_that_may_win_somewhere() -> None:
    assert arms_of("plain", "draftable", 4) == {"plain": None}
    assert list(arms_of("headrace", "draftable", 1)) == [
        "off", "auto", "static2", "static4", "static8", "static16",
    ]  # fmt: skip
    for concurrency in (1, 16, 32, 64):
        for k in static_lengths("draftable", concurrency):
            assert concurrency * (1 + k) <= STEP_TOKENS_MAX


def slices(*rates: float) -> list[dict[str, float]]:
    return [{"tokens": rate * 2.0, "seconds": 2.0, "steps": 4.0} for rate in rates]


def test_a_cells_ratios_are_those_of_all_slices_together() -> None:
    found = figures(
        "draftable",
        8,
        {
            "plain": slices(10, 10),
            "off": slices(9, 11),
            "auto": slices(18, 22),
            "static2": slices(14, 14),
            "static4": slices(16, 16),
            "ngram": slices(15, 15),
        },
    )
    at = "draftable.c8"
    assert found[f"{at}.auto.tok_s"] == 20.0
    assert found[f"{at}.tok_s_vs_none"] == 2.0
    assert found[f"{at}.tok_s_vs_best_static_k"] == 1.25
    assert found[f"{at}.tok_s_vs_ngram"] == pytest.approx(20 / 15)
    assert f"{at}.tok_s_vs_suffix" not in found
    assert "| draftable | 8 | 20.0 |" in table(found)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("draftable.c1.tok_s_vs_none", 1.7),
        ("draftable.c8.tok_s_vs_none", 1.2),
        ("draftable.c64.tok_s_vs_none", 1.0),
        ("draftable.c16.tok_s_vs_none", 0.97),
        ("undraftable.c1.tok_s_vs_none", 0.97),
        ("undraftable.c4.tok_s_vs_best_static_k", 0.95),
        ("draftable.c4.tok_s_vs_suffix", 1.0),
        ("draftable.c4.auto.tok_s", None),
    ],
)
def test_targets(name: str, least: float | None) -> None:
    assert target(name) == least


@pytest.mark.parametrize("name", ["draftable", "undraftable"])
def test_prompts_are_the_same_for_all_arms_and_begin_with_whole_blocks(name: str) -> None:
    def encode(text: str) -> list[int]:
        return [ord(character) % 997 for character in text[::3]]

    one, other = Workload(name, encode), Workload(name, encode)
    prompts = [one.prompt(number, number // 12) for number in range(40)]
    assert prompts[7] == other.prompt(7, 0)
    assert prompts[::-1] == [other.prompt(number, number // 12) for number in reversed(range(40))]
    assert {len(document) % BLOCK for document in one.documents} == {0}
    assert len({tuple(prompt) for prompt in prompts}) > 10


# Calibration


def test_calibration_runs_every_length_at_several_loads_and_survives_failure() -> None:
    asked: list[tuple[int, str]] = []

    async def generate(
        prompt: list[int], extra: dict[str, Any], tokens: int, name: str
    ) -> AsyncGenerator[None, None]:
        assert facts_of(len(prompt), tokens, extra).calibrates
        assert max(prompt) < 100
        assert tokens > len(CALIBRATION_LENGTHS)
        asked.append((tokens, name))
        if name.startswith("calibrate-drafts-4"):
            raise RuntimeError("a bug")
        yield None

    asyncio.run(calibrate_steps(generate, 4, 100))
    assert len(asked) == len({name for _, name in asked}) == 5
