"""One batch, run by the gateway that has its lease: checked, its lines sent, its output written.

Nothing is done twice that a client could see. A line's result is created, never replaced, so its
first result is the one in the output. The output is written after every line has a result, and
follows from the results, so two gateways that write it write the same bytes; it is created, too. A
gateway that lost its lease stops; what it still creates changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from headrace.gateway.batches.batch_job import (
    ANSWERED,
    CANCELLING,
    ENDED,
    NOT_RUN,
    PENDING,
    REFUSED,
    VALIDATING,
    BatchJob,
    LineFault,
)
from headrace.gateway.batches.batch_lines import (
    BatchLine,
    LineChecker,
    LineSplitter,
    answer_line,
    error_line,
    parse_line,
)
from headrace.gateway.batches.batch_records import (
    BatchLease,
    BatchView,
    JobEntry,
    LineResult,
    Outcome,
    StoredBatch,
    StoredFile,
)
from headrace.gateway.batches.line_gate import LineGate, LinePlace
from headrace.gateway.batches.line_relay import AnswerTooLargeError, LineAnswer, LineRelay
from headrace.gateway.batches.tenant_batches import PART_BYTES, BatchState, TenantBatches
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress.api_keys import Caller

logger = logging.getLogger("headrace.gateway")

LEASE_S = 15.0
"""Time after its last sign of life after which another gateway takes a batch."""
BEAT_S = 2.0
"""Time between two signs of life."""
TRIES = 3
"""Number of times that a line is sent whose replica fails."""
RETRY_S, MAX_RETRY_S = 0.5, 15.0
"""Pause before a line is sent again for which there was no room; it doubles."""
BUSY = frozenset({429, 503})
"""Statuses of answers that say nothing about the line: it is sent again until the time is up."""
LOST = frozenset({500, 502, 504})
"""Statuses of failures that another try may not have."""
FATAL = frozenset({"file_not_found", "batches_damaged"})
"""Codes of errors of the store that end a batch, since a part of it is lost."""
FILLED_AT_ONCE = 500
READ_BYTES = 8 << 20
"""Bytes of results that are read at once for the output."""


class LeaseLostError(Exception):
    """The error of a batch that another gateway has taken."""


class KeyNotAcceptedError(Exception):
    """The error of a batch whose API key was removed."""


class BatchLimits(NamedTuple):
    """The limits of a batch: its lines, the bytes of a line, and the bytes of all answers."""

    max_lines: int
    max_line_bytes: int
    max_answer_bytes: int


class BatchExecution:
    """The run of one batch.

    Args:
        state: keeps it.
        entry: the batch.
        lease: number of its lease.
        owner: this gateway.
        caller: returns the key that made it; None if the key is no longer accepted.
        relay: sends lines.
        gate: lets lines in.
        limits: the batch's limits.
        clock: Unix seconds.
    """

    def __init__(
        self,
        state: BatchState,
        entry: JobEntry,
        lease: int,
        *,
        owner: str,
        caller: Callable[[], Caller | None],
        relay: LineRelay,
        gate: LineGate,
        limits: BatchLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state, self._entry, self._lease, self._owner = state, entry, lease, owner
        self._caller, self._relay, self._gate = caller, relay, gate
        self._limits, self._clock = limits, clock
        self._job = BatchJob()
        self._batch: StoredBatch | None = None
        self._again: deque[tuple[int, bytes, int]] = deque()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._answer_bytes = 0
        self._is_changed = False

    @property
    def tenant(self) -> str | None:
        """The tenant of the batch."""
        return self._entry.tenant

    @property
    def view(self) -> dict[str, Any]:
        """The batch's progress, for the status."""
        batch_id, tenant = self._entry.batch_id, self._entry.tenant
        told = {"id": batch_id, "tenant": tenant, "status": self._job.status}
        return {**told, **self._job.counts(), "in_flight": len(self._in_flight)}

    async def run(self) -> None:
        """Run the batch to its end.

        Raises:
            LeaseLostError: another gateway has taken it.
            ApiError: the store cannot be used now, or the batch is not kept.
        """
        view: BatchView = await self._do(TenantBatches.view, self._entry.batch_id)
        self._batch, self._job = view.batch, view.job()
        if view.outcome is None:
            await self._with_beat(self._run_to_end())
        await self._do(TenantBatches.clean, view.batch)

    async def release(self) -> None:
        """Give the lease back, with the progress, so that another gateway can continue at once."""
        with contextlib.suppress(ApiError):
            await self._beat(expires_s=0.0)

    # Lease

    async def _with_beat(self, work: Any) -> None:
        """Run work, and give signs of life until it ends."""
        main = asyncio.ensure_future(work)
        beating = asyncio.create_task(self._keep_lease())
        try:
            await asyncio.wait({main, beating}, return_when=asyncio.FIRST_COMPLETED)
            if not main.done():
                await beating  # raises
            await main
        finally:
            for task in (main, beating):
                task.cancel()
            await asyncio.gather(main, beating, return_exceptions=True)

    async def _keep_lease(self) -> None:
        """Give signs of life, and learn that the batch was cancelled, or that its time is up.

        Raises:
            LeaseLostError: the lease was taken, or could not be renewed in time.
        """
        valid_s = time.monotonic() + LEASE_S
        while True:
            began_s = time.monotonic()
            try:
                await self._beat(expires_s=self._clock() + LEASE_S)
                valid_s = began_s + LEASE_S
            except ApiError:
                if time.monotonic() > valid_s:
                    raise LeaseLostError from None
            assert self._batch is not None
            if self._clock() >= self._batch.expires_at and self._job.expire():
                self._stop_lines()
            await asyncio.sleep(BEAT_S)

    async def _beat(self, expires_s: float) -> None:
        # The outcome alone tells the end: it is written once the output is.
        has_ended = self._job.status in ENDED
        progress = self._job.state() if self._is_changed and not has_ended else None
        self._is_changed = False
        lease = BatchLease(self._owner, expires_s, len(self._in_flight))
        try:
            beat = await self._state.run(
                self._entry.tenant,
                TenantBatches.beat,
                *(self._entry.batch_id, self._lease, lease, progress),
            )
        except ApiError:
            self._is_changed = True
            raise
        if not beat.has_lease:
            raise LeaseLostError
        if beat.cancelled_at is not None and self._job.cancel(beat.cancelled_at):
            self._is_changed = True
            self._stop_lines()

    def _stop_lines(self) -> None:
        if self._running is not None:
            self._running.cancel()

    # The whole

    async def _run_to_end(self) -> None:
        try:
            await self._run_all()
        except KeyNotAcceptedError:
            message = "The API key that made this batch is no longer accepted."
            await self._fail([LineFault("key_not_accepted", message)])
        except ApiError as error:
            if error.code not in FATAL:
                raise
            await self._fail([LineFault(str(error.code), error.message)])

    async def _run_all(self) -> None:
        job = self._job
        if job.status == VALIDATING:
            if faults := await self._check():
                await self._fail(faults)
                return
        elif job.total:
            await self._read_marks()
        if not job.is_stopped:
            await self._run_until_stopped()
        await self._fill()
        await self._write_output()

    async def _fail(self, faults: list[LineFault]) -> None:
        self._job.fail(faults, self._now())
        await self._do(TenantBatches.end, self._entry.batch_id, Outcome(self._job.state()))

    async def _check(self) -> list[LineFault]:
        """Check the file, and begin if it has no faults; return the faults."""
        assert self._batch is not None
        checker = LineChecker(self._batch.endpoint, *self._limits[:2])
        async for part in self._parts():
            await asyncio.to_thread(checker.feed, part)
            if checker.is_over or self._job.is_stopped:
                break
        if self._job.is_stopped:
            return []
        checker.finish()
        if not checker.faults:
            self._job.begin(checker.count, self._now())
            self._is_changed = True
        return checker.faults

    async def _read_marks(self) -> None:
        """Mark the lines whose results are kept, but that the last progress does not show."""
        assert self._batch is not None
        sizes = await self._do(TenantBatches.result_sizes, self._batch)
        self._answer_bytes = sum(sizes.values())
        unknown = {
            number: size for number, size in sizes.items() if self._job.mark_of(number) == PENDING
        }
        async for results in self._results(unknown):
            for number, result in results.items():
                self._mark(number, result.mark)

    # Lines

    async def _run_until_stopped(self) -> None:
        """Run the pending lines, until all are done or the batch is stopped.

        Raises:
            KeyNotAcceptedError: the key that made the batch was removed.
        """
        self._running = asyncio.create_task(self._run_lines())
        try:
            await asyncio.wait({self._running})
            if self._failure is not None:
                raise self._failure
            if not self._running.cancelled():
                self._running.result()
        finally:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    async def _run_lines(self) -> None:
        try:
            async for number, raw in self._lines():
                if self._job.mark_of(number) == PENDING:
                    await self._start(number, raw)
                await self._start_again()
            while self._in_flight:
                await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
                await self._start_again()
        finally:
            tasks = list(self._in_flight)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_again(self) -> None:
        """Start the lines that were taken back."""
        while self._again:
            await self._start(*self._again.popleft())

    async def _start(self, number: int, raw: bytes, yields: int = 0) -> None:
        """Start a line when the gate lets it in."""
        assert self._batch is not None
        line, tenant = parse_line(raw, self._batch.endpoint), self._entry.tenant
        model_id = self._relay.model_of(line.body, self._key())
        place = await self._gate.enter(model_id, tenant, yields)
        task = asyncio.create_task(self._run_line(number, line, raw, place))
        self._in_flight.add(task)
        task.add_done_callback(self._on_end)

    def _key(self) -> Caller:
        caller = self._caller()
        if caller is None:
            raise KeyNotAcceptedError
        return caller

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._stop_lines()

    async def _run_line(self, number: int, line: BatchLine, raw: bytes, place: LinePlace) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            place.on_yield = task.cancel
            try:
                result = await self._result(line)
            except asyncio.CancelledError:
                if not place.is_yielding:
                    raise
                task.uncancel()
                self._again.append((number, raw, place.yields + 1))
                return
            finally:
                place.on_yield = None
            await self._keep(number, line, result)
        finally:
            self._gate.leave(place)

    async def _keep(self, number: int, line: BatchLine, result: LineResult) -> None:
        """Keep a line's result, and mark the line with the result that is kept."""
        assert self._batch is not None
        if self._answer_bytes + len(result.line) > self._limits.max_answer_bytes:
            message = f"The batch's answers have more than {self._limits.max_answer_bytes} bytes."
            result = _refused(line, "storage_full", message)
        self._answer_bytes += len(result.line)
        pause_s = RETRY_S
        while True:
            try:
                kept = await self._do(TenantBatches.add_result, self._batch, number, result)
                break
            except ApiError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
        self._mark(number, kept.mark)

    async def _result(self, line: BatchLine) -> LineResult:
        """Send a line until it has an answer that says something about it; return its result."""
        assert self._batch is not None
        path, pause_s, lost = self._batch.endpoint, RETRY_S, 0
        while True:
            try:
                answer = await self._relay.send(path, line.body, self._key())
            except AnswerTooLargeError:
                return _refused(line, "answer_too_large", "The answer has too many bytes.")
            lost += answer.status in LOST
            if answer.status not in BUSY and (answer.status not in LOST or lost >= TRIES):
                return _answered(line, answer)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    def _mark(self, number: int, mark: int) -> None:
        self._job.mark(number, mark)
        self._is_changed = True

    # The end

    async def _fill(self) -> None:
        """Give each line that was not run a result that says so."""
        assert self._batch is not None
        if not self._job.is_marked:
            code, what = "batch_expired", "The completion window ended"
            if self._job.status == CANCELLING:
                code, what = "batch_cancelled", "The batch was cancelled"
            missing: dict[int, LineResult] = {}
            async for number, raw in self._lines():
                if self._job.mark_of(number) == PENDING:
                    line = parse_line(raw, self._batch.endpoint)
                    message = f"{what} before this line was run."
                    body = error_line(line.custom_id, code, message)
                    missing[number] = LineResult(NOT_RUN, body)
                if len(missing) >= FILLED_AT_ONCE:
                    await self._fill_some(missing)
            await self._fill_some(missing)

    async def _fill_some(self, missing: dict[int, LineResult]) -> None:
        assert self._batch is not None
        marks = await self._do(TenantBatches.add_results, self._batch, missing)
        for number, mark in marks.items():
            self._mark(number, mark)
        missing.clear()

    async def _write_output(self) -> None:
        """Write the output files in the order of the lines, and end the batch."""
        assert self._batch is not None
        batch = self._batch
        self._job.finalize(self._now())
        self._is_changed = True
        output = _OutputFile(self._state, self._entry.tenant, batch.output_id)
        errors = _OutputFile(self._state, self._entry.tenant, batch.error_id)
        sizes = await self._do(TenantBatches.result_sizes, batch)
        if len(sizes) < self._job.total:
            raise LeaseLostError  # another gateway has ended the batch and removed results
        async for results in self._results(sizes):
            for number in sorted(results):
                file = output if results[number].mark == ANSWERED else errors
                await file.add(results[number].line)
        now_s = self._now()
        for file, name in ((output, "output"), (errors, "error")):
            await file.finish(f"{batch.id}_{name}.jsonl", now_s, now_s + batch.output_ttl_s)
        self._job.end(now_s)
        has = output.size_bytes > 0, errors.size_bytes > 0
        await self._do(TenantBatches.end, batch.id, Outcome(self._job.state(), *has))

    # Store

    async def _results(self, sizes: dict[int, int]) -> AsyncIterator[dict[int, LineResult]]:
        """Yield kept results in the order of their lines, some megabytes at a time.

        Args:
            sizes: the size of each result to read, by the line's number.
        """
        some: list[int] = []
        held = 0
        for number in sorted(sizes):
            if some and (held + sizes[number] > READ_BYTES or len(some) >= FILLED_AT_ONCE):
                yield await self._read_results(some)
                some, held = [], 0
            some.append(number)
            held += sizes[number]
        if some:
            yield await self._read_results(some)

    async def _read_results(self, numbers: Sequence[int]) -> dict[int, LineResult]:
        """Return kept results.

        Raises:
            LeaseLostError: one is missing, since another gateway has ended the batch.
        """
        results: dict[int, LineResult] = await self._do(TenantBatches.results, self._batch, numbers)
        if len(results) < len(numbers):
            raise LeaseLostError
        return results

    async def _parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the input file."""
        assert self._batch is not None
        file = await self._do(TenantBatches.file, self._batch.input_file_id)
        for number in range(file.parts):
            yield await self._do(TenantBatches.part, file.id, number)

    async def _lines(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the lines of the input file, each with its number, which counts from 0."""
        splitter = LineSplitter(self._limits.max_line_bytes)
        count = 0
        async for part in self._parts():
            for _, raw in splitter.feed(part):
                yield count, raw
                count += 1
        for _, raw in splitter.finish():
            yield count, raw
            count += 1

    async def _do(self, work: Callable[..., Any], *args: Any) -> Any:
        return await self._state.run_long(self._entry.tenant, work, *args)

    def _now(self) -> int:
        return int(self._clock())


class _OutputFile:
    """An output file that is written piece by piece.

    Attributes:
        size_bytes: bytes so far.
    """

    def __init__(self, state: BatchState, tenant: str | None, file_id: str) -> None:
        self._state, self._tenant, self._id = state, tenant, file_id
        self._rest = bytearray()
        self._parts = self.size_bytes = 0

    async def add(self, line: bytes) -> None:
        """Add a line."""
        self._rest += line
        self.size_bytes += len(line)
        while len(self._rest) >= PART_BYTES:
            await self._put(bytes(self._rest[:PART_BYTES]))
            del self._rest[:PART_BYTES]

    async def finish(self, filename: str, created_at: int, expires_at: int) -> None:
        """Write the rest, and list the file; one without lines is not kept."""
        if not self.size_bytes:
            return
        if self._rest:
            await self._put(bytes(self._rest))
        file = StoredFile(
            *(self._id, filename, "batch_output", self.size_bytes, self._parts),
            created_at=created_at,
            expires_at=expires_at,
        )
        await self._state.run(self._tenant, TenantBatches.add_file, file)

    async def _put(self, data: bytes) -> None:
        await self._state.run(self._tenant, TenantBatches.put_part, self._id, self._parts, data)
        self._parts += 1


def _answered(line: BatchLine, answer: LineAnswer) -> LineResult:
    mark = ANSWERED if answer.status == 200 else REFUSED
    body = answer_line(line.custom_id, answer.status, answer.request_id, answer.body)
    return LineResult(mark, body)


def _refused(line: BatchLine, code: str, message: str) -> LineResult:
    return LineResult(REFUSED, error_line(line.custom_id, code, message))
