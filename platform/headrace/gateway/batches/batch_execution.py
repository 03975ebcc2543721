"""One batch, run by the gateway that has its lease: checked, its lines run, its output written.

Nothing is done twice that a client could see: results of lines (`line_runs`) and output files
(`batch_output`) are created, never replaced. A gateway that lost its lease stops; what it still
creates changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from headrace.gateway.batches.batch_input import BatchInput
from headrace.gateway.batches.batch_job import ENDED, VALIDATING, BatchJob, LineFault
from headrace.gateway.batches.batch_lines import LineChecker
from headrace.gateway.batches.batch_output import BatchOutput
from headrace.gateway.batches.batch_records import (
    BatchLease,
    BatchView,
    JobEntry,
    Outcome,
    StoredBatch,
)
from headrace.gateway.batches.line_gate import LineGate
from headrace.gateway.batches.line_relay import LineRelay
from headrace.gateway.batches.line_runs import KeyNotAcceptedError, LineRuns
from headrace.gateway.batches.tenant_batches import BatchState, LeaseLostError, TenantBatches
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress.api_keys import Caller

LEASE_S = 15.0
"""Time after its last sign of life after which another gateway takes a batch."""
BEAT_S = 2.0
"""Time between two signs of life."""
FATAL = frozenset({"file_not_found", "batches_damaged"})
"""Codes of errors of the store that end a batch, since a part of it is lost."""


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
        self._kept_changes = 0
        """`BatchJob.changes` of the progress that is kept."""
        self._lines: LineRuns | None = None

    @property
    def tenant(self) -> str | None:
        """The tenant of the batch."""
        return self._entry.tenant

    @property
    def view(self) -> dict[str, Any]:
        """The batch's progress, for the status."""
        batch_id, tenant = self._entry.batch_id, self._entry.tenant
        told = {"id": batch_id, "tenant": tenant, "status": self._job.status}
        return {**told, **self._job.counts(), "in_flight": self._in_flight}

    @property
    def _in_flight(self) -> int:
        return 0 if self._lines is None else self._lines.in_flight

    async def run(self) -> None:
        """Run the batch to its end.

        Raises:
            LeaseLostError: another gateway has taken it.
            ApiError: the store cannot be used now, or the batch is not kept.
        """
        view: BatchView = await self._do(TenantBatches.view, self._entry.batch_id)
        self._job = view.job()
        if view.outcome is None:
            await self._with_beat(view.batch, self._run_to_end(view.batch))
        await self._do(TenantBatches.clean, view.batch)

    async def release(self) -> None:
        """Give the lease back, with the progress, so that another gateway can continue at once."""
        with contextlib.suppress(ApiError):
            await self._beat(expires_s=0.0)

    # Lease

    async def _with_beat(self, batch: StoredBatch, work: Coroutine[Any, Any, None]) -> None:
        """Run work, and give signs of life until it ends."""
        main = asyncio.ensure_future(work)
        beating = asyncio.create_task(self._keep_lease(batch))
        try:
            await asyncio.wait({main, beating}, return_when=asyncio.FIRST_COMPLETED)
            if not main.done():
                await beating  # raises
            await main
        finally:
            for task in (main, beating):
                task.cancel()
            await asyncio.gather(main, beating, return_exceptions=True)

    async def _keep_lease(self, batch: StoredBatch) -> None:
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
            if self._clock() >= batch.expires_at and self._job.expire():
                self._stop_lines()
            await asyncio.sleep(BEAT_S)

    async def _beat(self, expires_s: float) -> None:
        changes, progress = self._job.changes, None
        # The outcome alone tells the end: it is written once the output is.
        if changes != self._kept_changes and self._job.status not in ENDED:
            progress = self._job.state()
        beat = await self._state.run(
            self._entry.tenant,
            TenantBatches.beat,
            *(self._entry.batch_id, self._lease),
            *(BatchLease(self._owner, expires_s, self._in_flight), progress),
        )
        if not beat.has_lease:
            raise LeaseLostError
        self._kept_changes = changes
        if beat.cancelled_at is not None and self._job.cancel(beat.cancelled_at):
            self._stop_lines()

    def _stop_lines(self) -> None:
        if self._lines is not None:
            self._lines.stop()

    # The whole

    async def _run_to_end(self, batch: StoredBatch) -> None:
        try:
            await self._run_all(batch)
        except KeyNotAcceptedError:
            message = "The API key that made this batch is no longer accepted."
            await self._fail([LineFault("key_not_accepted", message)])
        except ApiError as error:
            if error.code not in FATAL:
                raise
            await self._fail([LineFault(str(error.code), error.message)])

    async def _run_all(self, batch: StoredBatch) -> None:
        job, of_batch = self._job, (self._state, self._entry.tenant, batch)
        lines = BatchInput(*of_batch, self._limits.max_line_bytes)
        output = BatchOutput(*of_batch, job)
        answer_bytes = 0
        if job.status == VALIDATING:
            if faults := await self._check(batch.endpoint, lines):
                await self._fail(faults)
                return
        elif job.total:
            answer_bytes = await output.read_marks()
        if not job.is_stopped:
            self._lines = LineRuns(
                *(*of_batch, job),
                caller=self._caller,
                relay=self._relay,
                gate=self._gate,
                max_answer_bytes=self._limits.max_answer_bytes,
                answer_bytes=answer_bytes,
            )
            await self._lines.run(lines.lines())
        await output.fill(lines)
        job.finalize(self._now())
        has = await output.write(self._now())
        job.end(self._now())
        await self._do(TenantBatches.end, batch.id, Outcome(job.state(), *has))

    async def _fail(self, faults: list[LineFault]) -> None:
        self._job.fail(faults, self._now())
        await self._do(TenantBatches.end, self._entry.batch_id, Outcome(self._job.state()))

    async def _check(self, endpoint: str, lines: BatchInput) -> list[LineFault]:
        """Check the file, and begin if it has no faults; return the faults."""
        checker = LineChecker(endpoint, *self._limits[:2])
        async for part in lines.parts():
            await asyncio.to_thread(checker.feed, part)
            if checker.is_over or self._job.is_stopped:
                break
        if self._job.is_stopped:
            return []
        checker.finish()
        if not checker.faults:
            self._job.begin(checker.count, self._now())
        return checker.faults

    async def _do(self, work: Callable[..., Any], *args: Any) -> Any:
        return await self._state.run_long(self._entry.tenant, work, *args)

    def _now(self) -> int:
        return int(self._clock())
