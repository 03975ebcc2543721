"""What the benchmark of drafting in an engine, and its simulated day, make of numbers."""

from __future__ import annotations

import pytest

from benchmarks.speculation.arms import STEP_TOKENS_MAX, arms_of, static_lengths
from benchmarks.speculation.day import Day, Oracle, Policy, a_day
from benchmarks.speculation.report import figures, table, target
from benchmarks.speculation.workloads import BLOCK, Workload

# The simulated day


def test_the_planner_comes_near_the_oracle_and_beats_every_fixed_length() -> None:
    day = Day()
    oracle, _ = a_day(Oracle(day), day, 12)
    auto, _ = a_day(Policy(day), day, 12)
    none, _ = a_day(Policy(day, mode="off"), day, 12)
    static = max(a_day(Policy(day, mode=f"static:{k}"), day, 12)[0] for k in (1, 2, 4))
    assert auto > 0.85 * oracle
    assert auto > static
    assert auto > none


def test_a_drafter_that_lies_costs_little() -> None:
    day = Day(draftable=False)
    none, _ = a_day(Policy(day, mode="off"), day, 30)
    liar, _ = a_day(Policy(day, promise=0.9), day, 30)
    believed, _ = a_day(Policy(day, promise=0.9, controls=False), day, 30)
    assert liar > 0.95 * none
    assert liar > believed


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
        ("draftable_noisy.c64.tok_s_vs_none", 0.95),
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
