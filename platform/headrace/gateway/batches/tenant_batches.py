"""The files and batches of one tenant, read from and written to the store.

All methods block; `BatchState` runs them in its threads. A record of another tenant is not found,
since its place follows from the tenant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.gateway.batches import refusals
from headrace.gateway.batches.batch_ids import (
    BATCH,
    BATCH_RECORD,
    CANCEL_RECORD,
    FILE,
    INDEX_BATCH,
    INDEX_FILE,
    INDEX_THREAD,
    INDEX_UNFINISHED,
    JOBS_THREAD,
    LEASE,
    OUTCOME_RECORD,
    PROGRESS_RECORD,
    index_record,
    lease_record,
    line_record,
    number_of_lease,
    number_of_line,
    parse_id,
    part_record,
)
from headrace.gateway.batches.batch_job import ENDED, JobState
from headrace.gateway.batches.batch_records import (
    WINDOW_S,
    BatchLease,
    BatchView,
    Cancellation,
    FilePart,
    JobEntry,
    LineResult,
    Outcome,
    StoredBatch,
    StoredFile,
)
from headrace.gateway.conversations.state_ids import ThreadId
from headrace.gateway.kept_records.state_runner import StateRunner
from headrace.gateway.kept_records.tenant_records import TenantRecords

PART_BYTES = 1 << 20
"""Bytes of a part of a file; the last one may be shorter."""
REMOVED_AT_ONCE = 1000

_KINDS: dict[str, type[msgspec.Struct]] = {
    BATCH_RECORD: StoredBatch,
    CANCEL_RECORD: Cancellation,
    PROGRESS_RECORD: JobState,
    OUTCOME_RECORD: Outcome,
}

BatchState = StateRunner["TenantBatches"]
"""The files and batches of one event loop."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The result of renewing a lease.

    Attributes:
        has_lease: whether the batch is still its own.
        cancelled_at: Unix seconds at which the batch was cancelled; None if it was not.
    """

    has_lease: bool
    cancelled_at: int | None = None


class LeaseLostError(Exception):
    """The error of a batch that another gateway has taken."""


class TenantBatches(TenantRecords):
    """The files and batches of a tenant."""

    # Files.

    def put_part(self, file_id: str, number: int, data: bytes) -> None:
        """Write a part of a file that is not yet listed, unless it is written."""
        self._create(_place(FILE, file_id).thread, {part_record(number): FilePart(data)})

    def add_file(self, file: StoredFile, max_bytes: int | None = None) -> None:
        """List a file, whose parts are written, unless it is listed.

        Args:
            max_bytes: maximum bytes of the tenant's files; None for no limit.

        Raises:
            ApiError: 413, there is no room for it.
        """
        if max_bytes is not None and (has := self.size_bytes()) + file.size_bytes > max_bytes:
            raise refusals.no_room(has, file.size_bytes, max_bytes)
        name = index_record(INDEX_FILE, _place(FILE, file.id))
        self._create(INDEX_THREAD, {name: file})

    def remove_parts(self, file_id: str, parts: int) -> None:
        """Remove the parts of a file that is not listed."""
        names = [part_record(number) for number in range(parts)]
        self._remove(_place(FILE, file_id).thread, names)

    def file(self, file_id: str, param: str = "file_id") -> StoredFile:
        """Return a file without its content.

        Raises:
            ApiError: 404, it is not kept.
        """
        place = parse_id(FILE, file_id)
        found = None
        if place is not None:
            found = self._one(INDEX_THREAD, index_record(INDEX_FILE, place), StoredFile)
        if found is None or found.expires_at <= self._clock():
            raise refusals.file_not_found(file_id, param)
        return found

    def files(self) -> list[StoredFile]:
        """Return all files, oldest first; those that expired are removed from the list."""
        names = [name for name in self._sizes(INDEX_THREAD) if name.startswith(INDEX_FILE)]
        found = self._read(INDEX_THREAD, names, StoredFile)
        now_s = self._clock()
        expired = [name for name, file in found.items() if file.expires_at <= now_s]
        if expired:
            self._remove(INDEX_THREAD, expired)
        files = (file for file in found.values() if file.expires_at > now_s)
        return sorted(files, key=lambda file: (file.created_at, file.id))

    def size_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size_bytes for file in self.files())

    def part(self, file_id: str, number: int) -> bytes:
        """Return a part of a file.

        Raises:
            ApiError: 404, it is not kept.
        """
        place = _place(FILE, file_id)
        found = self._one(place.thread, part_record(number), FilePart)
        if found is None:
            raise refusals.file_not_found(file_id)
        return found.data

    def delete_file(self, file_id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: 404, it is not kept; 409, an unfinished batch reads it.
        """
        file = self.file(file_id)
        for batch in self._unfinished():
            if batch.input_file_id == file_id:
                raise refusals.file_in_use(file_id, batch.id)
        self._remove(INDEX_THREAD, [index_record(INDEX_FILE, _place(FILE, file_id))])
        self.remove_parts(file_id, file.parts)

    # Batches.

    def create_batch(
        self, batch: StoredBatch, max_unfinished: int, max_bytes: int, ttl_s: float
    ) -> BatchView:
        """Keep a new batch.

        Args:
            max_unfinished: maximum number of the tenant's unfinished batches.
            max_bytes: maximum bytes of its files.
            ttl_s: seconds from now for which its input file is kept at least.

        Raises:
            ApiError: 404 or 400, its input is no such file; 429, too many are unfinished; 413,
                there is no room for its output.
        """
        file = self.file(batch.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise refusals.wrong_purpose(file.id, file.purpose)
        if len(self._unfinished()) >= max_unfinished:
            raise refusals.too_many_batches(max_unfinished)
        if (has := self.size_bytes()) >= max_bytes:
            raise refusals.no_room(has, 1, max_bytes)
        place, file_place = _place(BATCH, batch.id), _place(FILE, file.id)
        expires_at = max(file.expires_at, int(self._clock() + ttl_s))
        kept = msgspec.structs.replace(file, expires_at=expires_at)
        first = part_record(0)
        if file.parts:  # a write begins the time to live of all parts again
            self._write(file_place.thread, {first: FilePart(self.part(file.id, 0))})
        self._write(place.thread, {BATCH_RECORD: batch})
        self._write(
            INDEX_THREAD,
            {
                index_record(INDEX_FILE, file_place): kept,
                index_record(INDEX_BATCH, place): batch,
                index_record(INDEX_UNFINISHED, place): batch,
            },
        )
        return BatchView(batch)

    def batches(self) -> list[StoredBatch]:
        """Return all batches that are kept, oldest first."""
        return self._indexed(INDEX_BATCH)

    def view(self, batch_id: str) -> BatchView:
        """Return a batch.

        Raises:
            ApiError: 404, it is not kept.
        """
        place = parse_id(BATCH, batch_id)
        found = {} if place is None else self._read_kinds(place.thread, _KINDS)
        batch: StoredBatch | None = found.get(BATCH_RECORD)
        if batch is None or batch.id != batch_id:
            raise refusals.batch_not_found(batch_id)
        others = (CANCEL_RECORD, PROGRESS_RECORD, OUTCOME_RECORD)
        return BatchView(batch, *(found.get(name) for name in others))

    def remove_from_index(self, batch_id: str) -> None:
        """Remove a batch that expired from the list of batches."""
        place = _place(BATCH, batch_id)
        kinds = (INDEX_BATCH, INDEX_UNFINISHED)
        self._remove(INDEX_THREAD, [index_record(kind, place) for kind in kinds])

    def cancel(self, batch_id: str) -> BatchView:
        """Cancel a batch; the gateway that runs it stops.

        Raises:
            ApiError: 404, it is not kept; 409, it has ended.
        """
        view = self.view(batch_id)
        if view.status in ENDED:
            raise refusals.batch_ended(batch_id, view.status)
        now = Cancellation(int(self._clock()))
        self._create(_place(BATCH, batch_id).thread, {CANCEL_RECORD: now})
        return self.view(batch_id)

    # A batch that a gateway runs.

    def acquire(self, batch_id: str, owner: str, lease_s: float) -> int | None:
        """Take the lease of a batch.

        Args:
            owner: the gateway.
            lease_s: seconds for which the lease is valid.

        Returns:
            The number of the lease; None if another gateway has one.
        """
        thread = _place(BATCH, batch_id).thread
        had = self._leases(thread)
        last = max(had, default=0)
        if last:
            lease = self._one(thread, lease_record(last), BatchLease)
            if lease is not None and lease.expires_s > self._clock():
                return None
        mine = BatchLease(owner, self._clock() + lease_s)
        self._create(thread, {lease_record(last + 1): mine})
        found = self._one(thread, lease_record(last + 1), BatchLease)
        if found is None or found.owner != owner:
            return None
        if had:
            self._remove(thread, [lease_record(number) for number in had])
        return last + 1

    def lease(self, batch_id: str) -> BatchLease | None:
        """Return the lease that is in force, or was last."""
        thread = _place(BATCH, batch_id).thread
        last = max(self._leases(thread), default=0)
        return self._one(thread, lease_record(last), BatchLease) if last else None

    def beat(
        self, batch_id: str, number: int, lease: BatchLease, progress: JobState | None
    ) -> Beat:
        """Renew a lease and write the batch's progress.

        Args:
            number: that of the lease.
            lease: the lease from now on.
            progress: None if it has not changed.
        """
        thread = _place(BATCH, batch_id).thread
        if max(self._leases(thread), default=0) != number:
            return Beat(has_lease=False)
        self._write(thread, {lease_record(number): lease})
        if progress is not None:
            self._write(thread, {PROGRESS_RECORD: progress})
        cancelled = self._one(thread, CANCEL_RECORD, Cancellation)
        return Beat(has_lease=True, cancelled_at=None if cancelled is None else cancelled.at_s)

    def add_result(self, batch: StoredBatch, number: int, result: LineResult) -> LineResult:
        """Keep the result of a line, unless it has one; return the one that is kept."""
        name = line_record(number)
        if name in self._create(batch.lines_thread, {name: result}):
            return result
        return self._one(batch.lines_thread, name, LineResult) or result

    def add_results(self, batch: StoredBatch, results: Mapping[int, LineResult]) -> dict[int, int]:
        """Keep the results of lines that have none; return the marks of all of them."""
        named = {line_record(number): result for number, result in results.items()}
        written = self._create(batch.lines_thread, named)
        marks = {number: result.mark for number, result in results.items()}
        others = [name for name in named if name not in written]
        for name, result in self._read(batch.lines_thread, others, LineResult).items():
            marks[number_of_line(name)] = result.mark
        return marks

    def result_sizes(self, batch: StoredBatch) -> dict[int, int]:
        """Return the size of each kept result in bytes, by the line's number."""
        sizes = self._sizes(batch.lines_thread)
        return {number_of_line(name): size for name, size in sizes.items()}

    def results(self, batch: StoredBatch, numbers: Sequence[int]) -> dict[int, LineResult]:
        """Return kept results by the line's number."""
        names = [line_record(number) for number in numbers]
        found = self._read(batch.lines_thread, names, LineResult)
        return {number_of_line(name): result for name, result in found.items()}

    def end(self, batch_id: str, outcome: Outcome) -> None:
        """Keep the end of a batch, unless it has ended before."""
        self._create(_place(BATCH, batch_id).thread, {OUTCOME_RECORD: outcome})

    def clean(self, batch: StoredBatch) -> None:
        """Remove what an ended batch no longer needs."""
        lines = list(self._sizes(batch.lines_thread))
        for start in range(0, len(lines), REMOVED_AT_ONCE):
            self._remove(batch.lines_thread, lines[start : start + REMOVED_AT_ONCE])
        place = _place(BATCH, batch.id)
        leases = [lease_record(number) for number in self._leases(place.thread)]
        self._remove(place.thread, [PROGRESS_RECORD, *leases])
        self._remove(INDEX_THREAD, [index_record(INDEX_UNFINISHED, place)])

    # The gateways' own; only the records of `GATEWAYS` are asked for this.

    def add_job(self, entry: JobEntry) -> None:
        """List an unfinished batch for all gateways."""
        name = index_record("", _place(BATCH, entry.batch_id))
        self._write(JOBS_THREAD, {name: entry})

    def jobs(self) -> list[JobEntry]:
        """Return the unfinished batches of all tenants."""
        return list(self._read(JOBS_THREAD, list(self._sizes(JOBS_THREAD)), JobEntry).values())

    def remove_job(self, batch_id: str) -> None:
        """Remove a batch from the unfinished ones."""
        self._remove(JOBS_THREAD, [index_record("", _place(BATCH, batch_id))])

    # Internal.

    def _leases(self, thread: str) -> list[int]:
        return [number_of_lease(name) for name in self._sizes(thread) if name.startswith(LEASE)]

    def _unfinished(self) -> list[StoredBatch]:
        """Return the unfinished batches.

        Those that should long have ended do not count: their gateway died before it listed them.
        """
        since_s = self._clock() - 2 * WINDOW_S
        return [one for one in self._indexed(INDEX_UNFINISHED) if one.created_at > since_s]

    def _indexed(self, kind: str) -> list[StoredBatch]:
        names = [name for name in self._sizes(INDEX_THREAD) if name.startswith(kind)]
        found = self._read(INDEX_THREAD, names, StoredBatch).values()
        return sorted(found, key=lambda batch: (batch.created_at, batch.id))


def _place(prefix: str, given: str) -> ThreadId:
    place = parse_id(prefix, given)
    assert place is not None
    return place
