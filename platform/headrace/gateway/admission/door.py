"""The queue in front of the replicas, for asyncio: requests wait here until it is their turn.

The gateway computes the free capacity of the replicas (`room`) from its view of them, at most every
`LOOK_S`, and every `TURN_S` while a request waits. If the last computed room is older and still
open, an arriving request is sent at once and the room is updated after it. If no replica has
reported its step times, the room follows from the number of requests at each replica, which is at
most `requests_per_replica`. While no replica is known, requests pass this queue without waiting:
the relay waits for a replica, and answers with an error if none becomes ready.

Several gateways share the replicas. Each sees the others' requests in the replicas' reports, and
does not use the capacity that they take. About once a second each gateway asks the others how much
engine time every tenant has had there, and charges it here. A tenant therefore has one share,
however many gateways it uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from headrace.gateway import errors
from headrace.gateway.admission.admission import Admission, Refused, Ticket
from headrace.gateway.admission.classes import AdmissionOptions, SloClass
from headrace.gateway.admission.costs import MIN_S
from headrace.gateway.admission.room import Room, room_of
from headrace.router.cluster import NO_TARGETS, Cluster, Targets
from headrace.router.plan import Plan
from headrace_engine.supervise import supervise

logger = logging.getLogger("headrace.gateway")

LOOK_S, TURN_S = 0.05, 0.02
PEERS_S = 1.0
REPORT_S = 0.05
"""Maximum time that a report is assumed to be under way."""
UNSEEN_S = 2.0
"""Time after which a request that no report shows is no longer counted."""
_PROMPT_TOKENS, _GAIN = 256.0, 0.05

Peers = Callable[[], Awaitable[Mapping[str, Mapping[str, float]]]]
"""Function that returns the seconds that each other gateway has charged each tenant since that
gateway started: by gateway, then by tenant."""

_sent: ContextVar[Ticket | None] = ContextVar("headrace_admitted", default=None)


class Places(Protocol):
    """The decode replicas (`headrace.gateway.replicas.ReplicaPool`)."""

    def places(self, most: int) -> tuple[int, int, int]:
        """Return the number of available replicas, the number of requests that they can take
        together until each has `most`, and the number that they have."""


class Door:
    """One gateway's queue. Use it from its event loop.

    Args:
        options: the SLO classes, and the maximum length of the queue.
        pool: the decode replicas.
        cluster: the gateway's view of all replicas; None if the gateway makes no plans.
        one_tenant: whether no keys are configured.
        peers: asks the other gateways; None if there are none.
        waited: called with the class's name and the seconds of each request that waited.
    """

    def __init__(
        self,
        options: AdmissionOptions,
        pool: Places,
        cluster: Cluster | None,
        *,
        one_tenant: bool,
        peers: Peers | None = None,
        waited: Callable[[str, float], None] = lambda slo, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self.admission = Admission(options.max_waiting, one_tenant=one_tenant)
        self._pool, self._cluster, self._peers = pool, cluster, peers
        self._clock, self._waited = clock, waited
        self._room, self._looked_s, self._looks = Room(), -math.inf, False
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._unplanned: deque[Ticket] = deque()
        self._prompt_tokens = _PROMPT_TOKENS
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._heard: dict[str, dict[str, float]] = {}

    def start(self) -> None:
        """Start to ask the other gateways; call it in the event loop."""
        if self._peers is not None and self._task is None:
            self._task = supervise(self._hear, "ask the other gateways what tenants had")

    async def aclose(self) -> None:
        """Stop the timer, and stop asking the other gateways."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def enter(self, tenant: str | None, slo: SloClass, body_bytes: int) -> Ticket:
        """Wait until a request may be sent; `left` must follow.

        Args:
            tenant: the request's tenant; None if no keys are configured.

        Raises:
            ApiError: 429, the request would be late, it waited too long, or the queue is full.
        """
        now_s, admission = self._clock(), self.admission
        room = self._room
        if now_s - self._looked_s >= LOOK_S:
            if room.open and not len(admission):
                self._look_soon()  # and not while this request waits for it
            else:
                room = self._look(now_s, LOOK_S)
        ticket = admission.arrive(tenant or "", slo, body_bytes, now_s, room)
        if isinstance(ticket, Refused):
            raise _refusal(slo, ticket)
        if ticket.waits:
            turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
            self._turn()
            try:
                await turn
            except BaseException:
                if ticket.waits:
                    admission.cancel(ticket, self._clock())
                elif ticket.sent_s is not None:
                    self.left(ticket, None, None)
                raise
            finally:
                del self._turns[ticket]
            self._waited(slo.name, self._clock() - now_s)
        _sent.set(ticket)
        self._unplanned.append(ticket)
        return ticket

    def targets(self) -> Targets:
        """Return the targets of this task's request, with the remaining time to its first token."""
        ticket = _sent.get()
        if ticket is None:
            return NO_TARGETS
        ttft_s = ticket.slo.ttft_target_s
        if ttft_s is not None:
            ttft_s = max(MIN_S, ttft_s - (self._clock() - ticket.arrived_s))
        return Targets(ttft_s, ticket.slo.itl_target_s)

    def planned(self, plan: Plan) -> None:
        """Record the plan of this task's request."""
        ticket = _sent.get()
        if ticket is not None:
            seconds = plan.predicted.get(f"{plan.kind}.compute", 0.0)
            self.admission.planned(ticket, seconds)
            ticket.planned = True
            self._prompt_tokens += _GAIN * (plan.compute_tokens - self._prompt_tokens)

    def began(self, ticket: Ticket) -> None:
        """Record that the first token of a request that entered arrived."""
        if ticket.sent_s is not None:
            self.admission.began(ticket, self._clock() - ticket.sent_s)

    def left(self, ticket: Ticket, first_s: float | None, total_s: float | None) -> None:
        """Record that a request that entered has ended.

        Args:
            first_s: seconds from sending it to its first token; None if unknown.
            total_s: seconds from sending it to its end; None if it had no answer.
        """
        if first_s is not None and not ticket.planned:
            self.admission.planned(ticket, max(0.0, first_s - ticket.queue_s))
        answer_s = None
        if total_s is not None:
            before_s = ticket.cost.prefill_s + ticket.queue_s if first_s is None else first_s
            answer_s = max(0.0, total_s - before_s)
        self.admission.ended(ticket, answer_s, self._room.rows)
        if self._turns:
            self._turn()

    def stats(self) -> dict[str, Any]:
        """Return the state in JSON types."""
        room = self._room
        told = {"engines": room.engines, "open": room.open, "gateways": 1 + len(self._heard)}
        return {**self.admission.stats(), **told}

    # Inside

    def _look_soon(self) -> None:
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look_now)

    def _look_now(self) -> None:
        self._looks = False
        self._look(self._clock(), LOOK_S)

    def _look(self, now_s: float, every_s: float) -> Room:
        """Return the room of the replicas, updated if it is older than `every_s`."""
        if now_s - self._looked_s < every_s:
            return self._room
        self._looked_s = now_s
        cluster = self._cluster
        view = None if cluster is None or not cluster.fitted else cluster.view
        if view is not None:
            prompts = float(view.engines["prompts"].sum())
            if prompts > 0 and not any(ticket.planned for ticket in self._unplanned):
                tokens = float(view.engines["queued_tokens"].sum()) / prompts
                self._prompt_tokens += _GAIN * (tokens - self._prompt_tokens)
            heard_s = float(view.engines["heard_s"].max(initial=-math.inf))
            self._room = room_of(
                *(view, now_s),
                prompt_tokens=max(1.0, self._prompt_tokens),
                itl_s=self.admission.itl_s,
                sent=sum(self._unseen(now_s, heard_s - REPORT_S)),
                stretch=self.admission.stretch,
            )
        if view is None or not self._room.engines:
            self._room = self._counted()
        self.admission.price(known=view is not None, engines=self._room.engines)
        return self._room

    def _unseen(self, now_s: float, heard_s: float) -> Iterator[bool]:
        """Yield whether each request that may still be unreported is unplanned.

        The sum is the number of requests that no report and no plan shows yet.
        """
        sent, since_s = self._unplanned, max(heard_s, now_s - UNSEEN_S)
        while sent and (sent[0].planned or (sent[0].sent_s or now_s) < since_s):
            sent.popleft()
        return (not ticket.planned for ticket in sent)

    def _counted(self) -> Room:
        """Return the room by the number of requests at each replica."""
        self._unplanned.clear()
        ready, free, busy = self._pool.places(self.options.requests_per_replica)
        if not ready:
            return Room([0.0], streams=1 << 30, idle=True)
        return Room([0.0] * ready, streams=free, engines=ready, idle=not busy)

    def _turn(self) -> None:
        """Give up late requests, send those whose turn it is, and repeat while a request waits."""
        admission, now_s = self.admission, self._clock()
        while (ticket := admission.expired(now_s)) is not None:
            turn = self._turns.get(ticket)
            if turn is not None and not turn.done():
                waited_s = now_s - ticket.arrived_s
                turn.set_exception(errors.waited_too_long(ticket.slo.name, waited_s))
        room = self._look(now_s, TURN_S)
        while (ticket := admission.next(now_s, room)) is not None:
            turn = self._turns.get(ticket)
            if turn is not None and not turn.done():
                turn.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(admission):
            self._timer = asyncio.get_running_loop().call_later(TURN_S, self._turn)

    async def _hear(self) -> None:
        assert self._peers is not None
        while True:
            await asyncio.sleep(PEERS_S)
            try:
                self.hear(await self._peers())
            except Exception as error:
                logger.debug("cannot ask the other gateways: %r", error)

    def hear(self, told: Mapping[str, Mapping[str, float]]) -> None:
        """Charge tenants for the requests that other gateways sent since their last answers."""
        heard: dict[str, dict[str, float]] = {}
        for gateway, had in told.items():
            before = self._heard.get(gateway)
            heard[gateway] = dict(had)
            for tenant, seconds in had.items():
                more_s = 0.0 if before is None else seconds - before.get(tenant, 0.0)
                if more_s > 0.0 and math.isfinite(more_s):
                    self.admission.had_elsewhere(tenant, more_s)
        self._heard = heard


def _refusal(slo: SloClass, refused: Refused) -> errors.ApiError:
    if refused.why == "full":
        return errors.queue_full(refused.retry_after_s)
    return errors.too_late(slo.name, slo.patience_s, refused.wait_s, refused.retry_after_s)
