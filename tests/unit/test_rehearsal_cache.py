"""Step times kept for the next start: what is read back, and what costs a rehearsal instead."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from headrace_engine.meter import Step
from headrace_engine.rehearsal_cache import (
    MAX_AGE_S,
    MAX_FILES,
    machine_facts,
    read_steps,
    steps_file,
    write_steps,
)

STEPS = [Step(384, 0, 0, 0.0, 73920.0, 0.25), Step(0, 4, 0, 8.0, 0.0, 0.125)]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))


def test_the_same_engine_on_the_same_machine_reads_what_was_written() -> None:
    facts = {"model": "m", **machine_facts()}
    write_steps(steps_file(facts), STEPS)
    assert read_steps(steps_file(dict(reversed(facts.items())))) == STEPS


def test_another_option_or_machine_has_a_file_of_its_own() -> None:
    facts = {"model": "m", **machine_facts()}
    others = [{**facts, "model": "n"}, {**facts, "cpu": "another"}, {**facts, "cores": [7]}]
    assert len({steps_file(each) for each in [facts, *others]}) == 4


def test_a_missing_file_has_no_steps() -> None:
    assert read_steps(steps_file({})) == []


def test_a_file_counts_for_a_week() -> None:
    path = steps_file({})
    write_steps(path, STEPS)
    assert read_steps(path, time.time() + MAX_AGE_S - 60) == STEPS
    assert read_steps(path, time.time() + MAX_AGE_S + 60) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b"[" * 100_000,
        b'{"format": 2, "steps": []}',
        b'{"format": 1, "steps": [[1, 2]]}',
        b'{"format": 1, "steps": [[1, 0, 0, 0.0, 0.0, 0.0]]}',
        b'{"format": 1, "steps": [[1, 0, 0, -1.0, 0.0, 0.5]]}',
        b'{"format": 1, "steps": [[1, 0, 0, 0.0, 0.0, 1e9]]}',
        json.dumps({"format": 1, "steps": [[1, 0, 0, 0.0, 0.0, 0.5]] * 10_000}).encode(),
    ],
    ids=lambda content: content[:40].decode(errors="replace"),
)
def test_a_damaged_file_has_no_steps(content: bytes) -> None:
    path = steps_file({})
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert read_steps(path) == []


def test_the_oldest_files_go() -> None:
    for number in range(MAX_FILES + 3):
        path = steps_file({"number": number})
        write_steps(path, STEPS)
        os.utime(path, (number, number))
    write_steps(steps_file({"number": "last"}), STEPS)
    assert not steps_file({"number": 0}).exists()
    assert steps_file({"number": MAX_FILES}).exists()
    assert len(list(steps_file({}).parent.iterdir())) == MAX_FILES


def test_a_folder_that_cannot_be_written_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    write_steps(steps_file({}), STEPS)
    assert read_steps(steps_file({})) == []
