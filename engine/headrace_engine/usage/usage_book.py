"""Sums of usage in a replica's process: by tenant, and of the last client requests.

The engine reports the growth of the tenants' sums, and what each request cost when it ends
(`scheduler_usage`). If the replica follows the engine's request, the latter is added to the record
of the client's request. Totals only grow; they begin when the replica begins to serve.

Pure: no Ray, no vLLM, no I/O. Use it from one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from headrace_engine.usage.request_usage import RequestUsage, usage_of_values
from headrace_engine.usage.scheduler_usage import UsageUpdate

MAX_TENANTS = 256
"""Maximum number of tenants with totals of their own."""
OTHERS = "(others)"
"""Tenant that stands for all further ones; no key's tenant has this name."""
MAX_RECORDS = 10_000
"""Number of client requests that are remembered, the last ones."""


class UsageRecord:
    """One client request's usage at one replica.

    Attributes:
        tenant: the tenant; empty without keys.
        request_id: the client's id of the request.
        usage: what this replica's engine did for its requests that have ended.
        elsewhere: what prefill engines reported to this replica for it; their own replicas have
            counted it.
    """

    def __init__(self, tenant: str, request_id: str) -> None:
        self.tenant, self.request_id = tenant, request_id
        self.usage, self.elsewhere = RequestUsage(), RequestUsage()
        self._running = 0
        self._waiting: asyncio.Event | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all of its requests to the engine have ended."""
        return not self._running

    def whole(self) -> RequestUsage:
        """Return what all engines did for the request."""
        found = self.usage.copy()
        found.add(self.elsewhere)
        return found

    def begin(self) -> None:
        """Record a request to the engine."""
        self._running += 1
        self._waiting = None

    def end(self, count: int = 1) -> None:
        """Record the end of requests to the engine."""
        self._running -= count
        if self.is_complete and self._waiting is not None:
            self._waiting.set()

    async def completed(self, limit_s: float) -> bool:
        """Wait until the record is complete; return whether it is, after `limit_s` at most."""
        if not self.is_complete:
            self._waiting = self._waiting or asyncio.Event()
            try:
                async with asyncio.timeout(limit_s):
                    await self._waiting.wait()
            except TimeoutError:
                pass
        return self.is_complete


@dataclass(slots=True)
class _Followed:
    """Requests to the engine under one id, which count for the same client's request."""

    record: UsageRecord
    count: int = 0


class UsageBook:
    """Usage of one replica.

    Attributes:
        since_s: Unix time from which on the totals count.
        totals: by tenant; the empty name for requests without one.
        step_s: seconds of all steps, which the engine counts apart from the requests.
        counters: what vLLM itself counts, by name; see `EngineMeter`.
    """

    def __init__(self) -> None:
        self.totals: dict[str, RequestUsage] = {}
        self.counters: dict[str, float] = {}
        self._records: OrderedDict[tuple[str, str], UsageRecord] = OrderedDict()
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        self.has_reports = False
        self.restart()

    def restart(self) -> None:
        """Count from now on: earlier work of the engine was for no client."""
        self.since_s, self.step_s = time.time(), 0.0
        self.totals.clear()
        self.counters.clear()

    def record_of(self, tenant: str, request_id: str) -> UsageRecord:
        """Return the record of a client's request, a new one if there is none."""
        key = tenant, request_id
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = UsageRecord(*key)
            while len(self._records) > MAX_RECORDS:
                self._records.popitem(last=False)
        return record

    def find(self, request_id: str, tenant: str | None) -> list[UsageRecord]:
        """Return the records of a request.

        Args:
            tenant: whose; None for any tenant's.
        """
        if tenant is not None:
            found = self._records.get((tenant, request_id))
            return [] if found is None else [found]
        return [each for (_, name), each in self._records.items() if name == request_id]

    def follow(self, engine_id: str, record: UsageRecord) -> None:
        """Add what the engine does for one of its requests to a record.

        Args:
            engine_id: the request's id at the engine, or the id that vLLM appends a dash and a
                random word to.
        """
        if not self.has_reports:
            return
        record.begin()
        followed = self._followed.setdefault(engine_id, _Followed(record))
        followed.count += 1
        while len(self._followed) > MAX_RECORDS:
            _, lost = self._followed.popitem(last=False)
            lost.record.end(lost.count)

    def add(self, update: UsageUpdate) -> None:
        """Add what the engine reports."""
        self.has_reports = True
        self.step_s += update.step_s
        for tenant, values in update.growth.items():
            self._total(tenant).add(usage_of_values(values))
        for engine_id, _, values in update.ended:
            name = engine_id if engine_id in self._followed else engine_id.rpartition("-")[0]
            followed = self._followed.get(name)
            if followed is None:
                continue
            followed.record.usage.add(usage_of_values(values))
            followed.record.end()
            followed.count -= 1
            if not followed.count:
                del self._followed[name]

    def count(self, **growth: float) -> None:
        """Add to what vLLM itself counts."""
        for name, value in growth.items():
            self.counters[name] = self.counters.get(name, 0) + value

    def report(self) -> dict[str, Any]:
        """Return the totals, JSON-able: `since_s`, and `tenants` with the quantities that are not
        zero."""
        tenants = {name: usage.to_dict() for name, usage in self.totals.items()}
        return {"since_s": self.since_s, "tenants": tenants}

    def snapshot(self) -> dict[str, Any]:
        """Return what a status page shows: the sum over the tenants, the part without a tenant, and
        what the sum must equal."""
        total = RequestUsage()
        for usage in self.totals.values():
            total.add(usage)
        own = self.totals.get("", RequestUsage())
        return {
            "total": total.to_dict(),
            "without_tenant": own.to_dict(),
            "step_s": self.step_s,
            "vllm": dict(self.counters),
        }

    def _total(self, tenant: str) -> RequestUsage:
        if tenant not in self.totals and len(self.totals) >= MAX_TENANTS:
            tenant = OTHERS
        return self.totals.setdefault(tenant, RequestUsage())
