"""Admission of requests: they are sent, wait in fair order, or are refused if they would be late.

Requests wait here and not at replicas, because here their order can still change. `arrive` decides
at once:

- If no request waits and the replicas have room, the request is sent.
- If the prediction says that the request can be sent in time, and that it makes none of its
  tenant's later requests late, it waits. `next` returns it when its turn comes.
- Otherwise the request is refused. `Refused.retry_after_s` is the time after which the same
  prediction would admit it.

The prediction:

    wait = doubt * work of its tenant's requests before it / rate of its tenant (`rates`)
    TTFT = wait + stretch * (engine's queue when it is sent + seconds to compute its prompt)

`doubt` is adapted so that 95 % of requests wait no longer than predicted. It is needed because the
prefill time is only a mean until a plan reads the prompt, and many expensive prompts may follow
each other. `stretch` is adapted so that 95 % of the remaining times are no longer than predicted.
It is needed because step times are also fitted while other engines of the machine are idle, and
engines that share its cores take longer under load. The waits in a `Room` are multiplied by
`stretch`, too. Both factors are learned from the measured times of requests.

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

from headrace.gateway.admission.classes import DEFAULT, SloClass
from headrace.gateway.admission.costs import UNPRICED, Cost, Costs
from headrace.gateway.admission.fair import MAX_TENANTS, FairQueue, Waiting
from headrace.gateway.admission.rates import Rates
from headrace.gateway.admission.room import Room

LATE = 1.1
"""Factor of the TTFT target: an admitted request that would take longer is given up."""
MAX_RETRY_S = 60.0
DOUBT_GAIN, MAX_DOUBT, MAX_STRETCH = 0.1, 4.0, 8.0
BROKEN, MARGIN = 0.05, 0.05
"""Accepted share of failed predictions, and the tolerance as a share of the target.

A prediction fails if the measured time exceeds it by more than the tolerance.
"""


@dataclass(slots=True, eq=False)
class Ticket(Waiting):
    """A request that was admitted.

    Attributes:
        slo: SLO class of the request.
        cost: engine time that its tenant is charged.
        body_bytes: size of its body.
        arrived_s: time of arrival.
        expires_s: time at which it is given up if it still waits.
        sent_s: time at which it was sent; None while it waits.
        planned: whether a plan has given the time that its prompt takes.
        predicted_s: wait in the queue that was predicted on arrival.
        queue_s: wait at the engine that was predicted when it was sent.
    """

    slo: SloClass = DEFAULT
    cost: Cost = UNPRICED
    body_bytes: int = 0
    arrived_s: float = 0.0
    expires_s: float = math.inf
    sent_s: float | None = None
    planned: bool = False
    waits: bool = False
    predicted_s: float = 0.0
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
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
class Counts:
    """Numbers of requests since the start."""

    admitted: int = 0
    waited: int = 0
    refused: int = 0
    expired: int = 0


class Admission:
    """Admission of one gateway.

    Args:
        max_waiting: maximum number of requests in both queues together.
        one_tenant: whether all requests belong to one tenant, since no keys are configured.
    """

    def __init__(self, max_waiting: int = 1024, *, one_tenant: bool = False) -> None:
        self.costs = Costs()
        self.counts = Counts()
        self.rates = Rates(one=one_tenant)
        self.priced = False
        self.doubt = 1.0
        """Factor of predicted waits in the queue (module docstring); at least 1."""
        self.stretch = 1.0
        """Factor of predicted times after the queue (module docstring); at least 1."""
        self.had: OrderedDict[str, float] = OrderedDict()
        """Seconds of engine time that this gateway has charged each tenant since it started."""
        self._max_waiting = max_waiting
        self._front, self._back = FairQueue(), FairQueue()
        self._expiring: list[tuple[float, int, Ticket]] = []
        self._number = 0
        self._streams: dict[str, tuple[int, float | None]] = {}
        """Number of streams under way and ITL target, by SLO class."""

    # Arrival and queue

    def arrive(
        self, tenant: str, slo: SloClass, body_bytes: int, now_s: float, room: Room
    ) -> Ticket | Refused:
        """Send, queue or refuse a request that arrives; a ticket that `waits` is in the queue.

        Args:
            room: free capacity of the replicas; a request that is sent is deducted.
        """
        cost = UNPRICED
        if self.priced:
            cost = self.costs.expect(tenant, body_bytes, room.rows)
        ticket = Ticket(tenant, cost.total_s, slo.priority)
        ticket.slo, ticket.cost, ticket.body_bytes, ticket.arrived_s = slo, cost, body_bytes, now_s
        queue = self._back if slo.background else self._front
        if not self._front and not queue and self._may_go(slo, room):
            queue.passed(tenant, ticket.cost_s)
            self._send(ticket, now_s, room)
            return ticket
        own_s = self.stretch * cost.prefill_s + min(room.wait_s, room.lead_s)
        ticket.latest_s = now_s + max(0.0, slo.patience_s - own_s)
        refused = self._refused(ticket, queue, now_s)
        if refused is not None:
            self.counts.refused += 1
            return refused
        queue.push(ticket)
        ticket.waits = True
        self._number += 1
        ticket.expires_s = ticket.latest_s + (LATE - 1.0) * slo.patience_s
        heapq.heappush(self._expiring, (ticket.expires_s, self._number, ticket))
        self.rates.waits(now_s, somebody=bool(self._front))
        return ticket

    def next(self, now_s: float, room: Room) -> Ticket | None:
        """Return the next request to send; None if no request waits, or there is no room."""
        queue = self._front or self._back
        ticket = queue.first()
        if ticket is None:
            return None
        assert isinstance(ticket, Ticket)
        if not self._may_go(ticket.slo, room):
            return None
        queue.pop()
        self.counts.waited += 1
        self._learn(ticket, now_s)
        self._send(ticket, now_s, room)
        self.rates.waits(now_s, somebody=bool(self._front))
        return ticket

    def expired(self, now_s: float) -> Ticket | None:
        """Remove and return a request that would now be too late; None if there is none."""
        expiring = self._expiring
        while expiring and (not expiring[0][2].waits or expiring[0][0] <= now_s):
            ticket = heapq.heappop(expiring)[2]
            if ticket.waits:
                self.counts.expired += 1
                self._learn(ticket, now_s)
                self.cancel(ticket, now_s)
                return ticket
        return None

    def cancel(self, ticket: Ticket, now_s: float) -> None:
        """Remove a waiting request from its queue."""
        (self._back if ticket.slo.background else self._front).remove(ticket)
        ticket.waits = False
        self.rates.waits(now_s, somebody=bool(self._front))
        if len(self._expiring) > 64 + 4 * len(self):
            self._expiring = [each for each in self._expiring if each[2].waits]
            heapq.heapify(self._expiring)

    # Results

    def planned(self, ticket: Ticket, prefill_s: float) -> None:
        """Record the prefill time that a plan gives a request that was sent."""
        if ticket.planned or not self.priced or ticket.cost is UNPRICED:
            return
        ticket.planned = True
        self.costs.prefilled(ticket.tenant, ticket.body_bytes, prefill_s)
        self._correct(ticket, ticket.cost._replace(prefill_s=prefill_s))

    def ended(self, ticket: Ticket, answer_s: float | None, rows: float) -> None:
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
        self.costs.answered(ticket.tenant, answer_s)
        self._correct(ticket, ticket.cost._replace(answer_s=answer_s / rows))

    def began(self, ticket: Ticket, first_s: float) -> None:
        """Record that the first token of a request came `first_s` seconds after it was sent."""
        slo = ticket.slo
        if not ticket.planned or slo.background or slo.patience_s == math.inf:
            return
        promised_s = ticket.queue_s + self.stretch * ticket.cost.prefill_s
        broken = first_s > promised_s + MARGIN * slo.patience_s
        self.stretch = _learned(self.stretch, MAX_STRETCH, broken=broken)

    def had_elsewhere(self, tenant: str, seconds: float) -> None:
        """Charge a tenant for requests that another gateway has sent."""
        self._front.charge(tenant, seconds)

    def price(self, *, known: bool, engines: int) -> None:
        """Set whether the step times of replicas are known, and the number of engines."""
        if known != self.priced:
            self.priced = known
            self.rates.restart()
        self.rates.prior = float(max(1, engines))

    # State

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._front) + len(self._back)

    @property
    def itl_s(self) -> float:
        """Lowest ITL target of the streams under way; inf if none has one."""
        targets = (itl_s for _, itl_s in self._streams.values() if itl_s is not None)
        return min(targets, default=math.inf)

    def stats(self) -> dict[str, float | int]:
        """Return the state in JSON types."""
        counts = self.counts
        return {
            "waiting": len(self._front),
            "background_waiting": len(self._back),
            "tenants_waiting": self._front.tenants,
            "waiting_engine_s": round(self._front.cost_s, 3),
            "rate": round(self.rates.rate, 3),
            "doubt": round(self.doubt, 3),
            "stretch": round(self.stretch, 3),
            "predicted_wait_s": round(self._front.cost_s / self.rates.rate, 3),
            "priced": self.priced,
            "admitted": counts.admitted,
            "waited": counts.waited,
            "refused": counts.refused,
            "expired": counts.expired,
        }

    # Inside

    def _learn(self, ticket: Ticket, now_s: float) -> None:
        """Adapt `doubt` by comparing a request's wait with the prediction."""
        if ticket.slo.background:
            return
        promised_s = ticket.predicted_s * self.doubt + MARGIN * ticket.slo.patience_s
        broken = now_s - ticket.arrived_s > promised_s
        self.doubt = _learned(self.doubt, MAX_DOUBT, broken=broken)

    def _may_go(self, slo: SloClass, room: Room) -> bool:
        if slo.background:
            return room.open and room.idle and not self._front
        return room.open

    def _send(self, ticket: Ticket, now_s: float, room: Room) -> None:
        ticket.waits, ticket.sent_s, ticket.queue_s = False, now_s, room.wait_s
        room.take(self.stretch * ticket.cost.prefill_s)
        counts = self.counts
        counts.admitted += 1
        slo = ticket.slo
        count = self._streams.get(slo.name, (0, None))[0]
        self._streams[slo.name] = count + 1, slo.itl_target_s
        if not slo.background:
            self.rates.sent(ticket.tenant, ticket.cost_s, now_s)
            self._tell(ticket.tenant, ticket.cost_s)

    def _refused(self, ticket: Ticket, queue: FairQueue, now_s: float) -> Refused | None:
        rate = self.rates.rate
        if len(self) >= self._max_waiting:
            wait_s = queue.cost_s / rate
            return Refused("full", wait_s, _retry(wait_s / max(1, len(self))))
        slack_s = ticket.latest_s - now_s
        if slack_s <= 0.0:
            return Refused("late", queue.cost_s / rate, _retry(queue.cost_s / rate))
        if ticket.slo.background:
            wait_s = (queue.cost_s + self._front.cost_s) / rate
            late_s = wait_s - slack_s
            return Refused("late", wait_s, _retry(late_s)) if late_s > 0.0 else None
        rate = self.rates.of(ticket.tenant, now_s)
        own = queue.of(ticket.tenant)
        place = queue.place_of(ticket)
        ahead_s = sum(each.cost_s for each in own[:place])
        wait_s = ahead_s / rate
        ticket.predicted_s = wait_s
        rate /= self.doubt
        late_s = ahead_s / rate - slack_s
        ahead_s += ticket.cost_s
        for each in own[place:]:
            late_s = max(late_s, ahead_s / rate - (each.latest_s - now_s))
            ahead_s += each.cost_s
        return Refused("late", wait_s, _retry(late_s)) if late_s > 0.0 else None

    def _correct(self, ticket: Ticket, cost: Cost) -> None:
        more_s = cost.total_s - ticket.cost_s
        ticket.cost, ticket.cost_s = cost, cost.total_s
        (self._back if ticket.slo.background else self._front).charge(ticket.tenant, more_s)
        if not ticket.slo.background:
            self._tell(ticket.tenant, more_s)

    def _tell(self, tenant: str, seconds: float) -> None:
        self.had[tenant] = self.had.get(tenant, 0.0) + seconds
        self.had.move_to_end(tenant)
        if len(self.had) > MAX_TENANTS:
            self.had.popitem(last=False)


def _learned(factor: float, most: float, *, broken: bool) -> float:
    """Return a factor of predictions after one of them was tested.

    The factor takes a step up if the prediction was broken, and a small one down if it was kept. In
    the long run the share `BROKEN` of predictions is broken (Robbins and Monro, 1951).
    """
    return min(most, max(1.0, factor + DOUBT_GAIN * (broken - BROKEN)))


def _retry(seconds: float) -> float:
    return min(MAX_RETRY_S, max(0.0, seconds))
