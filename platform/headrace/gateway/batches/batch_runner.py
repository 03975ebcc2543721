"""The batches of one gateway: which of them it runs, and what it knows of the others.

Every few seconds it reads the list of unfinished batches. It takes those that no gateway has a
valid lease of, up to `MAX_RUNNING`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from headrace.gateway.batches import batch_execution
from headrace.gateway.batches.batch_execution import BatchExecution, BatchLimits
from headrace.gateway.batches.batch_records import BatchView, JobEntry
from headrace.gateway.batches.line_gate import LineGate
from headrace.gateway.batches.line_relay import LineRelay
from headrace.gateway.batches.tenant_batches import BatchState, LeaseLostError, TenantBatches
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress.api_keys import Caller
from headrace.gateway.kept_records.record_cipher import GATEWAYS
from headrace_engine.supervise import supervise

logger = logging.getLogger("headrace.gateway")

SCAN_S = 5.0
"""Time between two readings of the list of unfinished batches."""
MAX_RUNNING, MAX_RUNNING_OF_TENANT = 64, 4
"""Maximum number of batches that a gateway runs at once, of all tenants and of one."""
MAX_LISTED = 20
"""Maximum number of batches in the status."""


class BatchRunner:
    """The batches that one gateway runs.

    Args:
        state: keeps them.
        relay: sends lines.
        gate: lets lines in.
        caller: returns the caller of a key's hash; None if the key is not accepted.
        limits: the limits of each batch.
        clock: Unix seconds.
    """

    def __init__(
        self,
        state: BatchState,
        relay: LineRelay,
        gate: LineGate,
        caller: Callable[[str], Caller | None],
        limits: BatchLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state, self._relay, self._gate = state, relay, gate
        self._caller, self._limits, self._clock = caller, limits, clock
        self._owner = secrets.token_hex(8)
        self._running: dict[str, tuple[BatchExecution, asyncio.Task[None]]] = {}
        self._elsewhere: dict[str, dict[str, Any]] = {}
        self._wake = asyncio.Event()
        self._scanning: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to look for batches."""
        if self._scanning is None:
            self._scanning = supervise(self._scan_forever, "look for batches to run")

    def wake(self) -> None:
        """Look for batches now."""
        self._wake.set()

    @property
    def lines_elsewhere(self) -> int:
        """Number of lines that other gateways have in flight, by their last signs of life."""
        return sum(each["in_flight"] for each in self._elsewhere.values())

    def batches(self) -> list[dict[str, Any]]:
        """Return the progress of unfinished batches, for the status."""
        own = {batch_id: execution.view for batch_id, (execution, _) in self._running.items()}
        return list({**self._elsewhere, **own}.values())[:MAX_LISTED]

    async def aclose(self) -> None:
        """Stop; other gateways continue at once."""
        if self._scanning is not None:
            self._scanning.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._scanning
            self._scanning = None
        running = list(self._running.values())
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        for execution, _ in running:
            with contextlib.suppress(LeaseLostError):
                await execution.release()
        self._gate.close()

    async def _scan_forever(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._scan()
            except ApiError as error:
                logger.debug("the list of batches cannot be read: %s", error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SCAN_S):
                    await self._wake.wait()

    async def _scan(self) -> None:
        entries: list[JobEntry] = await self._state.run(GATEWAYS, TenantBatches.jobs)
        elsewhere: dict[str, dict[str, Any]] = {}
        for entry in entries:
            if entry.batch_id in self._running:
                continue
            try:
                if self._has_room(entry.tenant) and await self._take(entry):
                    continue
                if len(elsewhere) < MAX_LISTED:
                    elsewhere[entry.batch_id] = await self._look(entry)
            except ApiError as error:
                if error.code == "batch_not_found":
                    await self._state.run(GATEWAYS, TenantBatches.remove_job, entry.batch_id)
                else:
                    logger.warning("the batch %s waits: %s", entry.batch_id, error.message)
        self._elsewhere = elsewhere

    def _has_room(self, tenant: str | None) -> bool:
        of_tenant = sum(execution.tenant == tenant for execution, _ in self._running.values())
        return len(self._running) < MAX_RUNNING and of_tenant < MAX_RUNNING_OF_TENANT

    async def _take(self, entry: JobEntry) -> bool:
        """Run a batch if its lease is free; return whether it is run here."""
        number = await self._state.run(
            entry.tenant,
            TenantBatches.acquire,
            *(entry.batch_id, self._owner, batch_execution.LEASE_S),
        )
        if number is None:
            return False
        execution = BatchExecution(
            *(self._state, entry, number),
            owner=self._owner,
            caller=lambda: self._caller(entry.key_hash),
            relay=self._relay,
            gate=self._gate,
            limits=self._limits,
            clock=self._clock,
        )
        task = asyncio.create_task(self._run(entry, execution))
        self._running[entry.batch_id] = execution, task
        return True

    async def _run(self, entry: JobEntry, execution: BatchExecution) -> None:
        """Run a batch to its end; one that cannot be run now is taken again later."""
        try:
            await execution.run()
            await self._state.run(GATEWAYS, TenantBatches.remove_job, entry.batch_id)
        except LeaseLostError:
            logger.warning("the batch %s is run by another gateway now", entry.batch_id)
        except ApiError as error:
            logger.warning("the batch %s waits: %s", entry.batch_id, error.message)
            if error.code == "batch_not_found":
                with contextlib.suppress(ApiError):
                    await self._state.run(GATEWAYS, TenantBatches.remove_job, entry.batch_id)
        except Exception:
            logger.exception("the batch %s failed in the gateway and is run again", entry.batch_id)
        finally:
            self._running.pop(entry.batch_id, None)

    async def _look(self, entry: JobEntry) -> dict[str, Any]:
        """Return the progress of a batch that another gateway runs."""
        view: BatchView = await self._state.run(entry.tenant, TenantBatches.view, entry.batch_id)
        lease = await self._state.run(entry.tenant, TenantBatches.lease, entry.batch_id)
        job = view.job()
        told = {"id": entry.batch_id, "tenant": entry.tenant, "status": job.status}
        return {**told, **job.counts(), "in_flight": 0 if lease is None else lease.lines}
