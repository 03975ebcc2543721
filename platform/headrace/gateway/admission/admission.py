"""Admits requests, has them wait in fair order, and refuses those that would come too late.

Requests wait here and not at replicas, because here their order can still change. `arrive` says at
once what becomes of a request:

- nobody waits, the replicas have room, and it would come in time: it goes;
- the prediction says that it can be sent in time, and that none of its tenant's requests behind it
  comes too late by that: it waits, and `next` gives it out when it is its turn;
- else it is refused. `Refused.retry_after_s` is when the same prediction would admit it.

The prediction:

    wait = doubt * work of its tenant's requests before it / what its tenant can count on (`rates`)
    TTFT = wait + stretch * (engine's queue when it is sent + seconds to compute its prompt)

`doubt` has predictions of the wait kept 19 times of 20. What prompts take is only a mean until a
plan reads them, so many expensive ones may stand one behind the other. `stretch` has those of the
rest kept as often. Step times are fitted while other engines of the machine are idle, too, and
engines that share its cores take longer under load. The room that the view shows is stretched
likewise. Both are learned from what requests turned out to take.

A prompt that alone takes longer than its target is admitted while nobody waits: it will not get
faster. While all engines are idle a request goes whatever `stretch` is: other prompts are what
stretches one, and `stretch` is learned from requests that go. A tenant's requests pass another
tenant's only up to its fair part, so an admitted request stays in time whatever others send. Where
a prediction fails all the same (a replica dies), a request is given up when its first token would
come at `LATE` times its target.

Background requests have a queue of their own, which moves while nobody waits in the first one and
no engine has a prompt to compute. They have no target, and are refused when the queue is full, or
when even all engines together would come too late.

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
from headrace.gateway.admission.fair import MOST_TENANTS, FairQueue, Waiting
from headrace.gateway.admission.rates import Rates
from headrace.gateway.admission.room import Room

LATE = 1.1
"""An admitted request whose first token would come so much later than it should is given up."""
MOST_RETRY_S = 60.0
DOUBT_GAIN, MOST_DOUBT, MOST_STRETCH = 0.1, 4.0, 8.0
BROKEN, MARGIN = 0.05, 0.05
"""Share of waits that may be longer than predicted, by more than this part of the target."""


@dataclass(slots=True, eq=False)
class Ticket(Waiting):
    """A request that was admitted.

    Attributes:
        slo: its class. cost: what it is charged. body_bytes: of its body.
        arrived_s: when it came. expires_s: when it is given up, if it still waits.
        sent_s: when it was sent; None while it waits.
        planned: whether it is known how long its prompt takes.
        predicted_s: wait in the queue, when it came.
        queue_s: predicted wait at the engine, when it was sent.
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
    """A request is refused.

    Attributes:
        why: `full` or `late`.
        wait_s: predicted until it would be sent. retry_after_s: until it would be admitted.
    """

    why: Literal["full", "late"]
    wait_s: float
    retry_after_s: float


@dataclass(slots=True)
class Counts:
    """Since the start."""

    admitted: int = 0
    waited: int = 0
    refused: int = 0
    expired: int = 0


class Admission:
    """One gateway's.

    Args:
        max_waiting: most requests in both queues together.
        one_tenant: whether all requests are one tenant's, since no keys are configured.
    """

    def __init__(self, max_waiting: int = 1024, *, one_tenant: bool = False) -> None:
        self.costs = Costs()
        self.counts = Counts()
        self.rates = Rates(one=one_tenant)
        self.priced = False
        self.doubt = 1.0
        """See above; at least 1."""
        self.stretch = 1.0
        """Likewise."""
        self.had: OrderedDict[str, float] = OrderedDict()
        """Seconds that each tenant has had from this gateway since it started."""
        self._max_waiting = max_waiting
        self._front, self._back = FairQueue(), FairQueue()
        self._expiring: list[tuple[float, int, Ticket]] = []
        self._number = 0
        self._streams: dict[str, tuple[int, float | None]] = {}
        """Of each class: streams under way, and its ITL target."""

    # What comes

    def arrive(
        self, tenant: str, slo: SloClass, body_bytes: int, now_s: float, room: Room
    ) -> Ticket | Refused:
        """A request has come; a ticket that `waits` is in the queue.

        Args:
            room: what the replicas can take; what is sent is taken off.
        """
        cost = UNPRICED
        if self.priced:
            cost = self.costs.expect(tenant, body_bytes, room.rows)
        ticket = Ticket(tenant, cost.total_s, slo.priority)
        ticket.slo, ticket.cost, ticket.body_bytes, ticket.arrived_s = slo, cost, body_bytes, now_s
        queue = self._back if slo.background else self._front
        own_s = self.stretch * cost.prefill_s + min(room.wait_s, room.lead_s)
        hopeless = cost.prefill_s > slo.patience_s
        in_time = room.idle or hopeless or own_s <= slo.patience_s
        if not self._front and not queue and in_time and self._may_go(slo, room):
            queue.passed(tenant, ticket.cost_s)
            self._send(ticket, now_s, room)
            return ticket
        ticket.latest_s = now_s + max(0.0, slo.patience_s - own_s)
        refused = self._refused(ticket, queue, now_s, own_s)
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
        """The next request to send; None if nobody waits, or there is no room."""
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
        """A request that waits in vain, taken out of the queue; None if there is none."""
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
        """A request that waits is not wanted any more."""
        (self._back if ticket.slo.background else self._front).remove(ticket)
        ticket.waits = False
        self.rates.waits(now_s, somebody=bool(self._front))
        if len(self._expiring) > 64 + 4 * len(self):
            self._expiring = [each for each in self._expiring if each[2].waits]
            heapq.heapify(self._expiring)

    # What became of it

    def planned(self, ticket: Ticket, prefill_s: float) -> None:
        """A plan was made for a request that was sent: so long its prompt takes."""
        if ticket.planned or not self.priced or ticket.cost is UNPRICED:
            return
        ticket.planned = True
        self.costs.prefilled(ticket.tenant, ticket.body_bytes, prefill_s)
        self._correct(ticket, ticket.cost._replace(prefill_s=prefill_s))

    def ended(self, ticket: Ticket, answer_s: float | None, rows: float) -> None:
        """A request that was sent has ended.

        Args:
            answer_s: seconds from its first token to its last; None if it had none.
            rows: streams that shared its engine, at least 1.
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
        """The first token of a request came so long after it was sent."""
        slo = ticket.slo
        if not ticket.planned or slo.background or slo.patience_s == math.inf:
            return
        promised_s = ticket.queue_s + self.stretch * ticket.cost.prefill_s
        broken = first_s > promised_s + MARGIN * slo.patience_s
        self.stretch = _learned(self.stretch, MOST_STRETCH, broken=broken)

    def had_elsewhere(self, tenant: str, seconds: float) -> None:
        """Another gateway has sent requests of a tenant."""
        self._front.charge(tenant, seconds)

    def price(self, *, known: bool, engines: int) -> None:
        """Whether replicas have told what their steps take, and how many engines there are."""
        if known != self.priced:
            self.priced = known
            self.rates.restart()
        self.rates.prior = float(max(1, engines))

    # How it stands

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._front) + len(self._back)

    @property
    def itl_s(self) -> float:
        """The least ITL target of the streams under way; inf for none."""
        targets = (itl_s for _, itl_s in self._streams.values() if itl_s is not None)
        return min(targets, default=math.inf)

    def stats(self) -> dict[str, float | int]:
        """JSON-able state."""
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
        """A prediction of the wait is put to the test."""
        if ticket.slo.background:
            return
        promised_s = ticket.predicted_s * self.doubt + MARGIN * ticket.slo.patience_s
        broken = now_s - ticket.arrived_s > promised_s
        self.doubt = _learned(self.doubt, MOST_DOUBT, broken=broken)

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

    def _refused(
        self, ticket: Ticket, queue: FairQueue, now_s: float, own_s: float
    ) -> Refused | None:
        rate = self.rates.rate
        if len(self) >= self._max_waiting:
            wait_s = queue.cost_s / rate
            return Refused("full", wait_s, _retry(wait_s / max(1, len(self))))
        slack_s = ticket.latest_s - now_s
        if slack_s <= 0.0:
            wait_s = queue.cost_s / rate
            return Refused("late", wait_s, _retry(max(wait_s, own_s - ticket.slo.patience_s)))
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
        if len(self.had) > MOST_TENANTS:
            self.had.popitem(last=False)


def _learned(factor: float, most: float, *, broken: bool) -> float:
    """A factor of predictions after one of them was put to the test: a step up if it was broken, a
    small one down if it was kept, so that `BROKEN` of them are broken (Robbins and Monro, 1951)."""
    return min(most, max(1.0, factor + DOUBT_GAIN * (broken - BROKEN)))


def _retry(seconds: float) -> float:
    return min(MOST_RETRY_S, max(0.0, seconds))
