"""Admission of requests: they are sent, wait in fair order, or are refused if they would be late.

Requests wait here and not at replicas, because here their order can still change. `arrive` decides
at once:

- If no request waits and the replicas have room, the request is sent.
- If the prediction says that the request can be sent in time, and that it makes none of its
  tenant's later requests late, it waits. `next` returns it in its order.
- Otherwise the request is refused. `Refusal.retry_after_s` is the time after which the same
  prediction would admit it.

Of a tenant's requests of one priority, the one that is due first is sent first:

    due = latest                                                if its class has a TTFT target
    due = min(latest, arrival + MAX_STRETCH * prefill time)     otherwise

where `latest` is the time at which it must have been sent. The second rule is the one by which
prompts wait at an engine (`headrace_engine.prefill_admission`).

The prediction:

    wait = wait_safety_factor * work of its tenant's requests before it / rate of its tenant
    TTFT = wait + prefill_safety_factor * (engine's queue when it is sent + prefill time)

`wait_safety_factor` is adapted so that 95 % of requests wait no longer than predicted. It is needed
because the prefill time is only a mean until a plan reads the prompt, and many expensive prompts
may follow each other. `prefill_safety_factor` is adapted so that 95 % of the remaining times are no
longer than predicted. It is needed because step times are also fitted while other engines of the
machine are idle, and engines that share its cores take longer under load. The waits in a `Capacity`
are multiplied by `prefill_safety_factor`, too. Both factors are learned from the measured times of
requests.

A prompt that alone takes longer than its target is admitted only if no request waits and the
replicas have room: waiting would not make it faster. A tenant's requests pass another tenant's
requests only up to its fair part, so an admitted request stays in time whatever other tenants send.
If a prediction still fails (a replica dies), a request is given up when its first token would come
at `LATE` times its target.

Background requests have a queue of their own. It moves while the first queue is empty and no engine
has a prompt to compute. Background requests are refused when the queue is full, or when even all
engines together could not send them in time.

Pure: no clock, no I/O. One thread owns it.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from headrace.gateway.admission.capacity import Capacity
from headrace.gateway.admission.fair_queue import MAX_TENANTS, FairQueue, QueuedRequest
from headrace.gateway.admission.queue_rates import QueueRates
from headrace.gateway.admission.request_costs import UNPRICED, Cost, RequestCosts
from headrace.gateway.admission.slo_classes import DEFAULT, SloClass
from headrace_engine.prefill_admission import MAX_STRETCH

LATE = 1.1
"""Factor of the TTFT target: an admitted request that would take longer is given up."""
MAX_RETRY_S = 60.0
FACTOR_GAIN, MAX_WAIT_FACTOR, MAX_PREFILL_FACTOR = 0.1, 4.0, 8.0
MISS_SHARE, TOLERANCE = 0.05, 0.05
"""Accepted share of failed predictions, and the tolerance as a share of the target.

A prediction fails if the measured time exceeds it by more than the tolerance.
"""


@dataclass(slots=True, eq=False)
class Ticket(QueuedRequest):
    """A request that was admitted.

    Attributes:
        slo: SLO class of the request.
        cost: engine time that its tenant is charged.
        body_bytes: size of its body.
        arrived_s: time of arrival.
        latest_s: time at which it must have been sent to be in time.
        expires_s: time at which it is given up if it still waits.
        sent_s: time at which it was sent; None while it waits.
        is_planned: whether a plan has given the time that its prompt takes.
        predicted_s: wait in the queue that was predicted on arrival.
        engine_wait_s: wait at the engine that was predicted on arrival.
        queue_s: wait at the engine that was predicted when it was sent.
    """

    slo: SloClass = DEFAULT
    cost: Cost = UNPRICED
    body_bytes: int = 0
    arrived_s: float = 0.0
    latest_s: float = 0.0
    expires_s: float = math.inf
    sent_s: float | None = None
    is_planned: bool = False
    is_waiting: bool = False
    predicted_s: float = 0.0
    engine_wait_s: float = 0.0
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a request.

    Attributes:
        why: `full` or `late`.
        wait_s: predicted time until the request would be sent.
        retry_after_s: predicted time until it would be admitted.
    """

    why: Literal["full", "late"]
    wait_s: float
    retry_after_s: float


@dataclass(slots=True)
class AdmissionCounts:
    """Numbers of requests since the start."""

    admitted: int = 0
    waited: int = 0
    refused: int = 0
    expired: int = 0


class AdmissionController:
    """Admission of one gateway.

    Args:
        max_waiting: maximum number of requests in both queues together.
        one_tenant: whether all requests belong to one tenant, since no keys are configured.
    """

    def __init__(self, max_waiting: int = 1024, *, one_tenant: bool = False) -> None:
        self.costs = RequestCosts()
        self.counts = AdmissionCounts()
        self.rates = QueueRates(one_tenant=one_tenant)
        self.priced = False
        self.wait_safety_factor = 1.0
        """Factor of predicted waits in the queue (module docstring); at least 1."""
        self.prefill_safety_factor = 1.0
        """Factor of predicted times after the queue (module docstring); at least 1."""
        self.charged_s: OrderedDict[str, float] = OrderedDict()
        """Seconds of engine time that this gateway has charged each tenant since it started."""
        self._max_waiting = max_waiting
        self._foreground: FairQueue[Ticket] = FairQueue()
        self._background: FairQueue[Ticket] = FairQueue()
        self._expiring: list[tuple[float, int, Ticket]] = []
        self._number = 0
        self._streams: dict[str, tuple[int, float | None]] = {}
        """Number of streams under way and ITL target, by SLO class."""

    # Arrival and queue

    def arrive(
        self, tenant: str, slo: SloClass, body_bytes: int, now_s: float, capacity: Capacity
    ) -> Ticket | Refusal:
        """Send, queue or refuse a request that arrives; a ticket that `is_waiting` is in the queue.

        Args:
            capacity: free capacity of the replicas; a request that is sent is deducted.
        """
        cost = UNPRICED
        if self.priced:
            cost = self.costs.predict(tenant, body_bytes, capacity.rows)
        ticket = Ticket(tenant, cost.total_s, slo.priority)
        ticket.slo, ticket.cost, ticket.body_bytes, ticket.arrived_s = slo, cost, body_bytes, now_s
        queue = self._background if slo.background else self._foreground
        if not self._foreground and not queue and self._may_send(slo, capacity):
            queue.charge_unqueued(tenant, ticket.cost_s)
            self._send(ticket, now_s, capacity)
            return ticket
        ticket.engine_wait_s = min(capacity.wait_s, capacity.lead_s)
        self._set_times(ticket)
        refused = self._refusal_of(ticket, queue, now_s)
        if refused is not None:
            self.counts.refused += 1
            return refused
        self._push(ticket)
        self.rates.set_waiting(now_s, waiting=bool(self._foreground))
        return ticket

    def set_prefill(self, ticket: Ticket, prefill_s: float) -> None:
        """Set the time that a waiting request's prompt takes, now that its blocks are known."""
        if not ticket.is_waiting or ticket.cost is UNPRICED:
            return
        self._queue_of(ticket).remove(ticket)
        ticket.cost = ticket.cost._replace(prefill_s=prefill_s)
        ticket.cost_s = ticket.cost.total_s
        self._set_times(ticket)
        self._push(ticket)

    def next(self, now_s: float, capacity: Capacity) -> Ticket | None:
        """Return the next request to send; None if no request waits, or there is no room."""
        queue = self._foreground or self._background
        ticket = queue.first()
        if ticket is None:
            return None
        if not self._may_send(ticket.slo, capacity):
            return None
        queue.pop()
        self.counts.waited += 1
        self._adapt_wait_factor(ticket, now_s)
        self._send(ticket, now_s, capacity)
        self.rates.set_waiting(now_s, waiting=bool(self._foreground))
        return ticket

    def pop_expired(self, now_s: float) -> Ticket | None:
        """Remove and return a request that would now be too late; None if there is none."""
        expiring = self._expiring
        while expiring and (not _is_current(expiring[0]) or expiring[0][0] <= now_s):
            entry = heapq.heappop(expiring)
            if _is_current(entry):
                ticket = entry[2]
                self.counts.expired += 1
                self._adapt_wait_factor(ticket, now_s)
                self.cancel(ticket, now_s)
                return ticket
        return None

    def cancel(self, ticket: Ticket, now_s: float) -> None:
        """Remove a waiting request from its queue."""
        self._queue_of(ticket).remove(ticket)
        ticket.is_waiting = False
        self.rates.set_waiting(now_s, waiting=bool(self._foreground))

    # Results

    def record_plan(self, ticket: Ticket, prefill_s: float) -> None:
        """Record the prefill time that a plan gives a request that was sent."""
        if ticket.is_planned or not self.priced or ticket.cost is UNPRICED:
            return
        ticket.is_planned = True
        self.costs.record_prefill(ticket.tenant, ticket.body_bytes, prefill_s)
        self._correct(ticket, ticket.cost._replace(prefill_s=prefill_s))

    def record_end(self, ticket: Ticket, answer_s: float | None, rows: float) -> None:
        """Record that a request that was sent has ended.

        Args:
            answer_s: seconds from its first token to its last; None if it had none.
            rows: number of streams that shared its engine, at least 1.
        """
        slo = ticket.slo
        left = self._streams.get(slo.name, (0, None))[0] - 1
        if left > 0:
            self._streams[slo.name] = left, slo.itl_target_s
        else:
            self._streams.pop(slo.name, None)
        if answer_s is None or not self.priced or ticket.cost is UNPRICED:
            return
        self.costs.record_answer(ticket.tenant, answer_s)
        self._correct(ticket, ticket.cost._replace(answer_s=answer_s / rows))

    def record_first_token(self, ticket: Ticket, first_s: float) -> None:
        """Record that the first token of a request came `first_s` seconds after it was sent."""
        slo = ticket.slo
        if not ticket.is_planned or slo.background or slo.patience_s == math.inf:
            return
        predicted_s = ticket.queue_s + self.prefill_safety_factor * ticket.cost.prefill_s
        missed = first_s > predicted_s + TOLERANCE * slo.patience_s
        self.prefill_safety_factor = _adapted(
            self.prefill_safety_factor, MAX_PREFILL_FACTOR, missed=missed
        )

    def record_peer_usage(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for requests that another gateway has sent."""
        self._foreground.charge(tenant, seconds)

    def set_engines(self, *, priced: bool, engines: int) -> None:
        """Set whether the step times of replicas are known, and the number of engines."""
        if priced != self.priced:
            self.priced = priced
            self.rates.restart()
        self.rates.prior = float(max(1, engines))

    # State

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._foreground) + len(self._background)

    @property
    def itl_s(self) -> float:
        """Lowest ITL target of the streams under way; inf if none has one."""
        targets = (itl_s for _, itl_s in self._streams.values() if itl_s is not None)
        return min(targets, default=math.inf)

    def stats(self) -> dict[str, float | int]:
        """Return the state in JSON types."""
        counts = self.counts
        return {
            "waiting": len(self._foreground),
            "background_waiting": len(self._background),
            "tenants_waiting": self._foreground.tenants,
            "waiting_engine_s": round(self._foreground.cost_s, 3),
            "rate": round(self.rates.rate, 3),
            "wait_safety_factor": round(self.wait_safety_factor, 3),
            "prefill_safety_factor": round(self.prefill_safety_factor, 3),
            "predicted_wait_s": round(self._foreground.cost_s / self.rates.rate, 3),
            "priced": self.priced,
            "admitted": counts.admitted,
            "waited": counts.waited,
            "refused": counts.refused,
            "expired": counts.expired,
        }

    # Inside

    def _queue_of(self, ticket: Ticket) -> FairQueue[Ticket]:
        return self._background if ticket.slo.background else self._foreground

    def _set_times(self, ticket: Ticket) -> None:
        """Set when a request must have been sent, and when it is due (module docstring)."""
        slo, prefill_s = ticket.slo, ticket.cost.prefill_s
        own_s = self.prefill_safety_factor * prefill_s + ticket.engine_wait_s
        ticket.latest_s = ticket.due_s = ticket.arrived_s + max(0.0, slo.patience_s - own_s)
        if slo.ttft_target_s is None:
            ticket.due_s = min(ticket.latest_s, ticket.arrived_s + MAX_STRETCH * prefill_s)

    def _push(self, ticket: Ticket) -> None:
        self._queue_of(ticket).push(ticket)
        ticket.is_waiting = True
        self._number += 1
        ticket.expires_s = ticket.latest_s + (LATE - 1.0) * ticket.slo.patience_s
        heapq.heappush(self._expiring, (ticket.expires_s, self._number, ticket))
        if len(self._expiring) > 64 + 4 * len(self):
            self._expiring = [each for each in self._expiring if _is_current(each)]
            heapq.heapify(self._expiring)

    def _adapt_wait_factor(self, ticket: Ticket, now_s: float) -> None:
        """Adapt `wait_safety_factor` by comparing a request's wait with the prediction."""
        if ticket.slo.background:
            return
        predicted_s = (
            ticket.predicted_s * self.wait_safety_factor + TOLERANCE * ticket.slo.patience_s
        )
        missed = now_s - ticket.arrived_s > predicted_s
        self.wait_safety_factor = _adapted(self.wait_safety_factor, MAX_WAIT_FACTOR, missed=missed)

    def _may_send(self, slo: SloClass, capacity: Capacity) -> bool:
        if slo.background:
            return capacity.has_room and capacity.is_idle and not self._foreground
        return capacity.has_room

    def _send(self, ticket: Ticket, now_s: float, capacity: Capacity) -> None:
        ticket.is_waiting, ticket.sent_s, ticket.queue_s = False, now_s, capacity.wait_s
        capacity.take(self.prefill_safety_factor * ticket.cost.prefill_s)
        counts = self.counts
        counts.admitted += 1
        slo = ticket.slo
        count = self._streams.get(slo.name, (0, None))[0]
        self._streams[slo.name] = count + 1, slo.itl_target_s
        if not slo.background:
            self.rates.record_sent(ticket.tenant, ticket.cost_s, now_s)
            self._record_charge(ticket.tenant, ticket.cost_s)

    def _refusal_of(self, ticket: Ticket, queue: FairQueue[Ticket], now_s: float) -> Refusal | None:
        rate = self.rates.rate
        if len(self) >= self._max_waiting:
            wait_s = queue.cost_s / rate
            return Refusal("full", wait_s, _retry(wait_s / max(1, len(self))))
        slack_s = ticket.latest_s - now_s
        if slack_s <= 0.0:
            return Refusal("late", queue.cost_s / rate, _retry(queue.cost_s / rate))
        if ticket.slo.background:
            wait_s = (queue.cost_s + self._foreground.cost_s) / rate
            late_s = wait_s - slack_s
            return Refusal("late", wait_s, _retry(late_s)) if late_s > 0.0 else None
        rate = self.rates.rate_of(ticket.tenant, now_s)
        own = queue.requests_of(ticket.tenant)
        place = queue.position_of(ticket)
        ahead_s = sum(each.cost_s for each in own[:place])
        wait_s = ahead_s / rate
        ticket.predicted_s = wait_s
        rate /= self.wait_safety_factor
        late_s = ahead_s / rate - slack_s
        ahead_s += ticket.cost_s
        for each in own[place:]:
            if each.latest_s > each.arrived_s:  # else it alone takes longer than its target
                late_s = max(late_s, ahead_s / rate - (each.latest_s - now_s))
            ahead_s += each.cost_s
        return Refusal("late", wait_s, _retry(late_s)) if late_s > 0.0 else None

    def _correct(self, ticket: Ticket, cost: Cost) -> None:
        more_s = cost.total_s - ticket.cost_s
        ticket.cost, ticket.cost_s = cost, cost.total_s
        self._queue_of(ticket).charge(ticket.tenant, more_s)
        if not ticket.slo.background:
            self._record_charge(ticket.tenant, more_s)

    def _record_charge(self, tenant: str, seconds: float) -> None:
        self.charged_s[tenant] = self.charged_s.get(tenant, 0.0) + seconds
        self.charged_s.move_to_end(tenant)
        if len(self.charged_s) > MAX_TENANTS:
            self.charged_s.popitem(last=False)


def _is_current(entry: tuple[float, int, Ticket]) -> bool:
    """Return whether an entry of the expiring requests is its request's last."""
    return entry[2].is_waiting and entry[0] == entry[2].expires_s


def _adapted(factor: float, maximum: float, *, missed: bool) -> float:
    """Return a factor of predictions after one of them was tested.

    The factor takes a step up if the prediction was missed, and a small one down if it was kept. In
    the long run the share `MISS_SHARE` of predictions is missed (Robbins and Monro, 1951).
    """
    return min(maximum, max(1.0, factor + FACTOR_GAIN * (missed - MISS_SHARE)))


def _retry(seconds: float) -> float:
    return min(MAX_RETRY_S, max(0.0, seconds))
