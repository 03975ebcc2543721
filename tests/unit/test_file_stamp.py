"""Files that are read again: at once after a change, later again after a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.config.file_stamp import FIRST_RETRY_S, MAX_RETRY_S, ReloadSchedule, stamp_of
from tests.support.clock import Clock


def test_contents_that_were_read_are_not_due() -> None:
    schedule = ReloadSchedule("a", Clock())
    assert not schedule.is_due("a") and not schedule.is_stale
    assert schedule.is_due("b")
    schedule.record_success("b")
    assert not schedule.is_due("b") and not schedule.is_stale


def test_a_failed_read_is_due_again_later_and_each_time_later() -> None:
    clock = Clock()
    schedule = ReloadSchedule("a", clock)
    wait_s = FIRST_RETRY_S
    for _ in range(10):
        schedule.record_failure("b")
        assert schedule.is_stale and not schedule.is_due("b")
        clock.now_s += wait_s
        assert schedule.is_due("b")
        wait_s = min(2 * wait_s, MAX_RETRY_S)


def test_a_further_change_after_a_failure_is_due_at_once() -> None:
    schedule = ReloadSchedule("a", Clock())
    schedule.record_failure("b")
    assert schedule.is_due("c")


def test_a_change_that_is_undone_leaves_nothing_stale() -> None:
    schedule = ReloadSchedule("a", Clock())
    schedule.record_failure("b")
    assert not schedule.is_due("a") and not schedule.is_stale


def test_a_change_of_mode_alone_changes_the_stamp(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    before = stamp_of(file)
    file.chmod(0o640)
    assert stamp_of(file) != before
    os.unlink(file)
    assert stamp_of(file) is None


@pytest.mark.parametrize("missing_first", [True, False])
def test_a_file_that_comes_and_goes_is_a_change(missing_first: bool) -> None:
    there, missing = (1, 2, 3, 4), None
    first, then = (missing, there) if missing_first else (there, missing)
    assert ReloadSchedule(first, Clock()).is_due(then)
