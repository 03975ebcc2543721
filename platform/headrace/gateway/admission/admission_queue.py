"""The queue in front of the replicas, for asyncio: requests wait here until they may be sent.

The gateway computes the free capacity of the replicas (`capacity`) from its view of them: at most
every `REFRESH_INTERVAL_S`, and every `POLL_INTERVAL_S` while a request waits. If the last result is
older and has room, an arriving request is sent at once and the capacity is computed after it. If no
replica has reported its step times, the capacity follows from the number of requests at each
replica, which is at most `requests_per_replica`. While no replica is known, requests pass this
queue without waiting: the relay waits for a replica, and answers with an error if none becomes
ready.

While a request waits, the gateway asks for the keys of its prompt's blocks, which its plan needs in
any case. They tell how much of the prompt is cached, so how long it takes and when it is due.

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
from typing import Any, Protocol

from headrace.config.gateway import AdmissionSettings
from headrace.gateway import errors
from headrace.gateway.admission.admission_controller import AdmissionController, Refusal, Ticket
from headrace.gateway.admission.capacity import Capacity, compute_capacity
from headrace.gateway.admission.request_costs import MIN_S
from headrace.gateway.admission.slo_classes import SloClass
from headrace.router.cluster import Cluster, LatencyTargets
from headrace.router.plan import Plan
from headrace_engine.supervise import supervise

logger = logging.getLogger("headrace.gateway")

REFRESH_INTERVAL_S, POLL_INTERVAL_S = 0.05, 0.02
PEER_POLL_INTERVAL_S = 1.0
MAX_QUESTIONS = 8
"""Maximum number of waiting requests whose blocks' keys are asked for at a time."""
REPORT_S = 0.05
"""Maximum time that a report is assumed to be under way."""
UNREPORTED_S = 2.0
"""Time after which a request that no report shows is no longer counted."""
_PROMPT_TOKENS, _GAIN = 256.0, 0.05

PeerUsage = Callable[[], Awaitable[Mapping[str, Mapping[str, float]]]]
"""Function that returns the seconds that each other gateway has charged each tenant since that
gateway started: by gateway, then by tenant."""


class PoolCapacity(Protocol):
    """The decode replicas (`headrace.gateway.replica_pool.ReplicaPool`)."""

    def free_places(self, max_requests: int) -> tuple[int, int, int]:
        """Return the number of available replicas, the number of requests that they can take
        together until each has `max_requests`, and the number that they have."""


class AdmissionQueue:
    """One gateway's queue. Use it from its event loop.

    Args:
        settings: the maximum length of the queue, and the limit of requests at each replica.
        pool: the decode replicas.
        cluster: the gateway's view of all replicas; None if the gateway makes no plans.
        one_tenant: whether no keys are configured.
        peer_usage: asks the other gateways; None if there are none.
        on_waited: called with the class's name and the seconds of each request that waited.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        pool: PoolCapacity,
        cluster: Cluster | None,
        *,
        one_tenant: bool,
        peer_usage: PeerUsage | None = None,
        on_waited: Callable[[str, float], None] = lambda slo, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.controller = AdmissionController(settings.max_waiting, one_tenant=one_tenant)
        self._requests_per_replica = settings.requests_per_replica
        self._pool, self._cluster, self._ask_peers = pool, cluster, peer_usage
        self._clock, self._on_waited = clock, on_waited
        self._capacity, self._refreshed_s = Capacity(), -math.inf
        self._refresh_is_scheduled = False
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._questions = asyncio.Semaphore(MAX_QUESTIONS)
        self._unplanned: deque[Ticket] = deque()
        self._prompt_tokens = _PROMPT_TOKENS
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._usage_of_peers: dict[str, dict[str, float]] = {}

    def start(self) -> None:
        """Start to ask the other gateways; call it in the event loop."""
        if self._ask_peers is not None and self._task is None:
            self._task = supervise(self._poll_peers, "ask the other gateways what tenants had")

    async def aclose(self) -> None:
        """Stop the timer, and stop asking the other gateways."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def enter(
        self,
        tenant: str | None,
        slo: SloClass,
        body_bytes: int,
        prefill_s: Callable[[], Awaitable[float | None]] | None = None,
    ) -> Ticket:
        """Wait until a request may be sent; `on_end` must follow.

        Args:
            tenant: the request's tenant; None if no keys are configured.
            prefill_s: returns the seconds that its prompt takes where it is cheapest, None if this
                is unknown; called if the request waits.

        Raises:
            ApiError: 429, the request would be late, it waited too long, or the queue is full.
        """
        now_s, controller = self._clock(), self.controller
        capacity = self._capacity
        if now_s - self._refreshed_s >= REFRESH_INTERVAL_S:
            if capacity.has_room and not len(controller):
                self._schedule_refresh()  # and not while this request waits for it
            else:
                capacity = self._refresh_capacity(now_s, REFRESH_INTERVAL_S)
        ticket = controller.arrive(tenant or "", slo, body_bytes, now_s, capacity)
        if isinstance(ticket, Refusal):
            raise _refusal_error(slo, ticket)
        if ticket.is_waiting:
            waiter = self._waiters[ticket] = asyncio.get_running_loop().create_future()
            asking = (
                None if prefill_s is None else asyncio.create_task(self._ask(ticket, prefill_s))
            )
            self._dispatch()
            try:
                await waiter
            except BaseException:
                if ticket.is_waiting:
                    controller.cancel(ticket, self._clock())
                elif ticket.sent_s is not None:
                    self.on_end(ticket, None, None)
                raise
            finally:
                del self._waiters[ticket]
                if asking is not None:
                    asking.cancel()
            self._on_waited(slo.name, self._clock() - now_s)
        self._unplanned.append(ticket)
        return ticket

    def targets(self, ticket: Ticket) -> LatencyTargets:
        """Return the targets of a request that entered, for the time that remains."""
        ttft_s = ticket.slo.ttft_target_s
        if ttft_s is not None:
            ttft_s = max(MIN_S, ttft_s - (self._clock() - ticket.arrived_s))
        return LatencyTargets(ttft_s, ticket.slo.itl_target_s)

    def on_plan(self, ticket: Ticket, plan: Plan) -> None:
        """Record the plan of a request that entered."""
        seconds = plan.predicted.get(f"{plan.kind}.compute", 0.0)
        self.controller.record_plan(ticket, seconds)
        ticket.is_planned = True
        self._prompt_tokens += _GAIN * (plan.compute_tokens - self._prompt_tokens)

    def on_first_token(self, ticket: Ticket) -> None:
        """Record that the first token of a request that entered arrived."""
        if ticket.sent_s is not None:
            self.controller.record_first_token(ticket, self._clock() - ticket.sent_s)

    def on_end(self, ticket: Ticket, first_s: float | None, total_s: float | None) -> None:
        """Record that a request that entered has ended.

        Args:
            first_s: seconds from sending it to its first token; None if unknown.
            total_s: seconds from sending it to its end; None if it had no answer.
        """
        if first_s is not None and not ticket.is_planned:
            self.controller.record_plan(ticket, max(0.0, first_s - ticket.queue_s))
        answer_s = None
        if total_s is not None:
            before_s = ticket.cost.prefill_s + ticket.queue_s if first_s is None else first_s
            answer_s = max(0.0, total_s - before_s)
        self.controller.record_end(ticket, answer_s, self._capacity.rows)
        if self._waiters:
            self._dispatch()

    def on_peer_usage(self, usage: Mapping[str, Mapping[str, float]]) -> None:
        """Charge tenants for the requests that other gateways sent since their last answers."""
        known: dict[str, dict[str, float]] = {}
        for gateway, charged_s in usage.items():
            before = self._usage_of_peers.get(gateway)
            known[gateway] = dict(charged_s)
            for tenant, seconds in charged_s.items():
                more_s = 0.0 if before is None else seconds - before.get(tenant, 0.0)
                if more_s > 0.0 and math.isfinite(more_s):
                    self.controller.record_peer_usage(tenant, more_s)
        self._usage_of_peers = known

    def stats(self) -> dict[str, Any]:
        """Return the state in JSON types."""
        return {
            **self.controller.stats(),
            "engines": self._capacity.engines,
            "open": self._capacity.has_room,
            "gateways": 1 + len(self._usage_of_peers),
        }

    # Inside

    async def _ask(self, ticket: Ticket, prefill_s: Callable[[], Awaitable[float | None]]) -> None:
        async with self._questions:
            seconds = await prefill_s()
        if seconds is not None:
            self.controller.set_prefill(ticket, seconds)

    def _schedule_refresh(self) -> None:
        if not self._refresh_is_scheduled:
            self._refresh_is_scheduled = True
            asyncio.get_running_loop().call_soon(self._refresh_now)

    def _refresh_now(self) -> None:
        self._refresh_is_scheduled = False
        self._refresh_capacity(self._clock(), REFRESH_INTERVAL_S)

    def _refresh_capacity(self, now_s: float, max_age_s: float) -> Capacity:
        """Return the capacity of the replicas, computed again if it is older than `max_age_s`."""
        if now_s - self._refreshed_s < max_age_s:
            return self._capacity
        self._refreshed_s = now_s
        cluster = self._cluster
        view = None if cluster is None or not cluster.has_step_times else cluster.view
        if view is not None:
            prompts = float(view.engines["prompts"].sum())
            if prompts > 0 and not any(ticket.is_planned for ticket in self._unplanned):
                tokens = float(view.engines["queued_tokens"].sum()) / prompts
                self._prompt_tokens += _GAIN * (tokens - self._prompt_tokens)
            reported_s = float(view.engines["reported_s"].max(initial=-math.inf))
            self._capacity = compute_capacity(
                *(view, now_s),
                prompt_tokens=max(1.0, self._prompt_tokens),
                itl_s=self.controller.itl_s,
                sent=sum(self._unreported(now_s, reported_s - REPORT_S)),
                prefill_safety_factor=self.controller.prefill_safety_factor,
            )
        if view is None or not self._capacity.engines:
            self._capacity = self._capacity_by_count()
        self.controller.set_engines(priced=view is not None, engines=self._capacity.engines)
        return self._capacity

    def _unreported(self, now_s: float, reported_s: float) -> Iterator[bool]:
        """Yield whether each request that may still be unreported is unplanned.

        The sum is the number of requests that no report and no plan shows yet.
        """
        sent, since_s = self._unplanned, max(reported_s, now_s - UNREPORTED_S)
        while sent and (sent[0].is_planned or (sent[0].sent_s or now_s) < since_s):
            sent.popleft()
        return (not ticket.is_planned for ticket in sent)

    def _capacity_by_count(self) -> Capacity:
        """Return the capacity by the number of requests at each replica."""
        self._unplanned.clear()
        ready, free, busy = self._pool.free_places(self._requests_per_replica)
        if not ready:
            return Capacity([0.0], streams=1 << 30, is_idle=True)
        return Capacity([0.0] * ready, streams=free, engines=ready, is_idle=not busy)

    def _dispatch(self) -> None:
        """Give up late requests, send those that may be sent, and repeat while a request waits."""
        controller, now_s = self.controller, self._clock()
        while (ticket := controller.pop_expired(now_s)) is not None:
            waiter = self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                waited_s = now_s - ticket.arrived_s
                waiter.set_exception(errors.waited_too_long(ticket.slo.name, waited_s))
        capacity = self._refresh_capacity(now_s, POLL_INTERVAL_S)
        while (ticket := controller.next(now_s, capacity)) is not None:
            waiter = self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if len(controller):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(POLL_INTERVAL_S, self._dispatch)

    async def _poll_peers(self) -> None:
        assert self._ask_peers is not None
        while True:
            await asyncio.sleep(PEER_POLL_INTERVAL_S)
            try:
                self.on_peer_usage(await self._ask_peers())
            except Exception as error:
                logger.debug("cannot ask the other gateways: %r", error)


def _refusal_error(slo: SloClass, refusal: Refusal) -> errors.ApiError:
    if refusal.why == "full":
        return errors.queue_full(refusal.retry_after_s)
    return errors.too_late(slo.name, slo.patience_s, refusal.wait_s, refusal.retry_after_s)
