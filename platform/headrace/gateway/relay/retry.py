"""Sending a request to a replica, and retrying it on another replica while that is safe.

A request is tried again in three cases, until its own time limit:
- There is no connection to the replica. Nothing was sent, so there are as many tries as needed.
- The connection broke before a byte of the answer reached the client. The client has seen nothing.
  There are at most `MAX_DELIVERIES` attempts in all, because a request that kills its replica must
  not kill one replica after another.
- The answer is 500, 502 or 503, or a stream that begins with an error, and the replica's `/health`
  then fails: its engine is dying. This counts as the second case. If the replica is healthy, the
  error is the answer.

To widen the second case, an answer is returned only with the first bytes of a stream's body, or the
last bytes of any other body. An answer that is longer than `MAX_BUFFERED_BYTES`, or for which the
budget for bodies has no room, is returned with its beginning.

Retries are safe on every relayed route, since none changes anything at the replica: vLLM's store of
`/v1/responses` is off (`headrace_decode.server`), and the gateway's keeps an answer that arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, perf_counter

from headrace.gateway import errors
from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.ingress.body_budget import BodyBudget, BodyReservation
from headrace.gateway.placement.placer import Placement, Placer
from headrace.gateway.relay.call import Answer, Call
from headrace.gateway.relay.headers import (
    identity_headers,
    is_event_stream,
    retention_headers,
    token_header,
)
from headrace.gateway.relay.quarantine import Quarantine
from headrace.gateway.relay.replica_monitor import MonitoredRequest, ReplicaMonitor
from headrace.gateway.replica_pool import Lease, ReplicaPool
from headrace.gateway.upstream import ReplicaLost, Reply, Upstream
from headrace.replica_health import PROBE_TIMEOUT_S, Probe
from headrace.router.cluster import Prompt
from headrace_decode.http.engine_health import HUNG
from headrace_decode.resume.emitted import HEADER

MAX_DELIVERIES = 3
MAX_PLANNED_HEAD_BYTES = 32 * 1024
MAX_BUFFERED_BYTES = 1 << 20
"""Maximum bytes of an answer that a gateway holds before it passes them on. An answer of 8,192
tokens has 0.04 MB, and 0.7 MB with the log-probability and the bytes of each."""
MAX_ERROR_BYTES = 64 * 1024
"""Maximum bytes of a replica's error answer."""

_DYING = frozenset({500, 502, 503})


class RetryingFetcher:
    """The sender of requests to replicas, for one event loop.

    Args:
        pool: the replicas.
        upstream: the connections to them.
        queue_timeout_s: how long a request waits for a replica to be ready.
        placer: plans requests; None to let the pool choose replicas.
        on_lost: called when a replica was lost; see `GatewayMetrics.replica_lost`.
        reserve: returns an empty part of the budget for bodies, for an answer to a tenant.

    Attributes:
        monitor: finds replicas that hang.
        quarantine: holds requests that kill several replicas in a row.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        upstream: Upstream,
        queue_timeout_s: float,
        placer: Placer | None = None,
        on_lost: Callable[[str], None] = lambda when: None,
        reserve: Callable[[str | None], BodyReservation] = BodyBudget(1 << 40).reserve,
    ) -> None:
        self._pool, self._upstream, self._placer = pool, upstream, placer
        self._on_lost, self._reserve = on_lost, reserve
        self._queue_timeout_s = queue_timeout_s
        self.monitor = ReplicaMonitor(pool, self._check_health)
        self.quarantine = Quarantine(monotonic)

    async def fetch(self, call: Call, prefer: str = "") -> Answer:
        """Return an answer of a replica; the caller closes it.

        Args:
            prefer: the replica to ask first, if it is ready; otherwise a plan is made.

        Raises:
            ApiError: 503 when no replica was ready in time, 502 when replicas were lost too often,
                422 when the request is in quarantine.
        """
        self.quarantine.check(call.tenant, call.target, call.repeated_body)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._queue_timeout_s
        deliveries = deaths = 0
        lease = self._pool.lease_replica(prefer) if prefer else None
        placement = await self._place(call) if lease is None else None
        while True:
            if lease is None and placement is not None:
                lease = self._pool.lease_replica(placement.plan.decode)
            if lease is None:
                self._withdraw(placement)
                placement = None
                lease = self._pool.try_lease(call.affinity)
            if lease is None:
                began = perf_counter()
                try:
                    lease = await self._pool.lease(call.affinity, until, self._queue_timeout_s)
                finally:
                    call.waited_s += perf_counter() - began
            replica = lease.replica
            call.replica_id = replica.replica_id
            try:
                return await self._attempt(call, lease, placement)
            except ReplicaLost as lost:
                lease.release()
                self._withdraw(placement)
                lease = placement = None
                self._pool.on_failure(replica, lost)
                self._on_lost("worked" if lost.sent else "before")
                if lost.sent:
                    deliveries, deaths = deliveries + 1, deaths + (not lost.hangs)
                    if deliveries >= MAX_DELIVERIES:
                        if deaths == deliveries:
                            self.quarantine.add(call.tenant, call.target, call.repeated_body)
                        when = f"while it worked on this request, {deliveries} times in a row"
                        raise errors.replica_lost(when) from lost
                    until = loop.time() + self._queue_timeout_s
            except BaseException:
                lease.release()
                self._withdraw(placement)
                raise

    async def prefill_s(self, call: Call) -> float | None:
        """Return the seconds that a call's prompt takes where it is cheapest; None if unknown."""
        if self._placer is None or call.route is None or call.method != "POST":
            return None
        prompt = await self._read_prompt(self._placer, call, call.route.path)
        return None if prompt is None else self._placer.prefill_s(prompt)

    async def _read_prompt(self, placer: Placer, call: Call, target: str) -> Prompt | None:
        """Return a call's prompt, which is asked for until it is known; None if it is unknown."""
        if call.prompt is None:
            call.prompt = asyncio.ensure_future(
                placer.read_prompt(
                    *(target, call.body),
                    lambda replica: identity_headers(replica, call.tenant),
                    call.affinity,
                )
            )
        prompt = await asyncio.shield(call.prompt)
        if prompt is None:
            call.prompt = None
        return prompt

    async def _place(self, call: Call) -> Placement | None:
        """Return the plan for a call; None if the pool should choose."""
        placer = self._placer
        if placer is None or call.route is None or call.method != "POST" or not placer.has_choice:
            return None
        if sum(len(name) + len(value) for name, value in call.headers) > MAX_PLANNED_HEAD_BYTES:
            return None  # with the plan, the head might be too long for the replica
        began = perf_counter()
        try:
            prompt = await self._read_prompt(placer, call, call.route.path)
        finally:
            call.waited_s += perf_counter() - began
        placement = None if prompt is None else placer.place(prompt, call.targets())
        if placement is not None:
            call.on_plan(placement.plan)
        return placement

    def _withdraw(self, placement: Placement | None) -> None:
        """Withdraw a plan that is not carried out."""
        if placement is not None and self._placer is not None:
            self._placer.withdraw(placement)

    async def _attempt(self, call: Call, lease: Lease, placement: Placement | None) -> Answer:
        """Ask one replica.

        Raises:
            ReplicaLost: the replica gave no answer that can be passed on.
        """
        url, reservation, is_whole = lease.replica.url, None, True
        if call.gateway_s is None:
            call.gateway_s = perf_counter() - call.started - call.waited_s
        headers = call.headers + identity_headers(lease.replica, call.tenant)
        headers += retention_headers(call.max_retention_s)
        if placement is not None:
            headers += placement.headers
        body = call.body
        if call.method == "POST" and call.route is not None:
            headers = [*headers, (HEADER, b"%d" % len(call.resume_lines))]
            body = call.resume_lines + body
        with self.monitor.monitor(lease.replica) as monitored:
            async with monitored.interruptible():
                reply = await self._upstream.send(url, call.method, call.target, headers, body)
            monitored.on_bytes()
            try:
                streamed = is_event_stream(reply.headers)
                async with monitored.interruptible():
                    body = await reply.read_some()
                if not streamed:
                    reservation = self._reserve(call.tenant)
                    body, is_whole = await _buffered_body(reply, body, reservation, monitored)
                failed = reply.status in _DYING or (
                    streamed and body.startswith(call.dialect.events.failed)
                )
                if failed and (probe := await self.probe(lease.replica)) is not Probe.PASSED:
                    why = f"status {reply.status} and an error, then its probe {probe.value}"
                    hangs = probe is Probe.MISSED
                    raise ReplicaLost(why, sent=True, dying=not hangs, hangs=hangs)
            except BaseException:
                reply.close()
                if reservation is not None:
                    reservation.release()
                raise
        return Answer(lease, reply, body, streamed, reservation, is_whole)

    async def probe(self, replica: ReplicaInfo) -> Probe:
        """Probe a replica now, and record the result as evidence of its health."""
        probe = await self._check_health(replica)
        now_s = asyncio.get_running_loop().time()
        self._pool.replica_health.on_probe(replica.replica_id, probe, now_s)
        return probe

    async def _check_health(self, replica: ReplicaInfo) -> Probe:
        """Ask a replica's own health check."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                proof = token_header(replica)
                reply = await self._upstream.send(replica.url, "GET", "/health", proof, b"")
                try:
                    body = part = await reply.read_some()
                    while part and len(body) <= len(HUNG):
                        part = await reply.read_some()
                        body += part
                finally:
                    reply.close()
        except TimeoutError:
            return Probe.MISSED
        except ReplicaLost as lost:
            refused = not lost.sent and not isinstance(lost.__cause__, TimeoutError)
            return Probe.REFUSED if refused else Probe.MISSED
        if reply.status == 200:
            return Probe.PASSED
        return Probe.DEAD if reply.status == 503 and body != HUNG else Probe.MISSED


async def _buffered_body(
    reply: Reply, first: bytes, reservation: BodyReservation, monitored: MonitoredRequest
) -> tuple[bytes, bool]:
    """Return the body of an answer that is no stream, up to the limits, and whether it is whole.

    Raises:
        ApiError: the answer is an error that is too long.
        ReplicaLost: the connection broke before the end.
    """
    is_error = reply.status >= 400
    limit = MAX_ERROR_BYTES if is_error else MAX_BUFFERED_BYTES
    parts, size = [first], len(first)
    while parts[-1] and size <= limit:
        try:
            reservation.add(len(parts[-1]))
        except errors.ApiError:  # no room
            if not is_error:
                break
        async with monitored.interruptible():
            parts.append(await reply.read_some())
        monitored.on_bytes()
        size += len(parts[-1])
    if is_error and size > limit:
        raise errors.error_too_long(reply.status, limit)
    return b"".join(parts), not parts[-1]
