"""The lines of a batch in flight: sent, sent again, taken back, and their results kept.

A line's result is created, never replaced, so its first result is the one in the output.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from headrace.gateway.batches.batch_job import ANSWERED, PENDING, REFUSED, BatchJob
from headrace.gateway.batches.batch_lines import BatchLine, answer_line, error_line, parse_line
from headrace.gateway.batches.batch_records import LineResult, StoredBatch
from headrace.gateway.batches.line_gate import LineGate, LinePlace
from headrace.gateway.batches.line_relay import AnswerTooLargeError, LineAnswer, LineRelay
from headrace.gateway.batches.tenant_batches import BatchState, TenantBatches
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress.api_keys import Caller

TRIES = 3
"""Number of times that a line is sent whose replica fails."""
RETRY_S, MAX_RETRY_S = 0.5, 15.0
"""Pause before a line is sent again for which there was no room; it doubles."""
BUSY = frozenset({429, 503})
"""Statuses of answers that say nothing about the line: it is sent again until the time is up."""
LOST = frozenset({500, 502, 504})
"""Statuses of failures that another try may not have."""


class KeyNotAcceptedError(Exception):
    """The error of a batch whose API key was removed."""


class LineRuns:
    """The pending lines of one batch, run until all are done or it is stopped.

    Args:
        state: keeps the results.
        tenant: the batch's tenant.
        batch: the batch.
        job: has the marks of the lines.
        caller: returns the key that made the batch; None if the key is no longer accepted.
        relay: sends lines.
        gate: lets lines in.
        max_answer_bytes: maximum bytes of all answers of the batch.
        answer_bytes: bytes of the answers that are kept already.
    """

    def __init__(
        self,
        state: BatchState,
        tenant: str | None,
        batch: StoredBatch,
        job: BatchJob,
        *,
        caller: Callable[[], Caller | None],
        relay: LineRelay,
        gate: LineGate,
        max_answer_bytes: int,
        answer_bytes: int,
    ) -> None:
        self._state, self._tenant, self._batch, self._job = state, tenant, batch, job
        self._caller, self._relay, self._gate = caller, relay, gate
        self._max_answer_bytes, self._answer_bytes = max_answer_bytes, answer_bytes
        self._again: deque[tuple[int, bytes, int]] = deque()
        self._in_flight: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    @property
    def in_flight(self) -> int:
        """Number of lines that were sent and have no result yet."""
        return len(self._in_flight)

    async def run(self, lines: AsyncIterator[tuple[int, bytes]]) -> None:
        """Run the pending ones of these lines.

        Raises:
            KeyNotAcceptedError: the key that made the batch was removed.
            ApiError: the store cannot be used now, or lacks a part of the file.
        """
        self._running = asyncio.create_task(self._run_all(lines))
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

    def stop(self) -> None:
        """Have `run` end; lines in flight are ended without a result."""
        if self._running is not None:
            self._running.cancel()

    async def _run_all(self, lines: AsyncIterator[tuple[int, bytes]]) -> None:
        try:
            async for number, raw in lines:
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
        line = parse_line(raw, self._batch.endpoint)
        model_id = self._relay.model_of(line.body, self._key())
        place = await self._gate.enter(model_id, self._tenant, yields)
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
            self.stop()

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
        if self._answer_bytes + len(result.line) > self._max_answer_bytes:
            message = f"The batch's answers have more than {self._max_answer_bytes} bytes."
            result = _refused(line, "storage_full", message)
        self._answer_bytes += len(result.line)
        pause_s = RETRY_S
        while True:
            try:
                kept = await self._state.run_long(
                    self._tenant, TenantBatches.add_result, self._batch, number, result
                )
                break
            except ApiError:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
        self._job.mark(number, kept.mark)

    async def _result(self, line: BatchLine) -> LineResult:
        """Send a line until it has an answer that says something about it; return its result."""
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


def _answered(line: BatchLine, answer: LineAnswer) -> LineResult:
    mark = ANSWERED if answer.status == 200 else REFUSED
    body = answer_line(line.custom_id, answer.status, answer.request_id, answer.body)
    return LineResult(mark, body)


def _refused(line: BatchLine, code: str, message: str) -> LineResult:
    return LineResult(REFUSED, error_line(line.custom_id, code, message))
