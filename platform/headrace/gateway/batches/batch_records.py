"""The records of files and batches, as they are encrypted and stored, and as clients see them.

A batch has several records, each with one writer or with one value for ever: what was asked
(`StoredBatch`), that it was cancelled (`Cancellation`), its progress (`JobState`), its lines'
answers (`LineResult`) and its end (`Outcome`). So no gateway overwrites what another decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.gateway.batches.batch_job import (
    CANCELLED,
    CANCELLING,
    ENDED,
    IN_PROGRESS,
    BatchJob,
    JobState,
)

WINDOW, WINDOW_S = "24h", 86_400
"""The only `completion_window`, and its seconds."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file without its content.

    Attributes:
        parts: number of the records with its content.
        created_at, expires_at: Unix seconds.
        purpose: `batch`, or `batch_output`.
    """

    id: str
    filename: str
    purpose: str
    size_bytes: int
    parts: int
    created_at: int
    expires_at: int

    def document(self) -> dict[str, Any]:
        """Return the file as clients see it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FilePart(msgspec.Struct, frozen=True):
    """A part of a file's content."""

    data: bytes


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch as it was asked for.

    Attributes:
        endpoint: the route of all lines.
        metadata: the client's own, as JSON.
        created_at: Unix seconds.
        output_id, error_id: ids that its output files will have.
        lines_thread: thread of the records of its lines' answers.
        output_ttl_s: seconds for which its output files are kept.
    """

    id: str
    input_file_id: str
    endpoint: str
    metadata: bytes
    created_at: int
    output_id: str
    error_id: str
    lines_thread: str
    output_ttl_s: int

    @property
    def expires_at(self) -> int:
        """Unix seconds at which its time is up."""
        return self.created_at + WINDOW_S


class Cancellation(msgspec.Struct, frozen=True):
    """The cancellation of a batch. `at_s`: Unix seconds."""

    at_s: int


class Outcome(msgspec.Struct, frozen=True):
    """The end of a batch.

    Attributes:
        state: the job's last state.
        has_output, has_errors: whether it has the file.
    """

    state: JobState
    has_output: bool = False
    has_errors: bool = False


class LineResult(msgspec.Struct, frozen=True):
    """The result of a line. `line`: of the output file, or of the error file, with its newline."""

    mark: int
    line: bytes


class BatchLease(msgspec.Struct, frozen=True):
    """The right to run a batch.

    Attributes:
        owner: the gateway that has it.
        expires_s: Unix seconds from which another gateway may take the batch.
        lines: number of its lines in flight.
    """

    owner: str
    expires_s: float
    lines: int = 0


class JobEntry(msgspec.Struct, frozen=True):
    """An unfinished batch, for the gateways.

    Attributes:
        key_hash: hash of the API key that made it; empty if no keys are configured.
    """

    batch_id: str
    tenant: str | None
    key_hash: str


@dataclass(frozen=True, slots=True)
class BatchView:
    """All records of a batch but its lines'.

    Attributes:
        progress: None until the first gateway has run it.
        outcome: None until it has ended.
    """

    batch: StoredBatch
    cancellation: Cancellation | None = None
    progress: JobState | None = None
    outcome: Outcome | None = None

    def job(self) -> BatchJob:
        """Return the batch's last known state."""
        state = self.progress if self.outcome is None else self.outcome.state
        job = BatchJob() if state is None else BatchJob.from_state(state)
        if self.cancellation is not None and self.outcome is None:
            job.cancel(self.cancellation.at_s)
        return job

    def document(self) -> dict[str, Any]:
        """Return the batch as clients see it."""
        batch, job, outcome = self.batch, self.job(), self.outcome
        at = {status: job.at.get(status) for status in (IN_PROGRESS, "finalizing", *ENDED)}
        faults = [msgspec.to_builtins(fault) for fault in job.faults]
        output = batch.output_id if outcome is not None and outcome.has_output else None
        errors = batch.error_id if outcome is not None and outcome.has_errors else None
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": batch.input_file_id,
            "completion_window": WINDOW,
            "status": job.status,
            "output_file_id": output,
            "error_file_id": errors,
            "created_at": batch.created_at,
            "in_progress_at": at[IN_PROGRESS],
            "expires_at": batch.expires_at,
            "finalizing_at": at["finalizing"],
            "completed_at": at["completed"],
            "failed_at": at["failed"],
            "expired_at": at["expired"],
            "cancelling_at": job.at.get(CANCELLING),
            "cancelled_at": at[CANCELLED],
            "request_counts": job.counts(),
            "metadata": msgspec.Raw(batch.metadata),
        }

    @property
    def status(self) -> str:
        """OpenAI's status of the batch."""
        return self.job().status
