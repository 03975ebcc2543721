"""State for the gateway's event loop: its store is used in threads, never on the loop.

A store that cannot be used costs a request a few seconds at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from headrace.gateway.errors import ApiError
from headrace.gateway.kept_records.record_cipher import DamagedRecordError, RecordCipher
from headrace.gateway.kept_records.record_store import RecordStore, StoreError, ThreadFullError

logger = logging.getLogger("headrace.gateway")

WAIT_S, LONG_WAIT_S = 5.0, 120.0
"""Longest time for which a request waits for the store, and work that no client waits for."""
SWEEP_S = 60.0
"""Time between two removals of what expired."""
P = ParamSpec("P")
Result = TypeVar("Result")
Tenant = TypeVar("Tenant")
OfTenant = Callable[[RecordStore, RecordCipher, str | None, Callable[[], float]], Tenant]


class StateRefusals(Protocol):
    """The refusals of requests for which a store cannot be used; a module may have them."""

    def thread_full(self) -> ApiError:
        """Return the refusal of a thread that would exceed its tenant's limit."""

    def unavailable(self) -> ApiError:
        """Return the refusal while the store cannot be used."""

    def damaged(self, thread: str, name: str) -> ApiError:
        """Return the refusal of a record that does not open."""


class StateRunner(Generic[Tenant]):
    """The runner of work on tenants' records, for one event loop.

    Args:
        open_store: opens the store of records; it may block and raise StoreError.
        read_secret: returns the app's secret; it may block and raise.
        of_tenant: makes the object that works on the records of one tenant.
        clock: Unix seconds.
        threads: number of threads that use the store at once.
        what: the name of the state, for the log.
        refusals: the refusals of requests whose work fails.
    """

    def __init__(
        self,
        open_store: Callable[[], RecordStore],
        read_secret: Callable[[], bytes],
        of_tenant: OfTenant[Tenant],
        clock: Callable[[], float] = time.time,
        *,
        threads: int = 1,
        what: str,
        refusals: StateRefusals,
    ) -> None:
        self._open_store, self._read_secret, self._clock = open_store, read_secret, clock
        self._of_tenant, self._what, self._refusals = of_tenant, what, refusals
        self._opened: tuple[RecordStore, RecordCipher] | None = None
        self._opening = threading.Lock()
        self._workers = ThreadPoolExecutor(threads, what.replace(" ", "-"))
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to remove what expired, from time to time."""
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def aclose(self) -> None:
        """Close the store."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        loop = asyncio.get_running_loop()
        with contextlib.suppress(RuntimeError):
            await loop.run_in_executor(self._workers, self._close)
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def run(
        self,
        tenant: str | None,
        work: Callable[Concatenate[Tenant, P], Result],
        *args: P.args,
        **named: P.kwargs,
    ) -> Result:
        """Run work on a tenant's state in a thread, and return its result.

        Raises:
            ApiError: what the work raises; 503 if the store cannot be used, 500 if a record is
                damaged, 400 if a thread is full.
        """
        return await self._run_within(WAIT_S, tenant, work, *args, **named)

    async def run_long(
        self,
        tenant: str | None,
        work: Callable[Concatenate[Tenant, P], Result],
        *args: P.args,
        **named: P.kwargs,
    ) -> Result:
        """Run work that no client waits for; otherwise as `run`."""
        return await self._run_within(LONG_WAIT_S, tenant, work, *args, **named)

    async def _run_within(
        self,
        wait_s: float,
        tenant: str | None,
        work: Callable[Concatenate[Tenant, P], Result],
        *args: P.args,
        **named: P.kwargs,
    ) -> Result:
        loop = asyncio.get_running_loop()
        latest = time.monotonic() + wait_s

        def task() -> Result:
            if time.monotonic() > latest:
                raise StoreError("the request waited too long for the store")
            store, cipher = self._open()
            return work(self._of_tenant(store, cipher, tenant, self._clock), *args, **named)

        try:
            async with asyncio.timeout(wait_s):
                return await loop.run_in_executor(self._workers, task)
        except ThreadFullError:
            raise self._refusals.thread_full() from None
        except (StoreError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            why = error or "it takes too long"
            logger.warning("%s cannot be used: %s", self._what, why)
            raise self._refusals.unavailable() from error
        except DamagedRecordError as error:
            logger.error("%s: %s", self._what, error)
            raise self._refusals.damaged(error.thread, error.name) from None

    def _open(self) -> tuple[RecordStore, RecordCipher]:
        """Open the store at its first use. Blocks."""
        with self._opening:
            if self._opened is None:
                try:
                    cipher = RecordCipher(self._read_secret())
                except Exception as error:
                    raise StoreError(f"the app's secret cannot be read: {error!r}") from error
                self._opened = self._open_store(), cipher
            return self._opened

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[0].close()

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_S * random.uniform(0.5, 1.5))
            try:
                while await loop.run_in_executor(self._workers, self._sweep_once):
                    pass
            except (StoreError, OSError) as error:
                logger.warning("%s is not swept: %s", self._what, error)

    def _sweep_once(self) -> bool:
        return self._open()[0].sweep(self._clock())
