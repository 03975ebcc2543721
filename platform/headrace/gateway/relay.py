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
replica is lost midway, another one takes it up behind them (`replay.journal`): the same one if it
lives, and at most `MAX_DELIVERIES` times without a new event. A stream that cannot be taken up ends
with an error event.

A replica that has been silent for a while is asked whether it is well (`replay.watch`), so one that
hangs is lost, too.

Asking again is safe on every relayed route, since none changes anything at the replica: the store
of `/v1/responses` is off (`headrace_decode.server`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from headrace.gateway import errors
from headrace.gateway.asgi import Send
from headrace.gateway.backend import GatewayOptions, ReplicaInfo
from headrace.gateway.dialect import OPENAI, Dialect, dialect_of
from headrace.gateway.door.budget import Held
from headrace.gateway.errors import Headers
from headrace.gateway.placing.placer import Placed, Placer
from headrace.gateway.replay.journal import Diverged, Journal
from headrace.gateway.replay.watch import Watch
from headrace.gateway.replicas import Lease, ReplicaPool
from headrace.gateway.upstream import ReplicaLost, Reply, Upstream
from headrace_decode.internal import INTERNAL_HEADER, TENANT_HEADER
from headrace_decode.replay.said import HEADER
from headrace_decode.routes import Route

MAX_DELIVERIES = 3
HEALTH_TIMEOUT_S = 2.0
MOST_PLACED_HEAD_BYTES = 32 * 1024

_DYING = frozenset({500, 502, 503})
_MIDWAY = "mid-stream, and the stream cannot go on elsewhere: "
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


@dataclass(slots=True)
class Call:
    """One client request on its way, and what became of it.

    Attributes:
        route: the replica's operation that it asks for; None for the gateway's own documents.
        started: `perf_counter` at the request's head.
        tenant: whom the key proves; None where no keys are configured.
        waited_s: seconds spent waiting for the client's body or for a replica.
        own_s: seconds of gateway code before the replica got the request; None before that.
        status: sent to the client; 0 before that.
        ttft_s: seconds from the start to the first body bytes sent.
        last: the events of a stream that were sent last.
        held: counts the body.
        said: the lines of its stream so far, for the replica that takes it up.
    """

    request_id: bytes
    method: str
    target: str
    headers: Headers
    body: bytes = b""
    affinity: bytes = b""
    tenant: str | None = None
    draftable_tokens: int = 0
    route: Route | None = None
    started: float = field(default_factory=perf_counter)
    waited_s: float = 0.0
    own_s: float | None = None
    replica_id: str = ""
    status: int = 0
    ttft_s: float | None = None
    streamed: bool = False
    sent_bytes: int = 0
    last: bytes = b""
    held: Held | None = None
    said: bytes = b""

    def drop_body(self) -> None:
        """The body is needed no more: no replica will be asked again."""
        self.body = b""
        if self.held is not None:
            self.held.release()

    @property
    def dialect(self) -> Dialect:
        """How its errors are written."""
        return OPENAI if self.route is None else dialect_of(self.route.api)


@dataclass(slots=True)
class Answer:
    """A reply that may be passed on: of a stream the first bytes, of any other the whole body."""

    lease: Lease
    reply: Reply
    body: bytes
    streamed: bool

    def close(self) -> None:
        """End the exchange with the replica; before its end this aborts the request there."""
        self.reply.close()
        self.lease.release()


class Relay:
    """Sends calls to replicas.

    Args:
        pool: the replicas.
        upstream: the connections to them.
        options: limits.
        placer: plans where a request goes; None leaves that to the pool.
        on_lost: told when a replica was lost, as `GatewayMetrics.replica_lost` says.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        upstream: Upstream,
        options: GatewayOptions,
        placer: Placer | None = None,
        on_lost: Callable[[str], None] = lambda when: None,
    ) -> None:
        self._pool = pool
        self._on_lost = on_lost
        self._upstream = upstream
        self._placer = placer
        self._queue_timeout_s = options.queue_timeout_s
        self._watch = Watch(self._is_healthy)

    async def aclose(self) -> None:
        """Stop to watch replicas."""
        await self._watch.aclose()

    async def run(self, call: Call, send: Send) -> None:
        """Get an answer and copy it to the client.

        Raises:
            ApiError: no answer could be had; nothing was sent.
        """
        answer = await self.fetch(call)
        journal = self._journal(call, answer)
        if journal.why_not is not None:
            call.drop_body()
        try:
            call.status = answer.reply.status
            call.streamed = answer.streamed
            call.replica_id = answer.lease.replica.replica_id
            headers = [head for head in answer.reply.headers if head[0] not in _NOT_COPIED]
            headers.append((b"x-request-id", call.request_id))
            headers.append((b"x-headrace-replica", call.replica_id.encode()))
            start = {"type": "http.response.start", "status": call.status, "headers": headers}
            if answer.streamed:
                await send(start)
                await self._copy_stream(call, answer, journal, send)
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
                    streamed and body.startswith(call.dialect.failed)
                )
                if failed and not await self._is_healthy(lease.replica):
                    why = f"status {reply.status} and an error from a dying replica"
                    raise ReplicaLost(why, sent=True, dying=True)
            except BaseException:
                reply.close()
                raise
        return Answer(lease, reply, body, streamed)

    def _journal(self, call: Call, answer: Answer) -> Journal:
        """Of a stream; it says why the stream cannot be taken up."""
        journal = Journal(call.dialect.failed)
        if not any(name == HEADER for name, _ in answer.reply.headers):
            journal.stop("its replica does not tell what its engine said")
        elif call.held is None or not call.held.keep(call.held.size):
            journal.stop("the gateway has no room to keep its request")
        return journal

    async def _copy_stream(self, call: Call, answer: Answer, journal: Journal, send: Send) -> None:
        """Pass on the events of a stream to its end, from as many replicas as it takes."""
        first, tries, had = answer, 0, 0
        tail = b""
        try:
            while True:
                try:
                    tail = await self._copy_events(call, answer, journal, send)
                    break
                except (ReplicaLost, Diverged) as lost:
                    if call.dialect.is_over(call.last):
                        self._pool.failed(answer.lease.replica)
                        break
                    tries = 1 if journal.progress > had else tries + 1
                    had = journal.progress
                    try:
                        answer = await self._take_up(call, answer, journal, lost, tries)
                    except errors.ApiError as error:
                        self._on_lost("stream")
                        tail = call.dialect.event(error, call.last)
                        break
        finally:
            if answer is not first:
                answer.close()
        call.sent_bytes += len(tail)
        await send({"type": "http.response.body", "body": tail})

    async def _copy_events(self, call: Call, answer: Answer, journal: Journal, send: Send) -> bytes:
        """Pass on the events of one answer, each as soon as it is whole; what is behind the last.

        Raises:
            ReplicaLost: the answer broke off.
            Diverged: it is not the stream that the client has.
        """
        read_some, chunk = answer.reply.read_some, answer.body
        with self._watch.over(answer.lease.replica) as watched:
            async with watched.waits():
                while chunk:
                    events, error = journal.pass_on(chunk)
                    if events:
                        await send(
                            {"type": "http.response.body", "body": events, "more_body": True}
                        )
                        if call.ttft_s is None:
                            call.ttft_s = perf_counter() - call.started
                        call.sent_bytes += len(events)
                        call.last = events
                    if error:
                        if await self._is_healthy(answer.lease.replica):
                            return error
                        raise ReplicaLost("an error from a dying replica", sent=True, dying=True)
                    chunk = await read_some()
                    watched.heard()
        return journal.rest()

    async def _take_up(
        self,
        call: Call,
        answer: Answer,
        journal: Journal,
        lost: ReplicaLost | Diverged,
        tries: int,
    ) -> Answer:
        """A second answer to a stream that broke off, which begins with what the client has.

        Raises:
            ApiError: it cannot be had.
        """
        replica = answer.lease.replica
        answer.close()
        dying = isinstance(lost, ReplicaLost) and lost.dying
        lives = not dying and await self._is_healthy(replica)
        if not lives:
            self._pool.failed(replica, dying=dying)
        if journal.why_not is not None:
            raise errors.replica_lost(_MIDWAY + journal.why_not)
        if isinstance(lost, Diverged) or tries > MAX_DELIVERIES:
            raise errors.replica_lost(f"{_MIDWAY}{lost}, {tries} times in a row")
        call.said = journal.take_up()
        answer = await self.fetch(call, replica.replica_id if lives else "")
        if answer.reply.status != 200 or not any(n == HEADER for n, _ in answer.reply.headers):
            answer.close()
            raise errors.replica_lost(f"{_MIDWAY}another replica answered {answer.reply.status}")
        self._on_lost("taken_up")
        return answer

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
