"""The gateway as one ASGI callable: routes, refusals, and the life of a request.

It is plain ASGI: a framework's router and middleware would cost time on each request. It runs under
any ASGI server, also mounted below a root path. Paths that are not the gateway's own go to the
replicas, which report their routes with their load. Until one has, such a request waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from headrace.gateway import errors, tracing
from headrace.gateway.admin import Admin
from headrace.gateway.admission.classes import (
    DEFAULT,
    HEADER,
    AdmissionOptions,
    ClassError,
    SloClass,
)
from headrace.gateway.admission.door import Door
from headrace.gateway.asgi import (
    ClientGone,
    Interrupts,
    Receive,
    Scope,
    Send,
    hang_up,
    path_of,
    write_at_once,
)
from headrace.gateway.asked import BODY_LATE, TIME_UP, Asked, Intake
from headrace.gateway.backend import Backend, GatewayMetrics, GatewayOptions, NoMetrics
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress import limits
from headrace.gateway.ingress.browsers import AllowedHosts, cors
from headrace.gateway.ingress.keys import ADMIN, OPERATOR, Caller, Keys
from headrace.gateway.memory import MemoryAdmin
from headrace.gateway.own import OURS, OwnRoutes, needs_no_key, redirect
from headrace.gateway.pick import affinity_key, draftable_tokens
from headrace.gateway.placing.placer import PLACED, Placer
from headrace.gateway.relay import resume
from headrace.gateway.relay.call import Call, in_flight
from headrace.gateway.relay.relay import Relay, forwarded
from headrace.gateway.replicas import ReplicaPool
from headrace.gateway.upstream import Upstream
from headrace_decode.resume.said import RESUME
from headrace_decode.routes import Route
from headrace_decode.techniques import TechniqueError, asked_of
from headrace_decode.tenants import ALL_ALIKE, Tenants
from headrace_engine.stall import LoopStall

logger = logging.getLogger("headrace.gateway")

WANTED_S = 10.0
"""Time after a request during which it still wakes a decode deployment that is scaled to zero: a
prefill replica may have answered it."""

MakePlacer = Callable[[ReplicaPool, Upstream], Placer]

_NO_CLASSES = AdmissionOptions()
CLIENT_GONE_STATUS = 499  # as in nginx; only in logs and metrics


def build_gateway_app(
    settings: object,
    backend: Backend,
    model_id: str,
    metrics: GatewayMetrics | None = None,
    tenants: Tenants = ALL_ALIKE,
    make_placer: MakePlacer | None = None,
) -> GatewayApp:
    """Return the gateway for `backend`'s replicas.

    Args:
        settings: the `gateway` section of the configuration; see `GatewayOptions`.
        backend: the cluster.
        model_id: the model's name, for documents; the replicas decide what they serve.
        metrics: receives the gateway's metrics.
        tenants: permissions of the tenants, such as for drafts.
        make_placer: makes the `Placer` that plans requests; None to let the pool choose replicas.

    Raises:
        ValueError: the key file cannot be used.
    """
    options = GatewayOptions.of(settings)
    return GatewayApp(options, backend, model_id, metrics or NoMetrics(), tenants, make_placer)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The objects that belong to one event loop."""

    pool: ReplicaPool
    upstream: Upstream
    relay: Relay
    own: OwnRoutes
    placer: Placer | None
    door: Door | None


class GatewayApp:
    """The ASGI callable, bound to the event loop of its first request; see `build_gateway_app`."""

    def __init__(
        self,
        options: GatewayOptions,
        backend: Backend,
        model_id: str,
        metrics: GatewayMetrics,
        tenants: Tenants,
        make_placer: MakePlacer | None = None,
    ) -> None:
        self.options = options
        self._make_placer = make_placer
        self._tenants = tenants
        self._backend = backend
        self._metrics = metrics
        classes = None if options.admission is None else options.admission.classes
        hashes = {ADMIN: options.admin_key_hash, OPERATOR: options.operator_key_hash}
        admins = {name: hashed for name, hashed in hashes.items() if hashed is not None}
        self._keys = Keys(options.api_keys, options.api_keys_file, admins, classes=classes)
        keys_on = bool(self._keys)
        self._corpora = MemoryAdmin(backend, keys_on=keys_on)
        self._admin = Admin(backend, model_id, options, keys_on=keys_on, state=self._state)
        self._intake = Intake(options, keys_on=keys_on)
        self._relaying = 0
        self._relayed_s = -WANTED_S
        self._calls: dict[int, Call] = {}  # in order of their start, at most `max_concurrent`
        self._stall = LoopStall()
        self._across_sites = cors(options, self._http)
        self._hosts = AllowedHosts([options.host, *options.allowed_hosts])
        self._parts: _Parts | None = None
        self._traced = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            with self._stall.watching():
                await self._choose(scope)(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1003})

    def _state(self) -> dict[str, Any]:
        """Return this gateway's state, for the status."""
        placer = None if self._parts is None else self._parts.placer
        door = None if self._parts is None else self._parts.door
        return {
            **({} if placer is None else {"router": placer.stats()}),
            **({} if door is None else {"queue": door.stats()}),
            "pid": os.getpid(),
            "relaying": self._relaying,
            "requests": in_flight(self._calls.values()),
            "body_bytes": self._intake.held_bytes,
            "keys_stale": self._keys.are_stale,
            **self._stall.snapshot(),
        }

    async def start(self) -> None:
        """Bind to the running event loop and start to poll for replicas."""
        if self._parts is None:
            pool = ReplicaPool(self._backend, self._tell)
            upstream = Upstream(self.options.connect_timeout_s)
            placer = None if self._make_placer is None else self._make_placer(pool, upstream)
            told = self._metrics.replica_lost, self._metrics.techniques
            relay = Relay(pool, upstream, self.options, placer, *told, hold=self._intake.hold)
            door = self._door(pool, placer)
            own = OwnRoutes(
                self._admin,
                self._corpora,
                self._intake,
                place=self._place,
                admitted=self._admitted,
                pool=pool,
                relay=relay,
            )
            self._parts = _Parts(pool, upstream, relay, own, placer, door)
            self._traced = tracing.tracing_is_configured()
            self._keys.start()
            pool.start()
            if placer is not None:
                placer.start()
            if door is not None:
                door.start()

    def _door(self, pool: ReplicaPool, placer: Placer | None) -> Door | None:
        """Return the queue, or None if none is configured."""
        options = self.options.admission
        if options is None:
            return None
        door = Door(
            *(options, pool, None if placer is None else placer.cluster),
            one_tenant=not self._keys,
            peers=self._backend.admitted,
            waited=self._metrics.queued,
        )
        if placer is not None:
            placer.on_plan, placer.targets, placer.least = door.planned, door.targets, 1
        return door

    def _tell(self) -> None:
        """Export this gateway's state as metrics."""
        if self._parts is not None:
            placer = self._parts.placer
            oldest_s = 0.0 if placer is None else placer.oldest_report_s
            self._metrics.state(self._parts.pool.ready_now, self._relaying, oldest_s)
            self._metrics.keys_stale(self._keys.are_stale)
            if self._parts.door is not None:
                stats = self._parts.door.stats()
                self._metrics.queue(stats["waiting"], stats["predicted_wait_s"])

    @property
    def wanted(self) -> bool:
        """Whether there is work for a replica, or was within `WANTED_S`."""
        return self._relaying > 0 or perf_counter() - self._relayed_s < WANTED_S

    @property
    def relaying(self) -> int:
        """Number of requests that replicas work on, or that wait for one."""
        return self._relaying

    def members(self, replica_ids: frozenset[str]) -> None:
        """Set the replicas that run, as Ray Serve reports them; others get no more requests."""
        if self._parts is not None:
            self._parts.pool.members(replica_ids)

    async def aclose(self) -> None:
        """Stop polling and close the connections to replicas."""
        if self._parts is not None:
            parts, self._parts = self._parts, None
            await self._keys.aclose()
            if parts.door is not None:
                await parts.door.aclose()
            await parts.relay.aclose()
            if parts.placer is not None:
                await parts.placer.aclose()
            await parts.pool.aclose()
            await parts.upstream.aclose()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            if (await receive())["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    def _choose(self, scope: Scope) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        """Return the handler of a request, with CORS for relayed routes if it is configured.

        Pages of allowed sites may call relayed routes, but never the administration.
        """
        if self._across_sites is not None and not path_of(scope).startswith(OURS):
            return self._across_sites
        return self._http

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        path = path_of(scope)
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        seen: dict[bytes, bytes] = dict(headers)
        query = scope.get("query_string", b"")
        request_id = limits.request_id_of(seen.get(b"x-request-id"))
        method: str = scope["method"]
        call = Call(
            request_id=request_id,
            method=method,
            target=f"{path}?{query.decode('latin-1')}" if query else path,
            headers=forwarded(headers, request_id),
            encodings=tuple(value for name, value in headers if name == b"content-encoding"),
            started=started,
            write_at_once=write_at_once(scope),
        )
        await self.start()
        asked = Asked(call, path, receive, send, seen, scope.get("client"))
        asked.hang_up = hang_up(scope)
        asked.interrupts.set_deadline(self.options.request_timeout_s, TIME_UP)
        asked.is_over_tls = scope.get("scheme") == "https"
        await self._guarded(asked, self._handler(asked))

    def _handler(self, asked: Asked) -> Callable[[Asked], Awaitable[None]]:
        assert self._parts is not None
        parts, path = self._parts, asked.path
        if path.endswith("/") and parts.own.has(path.rstrip("/")):
            return redirect
        own = parts.own.find(path)
        if own is not None:
            return own
        asked.call.route = parts.pool.routes.at(path).get(asked.call.method)
        return self._relayed

    async def _guarded(self, asked: Asked, handler: Callable[[Asked], Awaitable[None]]) -> None:
        """Run a handler with its key check, its time limit, its error answers and its log line."""
        call, path, interrupts = asked.call, asked.path, asked.interrupts
        template = call.route.path if call.route else path
        span = tracing.start_span(call, template) if self._traced else None
        try:
            try:
                if needs_no_key(path):
                    await handler(asked)
                else:
                    if not (self._keys or asked.is_over_tls):
                        self._hosts.check(asked.seen.get(b"host"))
                    asked.caller = self._keys.caller(
                        asked.seen.get(b"authorization"), asked.seen.get(b"x-api-key")
                    )
                    call.tenant = asked.caller.tenant
                    with asked.caller.request(call.started):
                        await handler(asked)
            except ClientGone:
                call.status = call.status or CLIENT_GONE_STATUS
            except asyncio.CancelledError:
                reason = interrupts.taken()
                if reason is None:
                    raise errors.stopping() from None
                if reason == Interrupts.CLIENT_GONE:
                    call.status = call.status or CLIENT_GONE_STATUS
                elif reason == BODY_LATE:
                    raise errors.body_timeout(self.options.body_timeout_s) from None
                else:
                    raise errors.request_timeout(self.options.request_timeout_s) from None
        except ApiError as error:
            await self._refuse(asked, error)
        except Exception:
            logger.exception("request %s failed in the gateway", call.request_id.decode())
            await self._refuse(asked, errors.internal_error())
        finally:
            interrupts.close()
            call.drop_body()
            self._report(call, path)
            if span is not None:
                tracing.end_span(span, call)

    async def _refuse(self, asked: Asked, error: ApiError) -> None:
        asked.call.drop_body()  # a client that does not read the refusal holds nothing
        self._metrics.refused(error.status, error.code or error.kind)
        await asked.refuse(error)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Take one of the `max_concurrent` places for requests that replicas work on.

        Raises:
            ApiError: 429, all are taken.
        """
        if self._relaying >= self.options.max_concurrent:
            raise errors.too_many_requests(self.options.max_concurrent)
        self._relaying += 1
        self._relayed_s = perf_counter()
        try:
            yield
        finally:
            self._relaying -= 1

    @contextlib.asynccontextmanager
    async def _admitted(self, caller: Caller, body_bytes: int) -> AsyncIterator[None]:
        """Pass a request of the gateway's own through the queue, and count it until it ends.

        Raises:
            ApiError: 429, the request would be late, it waited too long, or the queue is full.
        """
        door = None if self._parts is None else self._parts.door
        if door is None:
            yield
            return
        options = self.options.admission or _NO_CLASSES
        slo = options.choose(None, {}, caller.slo, caller.slo_classes)
        ticket = await door.enter(caller.tenant, slo, body_bytes)
        try:
            yield
        finally:
            door.left(ticket, None, None)

    async def _relayed(self, asked: Asked) -> None:
        """Check a request for one of the replicas' routes, then relay it."""
        call = asked.call
        assert self._parts is not None
        pool, route = self._parts.pool, call.route
        if route is None and pool.routes:
            raise pool.routes.refusal(asked.path, call.method)
        with self._place():
            if call.method == "POST" and (route is None or route.takes_json):
                await self._intake.take(asked)
            self._intake.answer_in_time(asked, spent_s=perf_counter() - call.started)
            if route is None:
                route = await self._find(asked, pool)
            await resume.prepare(call, asked.seen.get(RESUME))
            slo = await self._read(asked) if route.takes_json else DEFAULT
            door = self._parts.door
            if door is None or route.path not in PLACED:
                await self._relay(call, asked.send)
                return
            began = perf_counter()
            ticket = await door.enter(call.tenant, slo, len(call.body))
            sent = perf_counter()
            call.waited_s += sent - began
            call.on_first = lambda: door.began(ticket)
            try:
                await self._relay(call, asked.send)
            finally:
                first_s = total_s = None
                if call.status == 200:
                    total_s = perf_counter() - sent
                    if call.streamed and call.ttft_s is not None:
                        first_s = call.started + call.ttft_s - sent
                door.left(ticket, first_s, total_s)

    @property
    def had(self) -> dict[str, float]:
        """Seconds of engine time that each tenant has had from this gateway."""
        door = None if self._parts is None else self._parts.door
        return {} if door is None else dict(door.admission.had)

    async def _read(self, asked: Asked) -> SloClass:
        """Set the call's fields that placing needs, and return the request's class.

        The parsed body, several times as large as its bytes, is freed when this returns.

        Raises:
            ApiError: 400, the body is wrong, or names a class that the request cannot have.
        """
        call = asked.call
        self._intake.use_utf8(call)
        request = await self._intake.parsed(call.body)
        call.affinity = affinity_key(request)
        call.draftable_tokens = draftable_tokens(request, self._tenants, call.tenant)
        try:
            techniques = asked_of(request)
        except TechniqueError as error:
            raise errors.wrong_technique(str(error), error.param) from None
        placed = call.route is not None and call.route.path in PLACED
        call.techniques = techniques if placed else None
        options, caller = self.options.admission or _NO_CLASSES, asked.caller
        try:
            return options.choose(asked.seen.get(HEADER), request, caller.slo, caller.slo_classes)
        except ClassError as error:
            raise errors.unknown_class(str(error), error.param) from None

    async def _find(self, asked: Asked, pool: ReplicaPool) -> Route:
        """Return the route, as soon as a replica has reported its routes.

        Raises:
            ApiError: 404 there is no such path, 405 it takes other methods, 503 no replica has
                reported its routes in time.
        """
        call, began = asked.call, perf_counter()
        table = await pool.known_routes(self.options.queue_timeout_s)
        call.waited_s += perf_counter() - began
        call.route = table.at(asked.path).get(call.method)
        if call.route is None:
            raise table.refusal(asked.path, call.method)
        return call.route

    async def _relay(self, call: Call, send: Send) -> None:
        assert self._parts is not None
        self._calls[id(call)] = call
        try:
            await self._parts.relay.run(call, send)
        finally:
            del self._calls[id(call)]
            if call.own_s is not None:
                self._metrics.own_seconds(call.own_s)

    def _report(self, call: Call, path: str) -> None:
        """Log a request, and count it if it has a replica's route.

        Requests for the gateway's own documents are logged at DEBUG.
        """
        total_s = perf_counter() - call.started
        level = logging.INFO if path.startswith("/v1/") or call.route else logging.DEBUG
        if call.route is not None:
            name = call.route.path
            self._metrics.request_done(name, call.status, call.ttft_s, total_s, call.streamed)
        if not logger.isEnabledFor(level):
            return
        ttft_ms = None if call.ttft_s is None else round(call.ttft_s * 1e3, 3)
        fields: dict[str, Any] = {
            "request_id": call.request_id.decode(),
            "method": call.method,
            "path": path,
            "status": call.status,
            "replica": call.replica_id,
            "ttft_ms": ttft_ms,
            "total_ms": round(total_s * 1e3, 3),
            "bytes": call.sent_bytes,
        }
        logger.log(level, "%s %s %d", call.method, path, call.status, extra=fields)
