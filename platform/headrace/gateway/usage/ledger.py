"""The ledger: the replicas' totals by hour, kept in a store of records.

Each gateway sees the totals of all replicas about once a second and writes those that changed every
`FLUSH_S`. A killed gateway loses nothing: replicas keep their totals, and the next gateway writes
them. A killed replica loses what it did since gateways last asked it, about a second. Both at once
lose up to `FLUSH_S` more.

A record is one replica's day (`replica_day`), in a thread of the store for each day. The store is
used in one thread, never on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace.gateway.kept_records.record_store import RecordStore, StoreError
from headrace.gateway.usage.replica_day import (
    DAY_S,
    HOUR_S,
    ReplicaDay,
    decode,
    encode,
    read_report,
)
from headrace_engine.usage.request_usage import RequestUsage

logger = logging.getLogger("headrace.gateway")

FLUSH_S = 5.0
"""Interval at which changed totals are written."""
SWEEP_S = 3_600.0
"""Interval at which expired days are removed."""
QUERY_S = 30.0
"""Longest time of a query."""
SILENT_S = 900.0
"""Time without a report after which a replica is forgotten; its record stays in the store."""
MAX_REPLICAS = 4_096
MAX_DAYS = 3_700
"""Maximum number of days that a query reads."""
TAG = hashlib.blake2b(b"headrace usage", digest_size=16).hexdigest()
"""The store's name of the tenant under which all days lie."""


@dataclass
class _Replica:
    """A replica that reports.

    Attributes:
        day: number of the day since 1970.
        record: its totals on this day, and `earlier` those of days that are not written yet.
        is_loaded: whether the store's record of the day was taken in.
        has_changed: whether the record differs from the store's.
    """

    since_s: float
    day: int
    record: ReplicaDay
    seen_s: float
    is_loaded: bool = False
    has_changed: bool = True
    earlier: dict[int, ReplicaDay] = field(default_factory=dict)


@dataclass(frozen=True)
class UsageSum:
    """Usage of a model by a tenant."""

    tenant: str
    model: str
    usage: RequestUsage


class UsageLedger:
    """The ledger of one gateway.

    Args:
        open_store: opens the store of records; it may block and raise StoreError.
        clock: Unix seconds.
    """

    def __init__(
        self, open_store: Callable[[], RecordStore], clock: Callable[[], float] = time.time
    ) -> None:
        self._open_store, self._clock = open_store, clock
        self._store: RecordStore | None = None
        self._replicas: dict[str, _Replica] = {}
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "usage")
        self._tasks: list[asyncio.Task[None]] = []
        self._has_warned = False

    def start(self) -> None:
        """Begin to write; call it in the event loop."""
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [
                loop.create_task(self._regularly(FLUSH_S, self.flush)),
                loop.create_task(self._regularly(SWEEP_S, self._sweep)),
            ]

    async def aclose(self) -> None:
        """Write what has changed, and close the store."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._worker, self.flush)
        except (StoreError, OSError, RuntimeError) as error:
            logger.warning("the usage of the last seconds was not written: %s", error)
        store, self._store = self._store, None
        if store is not None:
            await loop.run_in_executor(self._worker, store.close)
        self._worker.shutdown(wait=False, cancel_futures=True)

    def take(self, found: Mapping[str, Any]) -> None:
        """Take a replica's report; one that makes no sense is logged and left out."""
        try:
            report = read_report(found)
        except ValueError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("a replica's usage is left out; this is logged once: %s", error)
            return
        now_s = self._clock()
        day, hour = int(now_s // DAY_S), int(now_s % DAY_S // HOUR_S)
        with self._lock:
            replica = self._replicas.get(report.replica_id)
            if replica is None:
                if len(self._replicas) >= MAX_REPLICAS:
                    return
                record = ReplicaDay(report.replica_id, report.model)
                replica = _Replica(report.since_s, day, record, now_s)
                self._replicas[report.replica_id] = replica
            elif day > replica.day:
                self._begin_day(replica, day)
            before = replica.record.last()
            if report.tenants != before or hour not in replica.record.hours:
                replica.record.see(hour, report.tenants)
                replica.has_changed |= report.tenants != before
            replica.seen_s = now_s

    @staticmethod
    def _begin_day(replica: _Replica, day: int) -> None:
        old = replica.record
        if replica.has_changed or not replica.is_loaded:
            replica.earlier[replica.day] = old
        replica.record = ReplicaDay(old.replica_id, old.model, old.last())
        replica.day, replica.has_changed = day, True

    async def sums(
        self,
        since_s: float,
        until_s: float,
        tenant: str | None = None,
        model: str | None = None,
    ) -> list[UsageSum]:
        """Return what was used in whole hours, by tenant and model, in their order.

        Args:
            since_s, until_s: Unix seconds; the hours of both count.
            tenant, model: None for all.

        Raises:
            StoreError: the store cannot be used, or not in time.
        """
        loop = asyncio.get_running_loop()

        def work() -> list[UsageSum]:
            self.flush()
            return self._sums(since_s, until_s, tenant, model)

        try:
            async with asyncio.timeout(QUERY_S):
                return await loop.run_in_executor(self._worker, work)
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
            raise StoreError(str(error) or "it takes too long") from error

    # In the thread.

    def flush(self) -> None:
        """Write the records that changed. Blocks.

        Raises:
            StoreError: the store cannot be used.
        """
        now_s = self._clock()
        with self._lock:
            due = [
                replica
                for replica in self._replicas.values()
                if replica.has_changed or replica.earlier or not replica.is_loaded
            ]
            silent = [
                name
                for name, replica in self._replicas.items()
                if replica not in due and now_s - replica.seen_s > SILENT_S
            ]
            for name in silent:
                del self._replicas[name]
        for replica in due:
            self._write(replica, now_s)

    def _write(self, replica: _Replica, now_s: float) -> None:
        store = self._opened()
        if not replica.is_loaded:
            self._load(replica, store, now_s)
        with self._lock:
            records = {**replica.earlier, replica.day: replica.record}
            changed = {day: encode(record) for day, record in records.items()}
            was_changed, replica.has_changed = replica.has_changed, False
            replica.earlier = {}
        try:
            for day, data in changed.items():
                name = _record_name(replica.record.replica_id)
                if was_changed or day != replica.day:
                    store.write(TAG, _thread(day), {name: data}, now_s)
        except BaseException:
            with self._lock:
                replica.has_changed = True
                replica.earlier |= {d: r for d, r in records.items() if d < replica.day}
            raise

    def _load(self, replica: _Replica, store: RecordStore, now_s: float) -> None:
        """Merge the store's record of a replica: that of the same day, or the last one before."""
        first = min((*replica.earlier, replica.day))
        name = _record_name(replica.record.replica_id)
        oldest = max(int(replica.since_s // DAY_S), first - MAX_DAYS)
        found, day = None, first
        while found is None and day >= oldest:
            found = self._read(store, day, [name], now_s).get(name)
            day -= 1
        with self._lock:
            replica.is_loaded = True
            if found is None:
                return
            base = found.last()
            for number in sorted((*replica.earlier, replica.day)):
                record = replica.earlier.get(number, replica.record)
                if number == day + 1:
                    record.merge(found)
                else:
                    record.merge(ReplicaDay(record.replica_id, record.model, base))
            replica.has_changed = True

    def _sums(
        self, since_s: float, until_s: float, tenant: str | None, model: str | None
    ) -> list[UsageSum]:
        store, now_s = self._opened(), self._clock()
        first, last = int(since_s // HOUR_S), int(until_s // HOUR_S)
        found: dict[tuple[str, str], RequestUsage] = {}
        for day in _days(first, last, int(now_s // DAY_S)):
            names = list(store.sizes(TAG, _thread(day), now_s))
            for record in self._read(store, day, names, now_s).values():
                if model not in (None, record.model):
                    continue
                for hour, whose, used in record.growth():
                    if tenant in (None, whose) and first <= day * 24 + hour <= last:
                        found.setdefault((whose, record.model), RequestUsage()).add(used)
        return [UsageSum(*key, found[key]) for key in sorted(found)]

    @staticmethod
    def _read(
        store: RecordStore, day: int, names: list[str], now_s: float
    ) -> dict[str, ReplicaDay]:
        """Return records of a day, by name; a damaged one is logged and left out."""
        records: dict[str, ReplicaDay] = {}
        for name, data in store.read(TAG, _thread(day), names, now_s).items() if names else ():
            try:
                records[name] = decode(data)
            except ValueError as error:
                logger.error("the usage record %s of day %d is damaged: %s", name, day, error)
        return records

    def _opened(self) -> RecordStore:
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _sweep(self) -> None:
        while self._opened().sweep(self._clock()):
            pass

    async def _regularly(self, interval_s: float, work: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        has_failed = False
        while True:
            await asyncio.sleep(interval_s)
            try:
                await loop.run_in_executor(self._worker, work)
                has_failed = False
            except (StoreError, OSError) as error:
                if not has_failed:
                    logger.warning("the usage ledger cannot be used, and is tried again: %s", error)
                has_failed = True


def _thread(day: int) -> str:
    """Return the store's name of a day."""
    return f"{day:016x}"


def _record_name(replica_id: str) -> str:
    return hashlib.blake2b(replica_id.encode(), digest_size=16).hexdigest()


def _days(first_hour: int, last_hour: int, today: int) -> Iterator[int]:
    """Yield the days of these hours up to today, at most the last `MAX_DAYS`."""
    last = min(last_hour // 24, today)
    yield from range(max(first_hour // 24, last - MAX_DAYS + 1), last + 1)
