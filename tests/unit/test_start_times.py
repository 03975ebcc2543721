"""The phases of a replica's start, and the waterfall that `headrace up --verbose` makes of them."""

from __future__ import annotations

import time

import psutil

from headrace.cli.display import Step
from headrace.cli.show.start_phases import BAR_CHARS, phases, waterfall
from headrace_engine.serving.start_times import ENGINE, PROCESS, StartTimes


def test_the_first_phase_begins_with_the_process_and_each_ends_where_the_next_begins() -> None:
    times = StartTimes()
    times.begin(ENGINE)
    before = times.snapshot()
    assert before["began"] == round(psutil.Process().create_time(), 3)
    assert list(before["phases"]) == [PROCESS], "a phase that goes on has no length yet"
    times.finish()
    after = times.snapshot()
    assert list(after["phases"]) == [PROCESS, ENGINE]
    took = time.time() - after["began"]
    assert 0 <= sum(after["phases"].values()) <= took + 0.01


def test_a_replica_that_serves_keeps_its_times() -> None:
    times = StartTimes()
    times.finish()
    assert times.snapshot() == times.snapshot()


def test_a_clock_that_is_set_back_makes_no_negative_time(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    times = StartTimes()
    times.begin(ENGINE)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    times.finish()
    assert times.snapshot()["phases"][ENGINE] == 0.0


REPLICA = {
    "deployment": "decode",
    "replica_id": "abcdefghij",
    "start": {"began": 104.0, "phases": {"process": 2.0, "engine": 4.0, "step_times": 0.5}},
}


def test_a_replicas_phases_follow_one_another() -> None:
    assert list(phases([REPLICA, {"deployment": "prefill"}])) == [
        Step("decode/abcdefgh: process", 104.0, 2.0),
        Step("decode/abcdefgh: engine", 106.0, 4.0),
        Step("decode/abcdefgh: step times", 110.0, 0.5),
    ]


def test_the_waterfall_has_one_scale_and_begins_with_the_first_step() -> None:
    steps = [Step("starting Ray", 100.0, 5.0), Step("loading the engines", 105.0, 5.0)]
    half = "#" * (BAR_CHARS // 2)
    assert list(waterfall(steps)) == [
        f"  0.0 s    5.0 s  starting Ray         {half}",
        f"  5.0 s    5.0 s  loading the engines  {' ' * (BAR_CHARS // 2)}{half}",
    ]
    assert list(waterfall([])) == []


def test_a_step_of_no_length_at_the_end_is_still_seen() -> None:
    *_, last = waterfall([Step("a", 0.0, 10.0), Step("b", 10.0, 0.0)])
    assert last.endswith("b  " + " " * (BAR_CHARS - 1) + "#")
