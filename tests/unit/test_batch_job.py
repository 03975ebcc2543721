"""The state of a batch: which statuses follow which, and that a line is marked once."""

from __future__ import annotations

import pytest

from headrace.gateway.batches.batch_job import (
    ANSWERED,
    NOT_RUN,
    PENDING,
    REFUSED,
    BatchJob,
    LineFault,
)


def begun(lines: int = 3) -> BatchJob:
    job = BatchJob()
    job.begin(lines, 10)
    return job


def marks(job: BatchJob) -> list[int]:
    return [job.mark_of(number) for number in range(job.total)]


def test_a_batch_whose_lines_are_all_done_is_completed() -> None:
    job = begun()
    assert (job.status, marks(job)) == ("in_progress", [PENDING] * 3)
    for number, mark in enumerate((ANSWERED, REFUSED, ANSWERED)):
        assert not job.is_marked
        job.mark(number, mark)
    assert job.counts() == {"total": 3, "completed": 2, "failed": 1}
    job.finalize(20)
    assert job.status == "finalizing"
    job.end(30)
    assert job.status == "completed"
    assert job.at == {"in_progress": 10, "finalizing": 20, "completed": 30}


def test_a_line_keeps_its_first_mark() -> None:
    job = begun()
    job.mark(0, REFUSED)
    job.mark(0, ANSWERED)
    assert job.mark_of(0) == REFUSED
    with pytest.raises(ValueError, match="no mark"):
        job.mark(1, PENDING)


def test_a_file_with_faults_fails_the_batch() -> None:
    job = BatchJob()
    job.fail([LineFault("empty_file", "It is empty.")], 5)
    assert (job.status, job.at, job.is_stopped) == ("failed", {"failed": 5}, True)
    with pytest.raises(ValueError, match="failed"):
        job.begin(1, 6)


def test_a_cancelled_batch_ends_when_the_other_lines_are_marked_as_not_run() -> None:
    job = begun()
    job.mark(1, ANSWERED)
    assert job.cancel(12) and not job.cancel(13)
    assert (job.status, job.is_stopped) == ("cancelling", True)
    assert marks(job) == [PENDING, ANSWERED, PENDING]
    with pytest.raises(ValueError, match="no mark"):
        job.finalize(14)
    for number in (0, 2):
        job.mark(number, NOT_RUN)
    job.finalize(15)
    job.end(16)
    assert (job.status, job.at["cancelling"], job.at["cancelled"]) == ("cancelled", 12, 16)
    assert job.counts() == {"total": 3, "completed": 1, "failed": 0}


def test_a_late_batch_expires() -> None:
    job = begun(1)
    assert job.expire() and not job.expire() and not job.cancel(11)
    assert (job.status, job.is_stopped) == ("in_progress", True)
    job.mark(0, NOT_RUN)
    job.finalize(12)
    job.end(13)
    assert job.status == "expired"


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_can_be_stopped_before_its_file_is_checked(late: bool) -> None:
    job = BatchJob()
    assert job.expire() if late else job.cancel(1)
    job.finalize(2)
    job.end(3)
    assert job.status == ("expired" if late else "cancelled")
    assert job.counts()["total"] == 0


def test_a_finalizing_batch_is_not_cancelled() -> None:
    job = begun(1)
    job.mark(0, ANSWERED)
    job.finalize(2)
    assert not job.cancel(3) and not job.expire()
    job.end(4)
    assert job.status == "completed"


def test_a_stored_job_is_read_as_it_was() -> None:
    job = begun(1000)
    job.mark(500, REFUSED)
    job.expire()
    found = BatchJob.from_state(job.state())
    assert found.state() == job.state()
    assert (found.mark_of(500), found.is_stopped, found.total) == (REFUSED, True, 1000)
