"""The gateway as one ASGI callable: routes, refusals, and the life of a request.

It is plain ASGI, without a framework, since all that a router and its middleware would do costs
time on each request. It runs under any ASGI server, also mounted below a root path.

The gateway's own routes come first. Any other path means what the replicas' applications offer
there, which they tell with their load: the gateway has no list of vLLM's routes. Until a replica
has told, a request for such a path waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec
from starlette.middleware.cors import CORSMiddleware

from headrace.gateway import errors, tracing
from headrace.gateway.admin import Admin
from headrace.gateway.asgi import (
    JSON_TYPE,
    ClientGone,
    Interrupts,
    Receive,
    Scope,
    Send,
    path_of,
    send_answer,
)
from headrace.gateway.backend import Backend, GatewayMetrics, GatewayOptions, NoMetrics
from headrace.gateway.door import limits
from headrace.gateway.door.budget import BodyBudget
from headrace.gateway.door.keys import ANYONE, Caller, Keys, may_administer
from headrace.gateway.errors import ApiError
from headrace.gateway.memory import MEMORY, MemoryAdmin, tenant_of
from headrace.gateway.openapi import MODELS, ROUTER, SPECULATION, WARM
from headrace.gateway.pick import affinity_key, draftable_tokens
from headrace.gateway.relay import Call, Relay, forwarded
from headrace.gateway.replicas import ReplicaPool
from headrace.gateway.upstream import Upstream
from headrace_decode.routes import Route
from headrace_decode.tenants import ALL_ALIKE, Tenants
from headrace_engine.stall import LoopStall

logger = logging.getLogger("headrace.gateway")

OURS = "/headrace/"
MAX_CHANGE_BODY_BYTES = 1_000
CHANGES = (ROUTER, SPECULATION)
CLIENT_GONE_STATUS = 499  # nginx's number for it; only in logs and metrics
_BODY_LATE = "body late"
_TIME_UP = "time up"


def build_gateway_app(
    settings: object,
    backend: Backend,
    model_id: str,
    metrics: GatewayMetrics | None = None,
    tenants: Tenants = ALL_ALIKE,
) -> GatewayApp:
    """The gateway for `backend`'s replicas.

    Args:
        settings: the `gateway` section of the configuration; see `GatewayOptions`.
        backend: the cluster.
        model_id: the model's name, for documents; the replicas decide what they serve.
        metrics: where to report.
        tenants: which are drafted for.

    Raises:
        ValueError: the key file cannot be used.
    """
    options = GatewayOptions.of(settings)
    return GatewayApp(options, backend, model_id, metrics or NoMetrics(), tenants)


@dataclass(slots=True)
class Asked:
    """A request in its handler.

    Attributes:
        path: without the app's root, and without its query.
        seen: the client's headers.
        client: its address and port, as ASGI has them; None if nobody knows.
        caller: who the request's key proves it comes from.
        interrupts: what ends the handler early.
    """

    call: Call
    path: str
    receive: Receive
    send: Send
    seen: dict[bytes, bytes]
    client: Sequence[Any] | None
    caller: Caller = ANYONE
    interrupts: Interrupts = field(default_factory=Interrupts)

    @property
    def may_administer(self) -> bool:
        """Whether the request may change how the app works, or look into it."""
        return may_administer(self.caller, self.client, self.seen)


class GatewayApp:
    """The ASGI callable, bound to the event loop of its first request; see `build_gateway_app`."""

    def __init__(
        self,
        options: GatewayOptions,
        backend: Backend,
        model_id: str,
        metrics: GatewayMetrics,
        tenants: Tenants,
    ) -> None:
        self.options = options
        self._tenants = tenants
        self._backend = backend
        self._metrics = metrics
        self._keys = Keys(options.api_keys, options.api_keys_file, options.admin_key_hash)
        self._corpora = MemoryAdmin(backend, keys_on=bool(self._keys))
        self._admin = Admin(backend, model_id, options, keys_on=bool(self._keys), state=self._state)
        self._relaying = 0
        self._bodies = BodyBudget(options.body_budget_bytes)
        self._stall = LoopStall()
        self._across_sites = _cors(options, self._http)
        self._parts: tuple[ReplicaPool, Upstream, Relay] | None = None
        self._traced = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            await self._choose(scope)(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1003})

    def _state(self) -> dict[str, Any]:
        """Of this gateway, for the status."""
        return {
            "pid": os.getpid(),
            "relaying": self._relaying,
            "body_bytes": self._bodies.held_bytes,
            **self._stall.snapshot(),
        }

    async def start(self) -> None:
        """Bind to the running event loop and begin to poll for replicas."""
        if self._parts is None:
            pool = ReplicaPool(self._backend)
            upstream = Upstream(self.options.connect_timeout_s)
            relay = Relay(pool, upstream, self.options)
            self._parts = pool, upstream, relay
            self._traced = tracing.tracing_is_configured()
            pool.start()
            self._stall.start()

    @property
    def relaying(self) -> int:
        """Requests that replicas work on, or that wait for one."""
        return self._relaying

    def members(self, replica_ids: frozenset[str]) -> None:
        """These replicas run, says Ray Serve; others get no more requests."""
        if self._parts is not None:
            self._parts[0].members(replica_ids)

    async def aclose(self) -> None:
        """Stop polling and close the connections to replicas."""
        if self._parts is not None:
            pool, upstream, _ = self._parts
            self._parts = None
            self._stall.stop()
            await pool.aclose()
            await upstream.aclose()

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
        """Pages of allowed sites may call what is relayed, never the administration."""
        if self._across_sites is not None and not path_of(scope).startswith(OURS):
            return self._across_sites
        return self._http

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        path = path_of(scope)
        seen: dict[bytes, bytes] = dict(scope["headers"])
        query = scope.get("query_string", b"")
        request_id = limits.request_id_of(seen.get(b"x-request-id"))
        method: str = scope["method"]
        call = Call(
            request_id=request_id,
            method=method,
            target=f"{path}?{query.decode('latin-1')}" if query else path,
            headers=forwarded(scope["headers"], seen, request_id),
            started=started,
        )
        await self.start()
        asked = Asked(call, path, receive, send, seen, scope.get("client"))
        await self._guarded(asked, self._handler(asked))

    def _handler(self, asked: Asked) -> Callable[[Asked], Awaitable[None]]:
        path, method = asked.path, asked.call.method
        if path in CHANGES and method == "PUT":
            return self._change
        if path == WARM and method == "POST":
            return self._warm
        if path == MEMORY or path.startswith(MEMORY + "/"):
            return self._memory
        if path.startswith(OURS) or self._admin.find(path) is not None:
            return self._other
        if path.startswith(MODELS + "/"):
            return self._model
        assert self._parts is not None
        asked.call.route = self._parts[0].routes.at(path).get(method)
        return self._relayed

    async def _guarded(self, asked: Asked, handler: Callable[[Asked], Awaitable[None]]) -> None:
        """Run a handler with its key check, its time limit, its error answers and its log line."""
        call, path, interrupts = asked.call, asked.path, asked.interrupts
        template = call.route.path if call.route else path
        span = tracing.start_span(call, template) if self._traced else None
        try:
            try:
                if path == "/health":
                    await handler(asked)
                else:
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
                    raise
                if reason == Interrupts.CLIENT_GONE:
                    call.status = call.status or CLIENT_GONE_STATUS
                elif reason == _BODY_LATE:
                    raise errors.body_timeout(self.options.body_timeout_s) from None
                else:
                    raise errors.request_timeout(self.options.request_timeout_s) from None
        except ApiError as error:
            await _refuse(call, error, asked.send)
        except Exception:
            logger.exception("request %s failed in the gateway", call.request_id.decode())
            await _refuse(call, errors.internal_error(), asked.send)
        finally:
            interrupts.close()
            call.drop_body()
            self._report(call, path)
            if span is not None:
                tracing.end_span(span, call)

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """One of the places for requests that replicas work on.

        Raises:
            ApiError: 429, all are taken.
        """
        if self._relaying >= self.options.max_concurrent:
            raise errors.too_many_requests(self.options.max_concurrent)
        self._relaying += 1
        try:
            yield
        finally:
            self._relaying -= 1

    async def _relayed(self, asked: Asked) -> None:
        """Check a request for one of the replicas' routes, then relay it."""
        call = asked.call
        assert self._parts is not None
        pool, route = self._parts[0], call.route
        if route is None and pool.routes:
            raise pool.routes.refusal(asked.path, call.method)
        with self._place():
            if call.method == "POST" and (route is None or route.takes_json):
                await self._take_body(asked)
            left_s = self.options.request_timeout_s - (perf_counter() - call.started)
            asked.interrupts.set_deadline(left_s, _TIME_UP)
            asked.interrupts.listen(asked.receive)
            if route is None:
                route = await self._find(asked, pool)
            if route.takes_json:
                self._read(call)
            await self._relay(call, asked.send)

    def _read(self, call: Call) -> None:
        """What placing a request needs. The parsed body, several times as large, ends here."""
        limits.check_other_bytes(call.body)
        request = limits.parse_object(call.body)
        limits.check_fields(request)
        call.affinity = affinity_key(request)
        call.draftable_tokens = draftable_tokens(request, self._tenants, call.tenant)

    async def _take_body(self, asked: Asked) -> None:
        options, call = self.options, asked.call
        self._check_body(asked, options.max_body_bytes)
        began = perf_counter()
        call.held = self._bodies.hold()
        call.body = await limits.read_body(asked.receive, options.max_body_bytes, call.held)
        call.waited_s += perf_counter() - began

    async def _find(self, asked: Asked, pool: ReplicaPool) -> Route:
        """The route, as soon as a replica has told what it offers.

        Raises:
            ApiError: 404 there is no such path, 405 it takes other methods, 503 nobody has told.
        """
        call, began = asked.call, perf_counter()
        table = await pool.known_routes(self.options.queue_timeout_s)
        call.waited_s += perf_counter() - began
        call.route = table.at(asked.path).get(call.method)
        if call.route is None:
            raise table.refusal(asked.path, call.method)
        return call.route

    async def _model(self, asked: Asked) -> None:
        """One model out of the replica's list, as vLLM has no route for it."""
        if asked.call.method not in ("GET", "HEAD"):
            raise errors.method_not_allowed(asked.call.method, ["GET", "HEAD"])
        self._answer_in_time(asked)
        assert self._parts is not None
        asked.call.method, asked.call.target = "GET", MODELS
        answer = await self._parts[2].fetch(asked.call)
        answer.close()
        body = self._admin.model(answer.body, asked.path[len(MODELS) + 1 :])
        await _answer(asked.call, asked.send, 200, body, JSON_TYPE)

    async def _change(self, asked: Asked) -> None:
        """Change how the app works."""
        self._check_admin(asked)
        wanted = await self._json(asked, MAX_CHANGE_BODY_BYTES)
        if asked.path == ROUTER:
            body = await self._admin.set_policy(wanted)
        else:
            body = await self._admin.set_speculation(wanted)
        await _answer(asked.call, asked.send, 200, body, JSON_TYPE)

    async def _warm(self, asked: Asked) -> None:
        """Make prompts' KV now."""
        with self._place():
            wanted = await self._json(asked, self.options.max_body_bytes)
            self._answer_in_time(asked)
            body = await self._admin.warm(
                wanted, tenant=asked.call.tenant, may_pin=asked.may_administer
            )
        await _answer(asked.call, asked.send, 200, body, JSON_TYPE)

    async def _memory(self, asked: Asked) -> None:
        """Corpora of the drafting memories."""
        call = asked.call
        self._check_admin(asked)
        corpus = asked.path[len(MEMORY) + 1 :]
        allowed = ["PUT", "DELETE"] if corpus else ["GET", "HEAD"]
        if call.method not in allowed:
            raise errors.method_not_allowed(call.method, allowed)
        puts = call.method == "PUT"
        wanted = await self._json(asked, self.options.max_body_bytes) if puts else {}
        asked.interrupts.set_deadline(self.options.request_timeout_s, _TIME_UP)
        if puts:
            answer = await self._corpora.load(corpus, wanted)
        elif call.method == "DELETE":
            answer = await self._corpora.drop(corpus, tenant_of(call.target))
        else:
            answer = await self._corpora.listing()
        await _answer(call, asked.send, 200, msgspec.json.encode(answer), JSON_TYPE)

    async def _other(self, asked: Asked) -> None:
        """The gateway's own documents, and what does not exist."""
        call, path = asked.call, asked.path
        if path in CHANGES:
            raise errors.method_not_allowed(call.method, ["PUT"])
        if path == WARM:
            raise errors.method_not_allowed(call.method, ["POST"])
        document = self._admin.find(path)
        if document is None:
            raise errors.not_found(path)
        if path.startswith(OURS):
            self._check_admin(asked)
        if call.method not in ("GET", "HEAD"):
            raise errors.method_not_allowed(call.method, ["GET", "HEAD"])
        assert self._parts is not None
        status, body, content_type = await self._admin.answer(document, self._parts[0])
        await _answer(call, asked.send, status, body, (b"content-type", content_type))

    def _check_admin(self, asked: Asked) -> None:
        """Refuse what concerns every tenant to everybody but an administrator.

        Raises:
            ApiError: 403.
        """
        if not asked.may_administer:
            raise errors.not_an_admin(asked.path, keys_on=bool(self._keys))

    def _check_body(self, asked: Asked, most_bytes: int) -> None:
        """Refuse a body of another type or size; from here on it has to come in time."""
        limits.check_content_type(asked.seen.get(b"content-type"))
        limits.check_length(asked.seen.get(b"content-length"), most_bytes)
        asked.interrupts.set_deadline(self.options.body_timeout_s, _BODY_LATE)

    async def _json(self, asked: Asked, most_bytes: int) -> Mapping[str, Any]:
        """The request's body, an object."""
        self._check_body(asked, most_bytes)
        asked.call.held = held = self._bodies.hold()
        return limits.parse_object(await limits.read_body(asked.receive, most_bytes, held))

    def _answer_in_time(self, asked: Asked) -> None:
        """From here on the answer has to come in time, and the client to stay."""
        asked.interrupts.set_deadline(self.options.request_timeout_s, _TIME_UP)
        asked.interrupts.listen(asked.receive)

    async def _relay(self, call: Call, send: Send) -> None:
        assert self._parts is not None
        try:
            await self._parts[2].run(call, send)
        finally:
            if call.own_s is not None:
                self._metrics.own_seconds(call.own_s)

    def _report(self, call: Call, path: str) -> None:
        """One log line and one count per request; documents of the gateway's own only at DEBUG."""
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


def _cors(
    options: GatewayOptions, app: Callable[[Scope, Receive, Send], Awaitable[None]]
) -> CORSMiddleware | None:
    """The middleware that vLLM's own server uses; None while no site is allowed."""
    if not options.allowed_origins:
        return None
    return CORSMiddleware(
        app,
        allow_origins=options.allowed_origins,
        allow_credentials=options.allow_credentials,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
    )


async def _answer(
    call: Call, send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]
) -> None:
    """Send an answer of the gateway's own."""
    call.status = status
    call.sent_bytes = len(body)
    await send_answer(send, status, body, [*headers, (b"x-request-id", call.request_id)])


async def _refuse(call: Call, error: ApiError, send: Send) -> None:
    """Send an error: as the answer, or as the last event of a stream that has begun."""
    if call.status == 0:
        body = call.dialect.body(error)
        await _answer(call, send, error.status, body, JSON_TYPE, *error.headers)
    elif call.streamed:
        await send({"type": "http.response.body", "body": call.dialect.event(error, call.last)})
