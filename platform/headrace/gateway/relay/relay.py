"""The relay of a client's request to a replica and of its answer, with retries while they are safe.

The relay retries in three cases, until the request's own time limit:
- There is no connection to the replica. Nothing was sent, so the relay tries as often as needed.
- The connection broke before a byte of the answer reached the client. The client has seen nothing,
  so the relay tries again. It makes at most `MAX_DELIVERIES` attempts in all, because a request
  that kills its replica must not kill one replica after another.
- The answer is 500, 502 or 503, or a stream that begins with an error, and the replica's `/health`
  then fails: its engine is dying. This counts as the second case. If the replica is healthy, the
  error is the answer.

To widen the second case, the relay sends nothing to the client before it has the first bytes of a
stream's body, or the last bytes of any other body. An answer that is longer than `HELD_BYTES`, or
for which the budget for bodies has no room, is passed on as it arrives, at the client's pace. A
stream is passed on in whole events. When its replica is lost midway, another one resumes it after
them (`journal`): the same one if it lives, and at most `streams.MAX_TRIES` times without a new
event. A stream that cannot be resumed ends with an error event.

A replica that has been silent for a while is probed (`watch`). If it is down, other replicas take
over its requests gradually. That counts as the second case, but puts no request in quarantine. The
health of a replica is judged in one place (`headrace.liveness`), and each loss is evidence for it.

Retries are safe on every relayed route, since none changes anything at the replica: the store of
`/v1/responses` is off (`headrace_decode.server`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, perf_counter

from headrace.gateway import errors
from headrace.gateway.asgi import Send
from headrace.gateway.backend import GatewayOptions, ReplicaInfo
from headrace.gateway.errors import Headers
from headrace.gateway.ingress.budget import BodyBudget, Held
from headrace.gateway.ingress.connection import SECURITY_HEADERS
from headrace.gateway.placing.placer import Placed, Placer
from headrace.gateway.relay.call import Answer, Call
from headrace.gateway.relay.quarantine import Quarantine
from headrace.gateway.relay.streams import Streams
from headrace.gateway.relay.watch import Watch, Watched
from headrace.gateway.replicas import Lease, ReplicaPool
from headrace.gateway.upstream import ReplicaLost, Reply, Upstream
from headrace.liveness import PROBE_TIMEOUT_S, Probe
from headrace_decode import techniques
from headrace_decode.health import HUNG
from headrace_decode.internal import INTERNAL_HEADER, TENANT_HEADER
from headrace_decode.resume.said import HEADER, RESUME

MAX_DELIVERIES = 3
MAX_PLACED_HEAD_BYTES = 32 * 1024
HELD_BYTES = 1 << 20
"""Maximum bytes of an answer that a gateway holds before it passes them on. An answer of 8,192
tokens has 0.04 MB, and 0.7 MB with the log-probability and the bytes of each."""
MAX_ERROR_BYTES = 64 * 1024
"""Maximum bytes of a replica's error answer."""

_DYING = frozenset({500, 502, 503})
# Hop-by-hop headers (RFC 9110, 7.6.1), and headers that the gateway or its server writes itself.
_NOT_COPIED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"date",
        b"server",
        b"x-request-id",
        HEADER,
        *(name for name, _ in SECURITY_HEADERS),
    }
)

# Not for the replica: hop-by-hop headers (RFC 9110, 7.6.1), the client's key and origin, and
# headers that the gateway or its HTTP client writes itself.
_NOT_FORWARDED = frozenset(
    {
        b"authorization",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"origin",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-api-key",
        b"x-request-id",
    }
)


class Relay:
    """The relay of one event loop: it sends calls to replicas.

    Args:
        pool: the replicas.
        upstream: the connections to them.
        options: the gateway's settings.
        placer: plans requests; None to let the pool choose replicas.
        on_lost: called when a replica was lost; see `GatewayMetrics.replica_lost`.
        on_techniques: called for each answer; see `GatewayMetrics.techniques`.
        hold: returns an empty part of the budget for bodies, for an answer to a tenant.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        upstream: Upstream,
        options: GatewayOptions,
        placer: Placer | None = None,
        on_lost: Callable[[str], None] = lambda when: None,
        on_techniques: Callable[[str], None] = lambda applied: None,
        hold: Callable[[str | None], Held] = BodyBudget(1 << 40).hold,
    ) -> None:
        self._pool = pool
        self._on_lost, self._on_techniques = on_lost, on_techniques
        self._upstream = upstream
        self._placer = placer
        self._hold = hold
        self._queue_timeout_s = options.queue_timeout_s
        self._watch = Watch(pool, self._probe)
        self._quarantine = Quarantine(monotonic)
        self._streams = Streams(
            pool, self._watch, self._quarantine, self.fetch, self._checked, on_lost
        )

    async def aclose(self) -> None:
        """Stop watching replicas."""
        await self._watch.aclose()

    async def run(self, call: Call, send: Send) -> None:
        """Get an answer and copy it to the client.

        Raises:
            ApiError: there is no answer, the client's stream cannot be resumed, or the rest of an
                answer that is no stream did not arrive.
        """
        answer = await self.fetch(call)
        if not answer.streamed:
            call.drop_body()
        try:
            status = answer.reply.status
            call.streamed = answer.streamed
            call.replica_id = answer.lease.replica.replica_id
            headers = [head for head in answer.reply.headers if head[0] not in _NOT_COPIED]
            headers.append((b"x-request-id", call.request_id))
            headers.append((b"x-headrace-replica", call.replica_id.encode()))
            if call.techniques is not None and status == 200:
                offer = answer.lease.replica.techniques
                told = techniques.applied(call.techniques, offer)
                headers.append((techniques.HEADER, told.encode()))
                self._on_techniques(told)
            start = {"type": "http.response.start", "status": status, "headers": headers}
            if answer.streamed:
                journal = self._streams.journal(call, answer)
                if call.journal is not None:
                    if journal.why_not is None:
                        headers.append((RESUME, b"1"))
                    elif journal.progress:
                        raise errors.cannot_resume(journal.why_not)
                await send(start)
                call.status = status
                await self._streams.copy(call, answer, journal, send)
            else:
                size = b"%d" % len(answer.body) if answer.is_whole else _length(answer.reply)
                if size is not None:
                    headers.append((b"content-length", size))
                await send(start)
                call.status = status
                await self._send_body(call, answer, send)
        finally:
            answer.close()

    async def _send_body(self, call: Call, answer: Answer, send: Send) -> None:
        """Send an answer that is no stream; read its missing part at the client's pace.

        Raises:
            ApiError: the rest did not arrive.
        """
        body, more = answer.body, not answer.is_whole
        await send({"type": "http.response.body", "body": body, "more_body": more})
        call.ttft_s = perf_counter() - call.started
        call.sent_bytes = len(body)
        answer.body = b""
        with self._watch.over(answer.lease.replica) as watched:
            while more:
                try:
                    async with watched.waits():
                        body = await answer.reply.read_some()
                except ReplicaLost as lost:
                    self._pool.failed(answer.lease.replica, lost)
                    raise errors.replica_lost("within its answer") from lost
                more = bool(body)
                await send({"type": "http.response.body", "body": body, "more_body": more})
                call.sent_bytes += len(body)
                watched.heard()

    async def fetch(self, call: Call, prefer: str = "") -> Answer:
        """Return an answer of a replica; the caller closes it.

        Args:
            prefer: the replica to ask first, if it is ready; otherwise a plan is made.

        Raises:
            ApiError: 503 when no replica was ready in time, 502 when replicas were lost too often,
                422 when the request is in quarantine.
        """
        self._quarantine.check(call.tenant, call.target, call.body)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._queue_timeout_s
        deliveries = deaths = 0
        lease = self._pool.lease_of(prefer) if prefer else None
        placed = await self._place(call) if lease is None else None
        while True:
            if lease is None and placed is not None:
                lease = self._pool.lease_of(placed.plan.decode)
            if lease is None:
                self._give_up(placed)
                placed = None
                lease = self._pool.try_lease(call.affinity, call.draftable_tokens)
            if lease is None:
                began = perf_counter()
                try:
                    lease = await self._pool.lease(
                        call.affinity, until, self._queue_timeout_s, call.draftable_tokens
                    )
                finally:
                    call.waited_s += perf_counter() - began
            replica = lease.replica
            call.replica_id = replica.replica_id
            try:
                return await self._attempt(call, lease, placed)
            except ReplicaLost as lost:
                lease.release()
                self._give_up(placed)
                lease = placed = None
                self._pool.failed(replica, lost)
                self._on_lost("worked" if lost.sent else "before")
                if lost.sent:
                    deliveries, deaths = deliveries + 1, deaths + (not lost.hangs)
                    if deliveries >= MAX_DELIVERIES:
                        if deaths == deliveries:
                            self._quarantine.add(call.tenant, call.target, call.body)
                        when = f"while it worked on this request, {deliveries} times in a row"
                        raise errors.replica_lost(when) from lost
                    until = loop.time() + self._queue_timeout_s
            except BaseException:
                lease.release()
                self._give_up(placed)
                raise

    async def _place(self, call: Call) -> Placed | None:
        """Return the plan for a call; None if the pool should choose."""
        if self._placer is None or call.route is None or call.method != "POST":
            return None
        if sum(len(name) + len(value) for name, value in call.headers) > MAX_PLACED_HEAD_BYTES:
            return None  # with the plan, the head might be too long for the replica
        began = perf_counter()
        try:
            return await self._placer.place(
                call.route.path,
                call.body,
                lambda replica: _introduced(call, replica),
                call.affinity,
                call.draftable_tokens,
            )
        finally:
            call.waited_s += perf_counter() - began

    def _give_up(self, placed: Placed | None) -> None:
        """Withdraw a plan that is not carried out."""
        if placed is not None and self._placer is not None:
            self._placer.withdraw(placed)

    async def _attempt(self, call: Call, lease: Lease, placed: Placed | None) -> Answer:
        """Ask one replica.

        Raises:
            ReplicaLost: the replica gave no answer that can be passed on.
        """
        url, held, is_whole = lease.replica.url, None, True
        if call.own_s is None:
            call.own_s = perf_counter() - call.started - call.waited_s
        headers = call.headers + _introduced(call, lease.replica)
        if placed is not None:
            headers += placed.headers
        body = call.body
        if call.method == "POST" and call.route is not None:
            headers = [*headers, (HEADER, b"%d" % len(call.said))]
            body = call.said + body
        with self._watch.over(lease.replica) as watched:
            async with watched.waits():
                reply = await self._upstream.send(url, call.method, call.target, headers, body)
            watched.heard()
            try:
                streamed = _is_event_stream(reply.headers)
                async with watched.waits():
                    body = await reply.read_some()
                if not streamed:
                    held = self._hold(call.tenant)
                    body, is_whole = await _held_body(reply, body, held, watched)
                failed = reply.status in _DYING or (
                    streamed and body.startswith(call.dialect.events.failed)
                )
                if failed and (probe := await self._checked(lease.replica)) is not Probe.PASSED:
                    why = f"status {reply.status} and an error, then its probe {probe.value}"
                    hangs = probe is Probe.MISSED
                    raise ReplicaLost(why, sent=True, dying=not hangs, hangs=hangs)
            except BaseException:
                reply.close()
                if held is not None:
                    held.release()
                raise
        return Answer(lease, reply, body, streamed, held, is_whole)

    async def _checked(self, replica: ReplicaInfo) -> Probe:
        """Probe a replica now, and record the result as evidence of its health."""
        probe = await self._probe(replica)
        now_s = asyncio.get_running_loop().time()
        self._pool.liveness.on_probe(replica.replica_id, probe, now_s)
        return probe

    async def _probe(self, replica: ReplicaInfo) -> Probe:
        """Ask a replica's own health check."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                proof = _proof(replica)
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


async def _held_body(
    reply: Reply, first: bytes, held: Held, watched: Watched
) -> tuple[bytes, bool]:
    """Return the body of an answer that is no stream, up to the limits, and whether it is whole.

    Raises:
        ApiError: the answer is an error that is too long.
        ReplicaLost: the connection broke before the end.
    """
    is_error = reply.status >= 400
    limit = MAX_ERROR_BYTES if is_error else HELD_BYTES
    parts, size = [first], len(first)
    while parts[-1] and size <= limit:
        try:
            held.add(len(parts[-1]))
        except errors.ApiError:  # no room
            if not is_error:
                break
        async with watched.waits():
            parts.append(await reply.read_some())
        watched.heard()
        size += len(parts[-1])
    if is_error and size > limit:
        raise errors.error_too_long(reply.status, limit)
    return b"".join(parts), not parts[-1]


def _length(reply: Reply) -> bytes | None:
    """Return the length of the body that the replica has announced."""
    return next((value for name, value in reply.headers if name == b"content-length"), None)


def _proof(replica: ReplicaInfo) -> Headers:
    """Return the header that identifies a gateway to a replica."""
    return [(INTERNAL_HEADER, replica.token.encode())]


def _introduced(call: Call, replica: ReplicaInfo) -> Headers:
    """Return the headers that identify the gateway and the tenant to a replica."""
    if call.tenant is None:
        return _proof(replica)
    return [*_proof(replica), (TENANT_HEADER, call.tenant.encode())]


def _is_event_stream(headers: Headers) -> bool:
    for name, value in headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def forwarded(headers: list[tuple[bytes, bytes]], request_id: bytes) -> Headers:
    """Return the client's headers that the replica gets, with the request id."""
    dropped: frozenset[bytes] = _NOT_FORWARDED
    for name, value in headers:
        if name == b"connection":
            dropped = dropped.union(each.strip().lower() for each in value.split(b","))
    kept = [head for head in headers if head[0] not in dropped and head[0][:11] != b"x-headrace-"]
    kept.append((b"x-request-id", request_id))
    return kept
