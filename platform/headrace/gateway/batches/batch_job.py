"""The state of one batch, from the check of its file to its last line. Pure.

    validating ------> in_progress ----> finalizing ----> completed
        |   |            |       |            |
        |   v            v       | time is up v
        | failed    cancelling   +--------> expired
        |                |
        +-> cancelling   +----------------> cancelled

A line has one of four marks. It gets a mark once, when its answer is kept. A batch is finalized
when all lines have marks: lines that could not be run before the time was up, or before the batch
was cancelled, are marked as not run.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec

VALIDATING, IN_PROGRESS, FINALIZING = "validating", "in_progress", "finalizing"
COMPLETED, FAILED, EXPIRED = "completed", "failed", "expired"
CANCELLING, CANCELLED = "cancelling", "cancelled"
ENDED = frozenset({COMPLETED, FAILED, EXPIRED, CANCELLED})

PENDING, ANSWERED, REFUSED, NOT_RUN = 0, 1, 2, 3
"""Marks of lines: without a result, with an answer of status 200, with an error, and not run."""


class LineFault(msgspec.Struct, frozen=True):
    """A fault of an input file.

    Attributes:
        line: counts from 1; None if it concerns the whole file.
        param: the field that is wrong, if one is.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class JobState(msgspec.Struct, frozen=True):
    """A job as it is stored.

    Attributes:
        at: Unix seconds at which each status began, by status.
        marks: a byte for each line, compressed.
        faults: the faults of the file of a failed batch.
        is_late: whether the time was up before all lines were run.
    """

    status: str
    at: dict[str, int]
    marks: bytes
    faults: list[LineFault]
    is_late: bool


class BatchJob:
    """A batch's status and the marks of its lines.

    Attributes:
        status: OpenAI's status.
        at: Unix seconds at which each status began, by status.
        faults: the faults of the file, if the batch failed.
        changes: number of changes to this object.
    """

    def __init__(self) -> None:
        self.status = VALIDATING
        self.at: dict[str, int] = {}
        self.faults: list[LineFault] = []
        self.changes = 0
        self._marks = bytearray()
        self._is_late = False

    @classmethod
    def from_state(cls, state: JobState) -> BatchJob:
        """Return the job of a stored state."""
        job = cls()
        job.status, job.at, job.faults = state.status, dict(state.at), list(state.faults)
        job._marks, job._is_late = bytearray(zlib.decompress(state.marks)), state.is_late
        return job

    def state(self) -> JobState:
        """Return the job as it is stored."""
        marks = zlib.compress(bytes(self._marks), 1)
        return JobState(self.status, dict(self.at), marks, list(self.faults), self._is_late)

    # Lines

    @property
    def total(self) -> int:
        """Number of lines; 0 until the file is checked."""
        return len(self._marks)

    @property
    def is_stopped(self) -> bool:
        """Whether no more lines are to be run: the batch is cancelled, late, or has ended."""
        return self._is_late or self.status not in (VALIDATING, IN_PROGRESS)

    @property
    def is_marked(self) -> bool:
        """Whether every line has a mark."""
        return PENDING not in self._marks

    def counts(self) -> Mapping[str, int]:
        """Return OpenAI's `request_counts`; lines that were not run are in the total only."""
        marks = self._marks
        return {
            "total": len(marks),
            "completed": marks.count(ANSWERED),
            "failed": marks.count(REFUSED),
        }

    def mark_of(self, number: int) -> int:
        """Return the mark of a line, which counts from 0."""
        return self._marks[number]

    def mark(self, number: int, mark: int) -> None:
        """Mark a line; one that has a mark keeps it.

        Raises:
            ValueError: it is no mark of a line that is done.
        """
        if mark not in (ANSWERED, REFUSED, NOT_RUN):
            raise ValueError(f"{mark} is no mark of a line that is done")
        if self._marks[number] == PENDING:
            self._marks[number] = mark
            self.changes += 1

    # Transitions

    def begin(self, total: int, at_s: int) -> None:
        """Start to run the lines, after the file was checked."""
        self._go(IN_PROGRESS, at_s, {VALIDATING})
        self._marks = bytearray(total)

    def fail(self, faults: list[LineFault], at_s: int) -> None:
        """End a batch whose file has faults, or whose key is no longer accepted."""
        self._go(FAILED, at_s, {VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING})
        self.faults = faults

    def cancel(self, at_s: int) -> bool:
        """Stop to run lines; return whether the batch could still be cancelled."""
        if self.is_stopped:
            return False
        self._go(CANCELLING, at_s, {VALIDATING, IN_PROGRESS})
        return True

    def expire(self) -> bool:
        """Stop to run lines, because the time is up; return whether lines could still be run."""
        if self.is_stopped:
            return False
        self._is_late = True
        self.changes += 1
        return True

    def finalize(self, at_s: int) -> None:
        """Begin to write the output; every line has a mark. A cancelled batch stays `cancelling`.

        Raises:
            ValueError: a line has no mark.
        """
        if not self.is_marked:
            raise ValueError("a line has no mark")
        if self.status not in (CANCELLING, FINALIZING):
            starts = {IN_PROGRESS, VALIDATING} if self._is_late else {IN_PROGRESS}
            self._go(FINALIZING, at_s, starts)

    def end(self, at_s: int) -> None:
        """End the batch, whose output is written."""
        if self.status == CANCELLING:
            self._go(CANCELLED, at_s, {CANCELLING})
        else:
            self._go(EXPIRED if self._is_late else COMPLETED, at_s, {FINALIZING})

    def _go(self, status: str, at_s: int, starts: set[str]) -> None:
        if self.status not in starts:
            raise ValueError(f"a batch that is {self.status} cannot become {status}")
        self.status = status
        self.at[status] = at_s
        self.changes += 1
