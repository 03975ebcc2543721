"""Start-time fair queueing over tenants, in predicted seconds of engine time.

Each tenant has a virtual counter, the seconds that it has had. The next request is the first one of
the tenant with the lowest counter; then this counter grows by the cost of the request (Goyal, Vin
and Cheng, "Start-time fair queuing", 1996). The queue's virtual time is the counter of the tenant
that was served last. The counter of a tenant that arrives or returns starts there at the earliest.
Time that a tenant does not use goes to the others: the tenant gains no credit, and the others have
no debt.

While two tenants both wait, their service differs by at most the largest request of each (the
paper's theorem 1) plus the error of the predictions. The error is corrected (`charge`) as soon as
it is known. No counter is ever more than `MAX_AHEAD_S` ahead of the virtual time, so no debt lasts
longer either.

A tenant's own requests are ordered by priority (highest first), then by the time at which they are
due, then by arrival.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_AHEAD_S = 60.0
"""Maximum lead of a tenant's counter over the virtual time, in seconds."""
MAX_TENANTS = 4096
"""Maximum number of counters that are kept for tenants without a waiting request."""

Order = tuple[int, float, int]


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in the queue.

    Attributes:
        tenant: the request's tenant.
        cost_s: predicted seconds of engine time, above 0.
        priority: rank among the tenant's requests; higher goes first.
        due_s: time at which it should have been sent.
        order: sort key among the tenant's requests; `push` sets it.
    """

    tenant: str
    cost_s: float
    priority: int = 0
    due_s: float = 0.0
    order: Order = (0, 0.0, 0)


Request = TypeVar("Request", bound=QueuedRequest)


@dataclass(slots=True, eq=False)
class _Tenant(Generic[Request]):
    """A tenant with waiting requests."""

    start_s: float
    queue: list[Request] = field(default_factory=list)


def _order(waiting: QueuedRequest) -> Order:
    return waiting.order


class FairQueue(Generic[Request]):
    """The requests that wait. Not thread-safe."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._backlog: dict[str, _Tenant[Request]] = {}
        self._ends: OrderedDict[str, float] = OrderedDict()
        """Counters of tenants without a waiting request that are ahead of the virtual time."""
        self._heap: list[tuple[float, int, str]] = []
        self._number = 0
        self._size = 0
        self.cost_s = 0.0
        """Cost of all waiting requests."""

    def __len__(self) -> int:
        return self._size

    @property
    def tenants(self) -> int:
        """Number of tenants with waiting requests."""
        return len(self._backlog)

    def __iter__(self) -> Iterator[Request]:
        for tenant in self._backlog.values():
            yield from tenant.queue

    def requests_of(self, tenant: str) -> list[Request]:
        """Return a tenant's waiting requests in order. The caller must not change the list."""
        found = self._backlog.get(tenant)
        return [] if found is None else found.queue

    def position_of(self, waiting: Request) -> int:
        """Return the index that a new request would have among its tenant's requests."""
        key = (-waiting.priority, waiting.due_s, self._number + 1)
        return bisect_left(self.requests_of(waiting.tenant), key, key=_order)

    def push(self, waiting: Request) -> None:
        """Add a request."""
        self._number += 1
        waiting.order = (-waiting.priority, waiting.due_s, self._number)
        tenant = self._backlog.get(waiting.tenant)
        if tenant is None:
            start_s = self._counter(waiting.tenant)
            tenant = self._backlog[waiting.tenant] = _Tenant(start_s)
            self._push_counter(waiting.tenant, start_s)
        insort(tenant.queue, waiting, key=_order)
        self.cost_s += waiting.cost_s
        self._size += 1

    def first(self) -> Request | None:
        """Return the next request without removing it; None if no request waits."""
        heap = self._heap
        while heap:
            start_s, _, name = heap[0]
            tenant = self._backlog.get(name)
            if tenant is not None and tenant.start_s == start_s:
                return tenant.queue[0]
            heapq.heappop(heap)  # entry of an earlier counter
        return None

    def pop(self) -> Request:
        """Remove and return the next request, and charge its tenant.

        Raises:
            LookupError: no request waits.
        """
        waiting = self.first()
        if waiting is None:
            raise LookupError("no request waits")
        tenant = self._backlog[waiting.tenant]
        self._virtual_s = tenant.start_s
        tenant.start_s += waiting.cost_s
        self._remove_at(tenant, waiting, 0)
        return waiting

    def remove(self, waiting: Request) -> None:
        """Remove a request that was not sent, without a charge.

        Raises:
            LookupError: the request does not wait.
        """
        tenant = self._backlog[waiting.tenant]
        at = bisect_left(tenant.queue, waiting.order, key=_order)
        if at == len(tenant.queue) or tenant.queue[at] is not waiting:
            raise LookupError("the request does not wait")
        self._remove_at(tenant, waiting, at)

    def charge_unqueued(self, tenant: str, cost_s: float) -> None:
        """Charge a tenant for a request that was sent at once, because no request waited."""
        start_s = self._counter(tenant)
        self._virtual_s = start_s
        self._set_counter(tenant, start_s + cost_s)

    def charge(self, tenant: str, seconds: float) -> None:
        """Correct a tenant's counter by seconds that were charged too little (too much if < 0)."""
        waits = self._backlog.get(tenant)
        if waits is None:
            end_s = self._counter(tenant) + seconds
            if not self._size and seconds > 0.0:  # the virtual time of an empty queue advances
                self._virtual_s = max(self._virtual_s, end_s - seconds)
            self._set_counter(tenant, end_s)
            return
        start_s = min(waits.start_s + seconds, self._virtual_s + MAX_AHEAD_S)
        waits.start_s = max(self._virtual_s, start_s)
        self._push_counter(tenant, waits.start_s)

    def _counter(self, tenant: str) -> float:
        return max(self._virtual_s, self._ends.get(tenant, 0.0))

    def _set_counter(self, tenant: str, end_s: float) -> None:
        ends = self._ends
        if end_s <= self._virtual_s:
            ends.pop(tenant, None)
            return
        ends[tenant] = min(end_s, self._virtual_s + MAX_AHEAD_S)
        ends.move_to_end(tenant)
        if len(ends) > MAX_TENANTS:
            ends.popitem(last=False)

    def _remove_at(self, tenant: _Tenant[Request], waiting: Request, at: int) -> None:
        name = waiting.tenant
        del tenant.queue[at]
        self._size -= 1
        if self._size:
            self.cost_s -= waiting.cost_s
        else:
            self.cost_s = 0.0
        if tenant.queue:
            tenant.start_s = min(tenant.start_s, self._virtual_s + MAX_AHEAD_S)
            self._push_counter(name, tenant.start_s)
        else:
            del self._backlog[name]
            self._set_counter(name, tenant.start_s)

    def _push_counter(self, name: str, start_s: float) -> None:
        self._number += 1
        heapq.heappush(self._heap, (start_s, self._number, name))
        if len(self._heap) > 64 + 4 * len(self._backlog):
            backlog = self._backlog.items()
            self._heap = [(each.start_s, at, name) for at, (name, each) in enumerate(backlog)]
            heapq.heapify(self._heap)
