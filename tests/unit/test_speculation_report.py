"""Commands, accepted drafts by source, and the report of a replica."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace_decode.speculative.acceptance_counter import AcceptanceCounter
from headrace_decode.speculative.draft_batch import DraftSource
from headrace_decode.speculative.planning.draft_guard import ControlDraw
from headrace_decode.speculative.planning.draft_planner import DraftMode, StepRecord
from tests.unit.test_speculation_session import Engine, OneRow, propose, proposer

# Commands


def test_cap_and_mode_change_at_once() -> None:
    told = proposer(mode="static:4")
    told.bind(OneRow())
    assert told.command({"draft_cap": 1})["draft_cap"] == 1
    assert propose(told) == [[1]]
    told.command({"mode": "off"})
    assert propose(told) == [[]]
    told.command({"mode": "static:4", "draft_cap": None})
    assert propose(told) == [[1, 2, 3, 4]]


def test_a_wrong_command_changes_nothing() -> None:
    told = proposer(mode="static:4")
    with pytest.raises(ValueError, match=r"unknown \['for_s'\]"):
        told.command({"mode": "off", "for_s": 1})
    assert told.command({})["mode"] == "static"


# Counts by source


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def test_drafts_are_counted_by_source_as_far_as_the_engine_got_them() -> None:
    acceptance_counts = AcceptanceCounter()
    source = ints(DraftSource.PROMPT, DraftSource.PROMPT, DraftSource.RESPONSE, DraftSource.OUTPUT)
    acceptance_counts.record(
        source,
        limits=ints(8, 8, 8, 8),
        taken=ints(4, 2, 0, 3),
        accepted=ints(2, 3, 1, 0),
        places=np.array([0, 1, 2, -1]),
    )
    assert acceptance_counts.by_source() == {"prompt": {"drafted": 6, "accepted": 4}}


def test_a_source_that_does_not_exist_does_no_harm() -> None:
    acceptance_counts = AcceptanceCounter()
    acceptance_counts.record(ints(99), ints(8), ints(2), ints(1), np.array([0]))
    assert acceptance_counts.by_source() == {"none": {"drafted": 2, "accepted": 1}}


def test_a_session_counts_the_tokens_that_it_gave_to_the_engine() -> None:
    engine = Engine()
    assert engine.step({"a": [5]}) == {"a": [1, 2, 3, 4]}
    engine.step({"a": [1, 2, 6]}, drafted=4)
    assert engine.session.acceptance_counts.by_source() == {"none": {"drafted": 4, "accepted": 2}}


def test_drafts_that_are_only_compared_are_not_counted_as_drafted() -> None:
    engine = Engine(mode="off")
    engine.planner.mode = DraftMode.parse("auto")
    engine.session.draft_cap = 0
    for _ in range(40):
        engine.step({"a": [1]})
    assert engine.session.acceptance_counts.by_source() == {}


# Report


def test_step_times_are_reported_for_every_load_up_to_the_engines_maximum() -> None:
    step_s = proposer(mode="auto").command({})["step_s"]
    assert len(step_s) == 4  # 1, 2, 4 and 8 rows for an engine of 5
    assert step_s == sorted(step_s)


def test_figures_have_budget_price_and_regret_of_the_last_steps() -> None:
    told = proposer(mode="auto")
    for tokens in list(range(1, 33)) * 6:
        control_draw = ControlDraw(is_control=tokens == 1, probability=0.5)
        told.planner.observe(
            StepRecord(
                tokens, tokens - 1, 1, 1, 0, 0.02 + 0.001 * tokens, control_draw=control_draw
            )
        )
    report = told.command({})
    assert report["budget_tokens"] == 31
    assert report["token_s"] == pytest.approx(0.001, rel=0.3)
    assert report["saved_s"] < 0 < report["regret_bound_s"]
    assert report["counts"]["row_steps"] == report["counts"]["emitted_tokens"] == 192
