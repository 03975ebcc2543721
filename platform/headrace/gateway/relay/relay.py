"""The relay: a client's request to one replica, the answer's bytes back, retried while it is safe.

What is retried, until the request's own time limit:
- no connection to the replica: nothing was sent, so as often as it takes;
- the connection broke before a byte of the answer reached the client: nothing was seen, so again,
  but at most `MAX_DELIVERIES` times in all, because a request that kills its replica must not kill
  them one after the other;
- 500, 502 or 503, or a stream that begins with an error, from a replica whose `/health` then
  fails: its engine is dying. Counts as the case above, and the replica is left alone until Serve
  has had the time to replace it. From a healthy replica it is the answer.

To widen the second case, nothing is sent to the client before the first bytes of a stream's body,
or the last bytes of any other body, are here. A stream is passed on in whole events. When its
replica is lost midway, another one takes it up behind them (`journal`): the same one if it
lives, and at most `streams.MAX_TRIES` times without a new event. A stream that cannot be taken up
ends with an error event.

A replica that has been silent for a while is asked whether it is well (`watch`), so one that
hangs is lost, too.

Asking again is safe on every relayed route, since none changes anything at the replica: the store
of `/v1/responses` is off (`headrace_decode.server`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic, perf_counter

from headrace.gateway import errors
from headrace.gateway.asgi import Send
from headrace.gateway.backend import GatewayOptions, ReplicaInfo
from headrace.gateway.errors import Headers
from headrace.gateway.placing.placer import Placed, Placer
from headrace.gateway.relay.call import Answer, Call
from headrace.gateway.relay.quarantine import Quarantine
from headrace.gateway.relay.streams import Streams
from headrace.gateway.relay.watch import Watch
from headrace.gateway.replicas import Lease, ReplicaPool
from headrace.gateway.upstream import ReplicaLost, Upstream
from headrace_decode import techniques
from headrace_decode.internal import INTERNAL_HEADER, TENANT_HEADER
from headrace_decode.replay.said import HEADER, RESUME

MAX_DELIVERIES = 3
HEALTH_TIMEOUT_S = 2.0
MOST_PLACED_HEAD_BYTES = 32 * 1024

_DYING = frozenset({500, 502, 503})
# Hop-by-hop headers (RFC 9110, 7.6.1), and those that the gateway or its server writes itself.
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
    }
)

# Not for the replica: hop-by-hop headers (RFC 9110, 7.6.1), the client's key and origin, and what
# the gateway or its HTTP client writes itself.
_NOT_FORWARDED = frozenset(
    {
        b"authorization",
        b"connection",
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
    """Sends calls to replicas.

    Args:
        pool: the replicas.
        upstream: the connections to them.
        options: limits.
        placer: plans where a request goes; None leaves that to the pool.
        on_lost: told when a replica was lost, as `GatewayMetrics.replica_lost` says.
        on_techniques: told of each answer, as `GatewayMetrics.techniques` says.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        upstream: Upstream,
        options: GatewayOptions,
        placer: Placer | None = None,
        on_lost: Callable[[str], None] = lambda when: None,
        on_techniques: Callable[[str], None] = lambda applied: None,
    ) -> None:
        self._pool = pool
        self._on_lost, self._on_techniques = on_lost, on_techniques
        self._upstream = upstream
        self._placer = placer
        self._queue_timeout_s = options.queue_timeout_s
        self._watch = Watch(self._is_healthy)
        self._quarantine = Quarantine(monotonic)
        self._streams = Streams(
            pool, self._watch, self._quarantine, self.fetch, self._is_healthy, on_lost
        )

    async def aclose(self) -> None:
        """Stop to watch replicas."""
        await self._watch.aclose()

    async def run(self, call: Call, send: Send) -> None:
        """Get an answer and copy it to the client.

        Raises:
            ApiError: no answer could be had; nothing was sent.
        """
        answer = await self.fetch(call)
        if not answer.streamed:
            call.drop_body()
        try:
            call.status = answer.reply.status
            call.streamed = answer.streamed
            call.replica_id = answer.lease.replica.replica_id
            headers = [head for head in answer.reply.headers if head[0] not in _NOT_COPIED]
            headers.append((b"x-request-id", call.request_id))
            headers.append((b"x-headrace-replica", call.replica_id.encode()))
            if call.techniques is not None and call.status == 200:
                offer = answer.lease.replica.techniques
                told = techniques.applied(call.techniques, offer)
                headers.append((techniques.HEADER, told.encode()))
                self._on_techniques(told)
            start = {"type": "http.response.start", "status": call.status, "headers": headers}
            if answer.streamed:
                journal = self._streams.journal(call, answer)
                if call.journal is not None:
                    if journal.why_not is None:
                        headers.append((RESUME, b"1"))
                    elif journal.progress:
                        call.status = 0
                        raise errors.cannot_resume(journal.why_not)
                await send(start)
                await self._streams.copy(call, answer, journal, send)
            else:
                headers.append((b"content-length", b"%d" % len(answer.body)))
                await send(start)
                await send({"type": "http.response.body", "body": answer.body})
                call.ttft_s = perf_counter() - call.started
                call.sent_bytes = len(answer.body)
        finally:
            answer.close()

    async def fetch(self, call: Call, prefer: str = "") -> Answer:
        """An answer from some replica; the caller closes it.

        Args:
            prefer: the replica to ask first, if it is ready; without it a plan is made.

        Raises:
            ApiError: 503 when no replica was ready in time, 502 when it was lost too often.
        """
        self._quarantine.check(call.target, call.body)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._queue_timeout_s
        deliveries = 0
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
                self._pool.failed(replica, dying=lost.dying)
                self._on_lost("worked" if lost.sent else "before")
                if lost.sent:
                    deliveries += 1
                    if deliveries >= MAX_DELIVERIES:
                        self._quarantine.add(call.target, call.body)
                        when = f"while it worked on this request, {deliveries} times in a row"
                        raise errors.replica_lost(when) from lost
                    until = loop.time() + self._queue_timeout_s
            except BaseException:
                lease.release()
                self._give_up(placed)
                raise

    async def _place(self, call: Call) -> Placed | None:
        """The plan for a call, where there is something to plan."""
        if self._placer is None or call.route is None or call.method != "POST":
            return None
        if sum(len(name) + len(value) for name, value in call.headers) > MOST_PLACED_HEAD_BYTES:
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
        """A plan is not carried out; the pool chooses instead."""
        if placed is not None and self._placer is not None:
            self._placer.withdraw(placed)

    async def _attempt(self, call: Call, lease: Lease, placed: Placed | None) -> Answer:
        """Ask one replica.

        Raises:
            ReplicaLost: it gave no answer that could be passed on.
        """
        url = lease.replica.url
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
            try:
                streamed = _is_event_stream(reply.headers)
                async with watched.waits():
                    body = await reply.read_some()
                if not streamed:
                    parts = [body]
                    async with watched.waits():
                        while parts[-1]:
                            parts.append(await reply.read_some())
                            watched.heard()
                    body = b"".join(parts)
                failed = reply.status in _DYING or (
                    streamed and body.startswith(call.dialect.events.failed)
                )
                if failed and not await self._is_healthy(lease.replica):
                    why = f"status {reply.status} and an error from a dying replica"
                    raise ReplicaLost(why, sent=True, dying=True)
            except BaseException:
                reply.close()
                raise
        return Answer(lease, reply, body, streamed)

    async def _is_healthy(self, replica: ReplicaInfo) -> bool:
        """Whether the replica's own health check passes."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                proof = _proof(replica)
                reply = await self._upstream.send(replica.url, "GET", "/health", proof, b"")
                try:
                    while await reply.read_some():
                        pass
                finally:
                    reply.close()
        except (ReplicaLost, TimeoutError):
            return False
        return reply.status == 200


def _proof(replica: ReplicaInfo) -> Headers:
    """The header by which a replica knows a gateway."""
    return [(INTERNAL_HEADER, replica.token.encode())]


def _introduced(call: Call, replica: ReplicaInfo) -> Headers:
    """The headers by which a replica knows a gateway, and whose request it is."""
    if call.tenant is None:
        return _proof(replica)
    return [*_proof(replica), (TENANT_HEADER, call.tenant.encode())]


def _is_event_stream(headers: Headers) -> bool:
    for name, value in headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False


def forwarded(
    headers: list[tuple[bytes, bytes]], seen: dict[bytes, bytes], request_id: bytes
) -> Headers:
    """The client's headers that the replica gets, with the request id."""
    dropped: frozenset[bytes] = _NOT_FORWARDED
    connection = seen.get(b"connection")
    if connection is not None:
        dropped = dropped.union(name.strip().lower() for name in connection.split(b","))
    kept = [head for head in headers if head[0] not in dropped and head[0][:11] != b"x-headrace-"]
    kept.append((b"x-request-id", request_id))
    return kept
