"""The gateway as one ASGI callable: routes, refusals, and the life of a request.

It is plain ASGI, without a framework, since all that a router and its middleware would do costs
time on each request. It runs under any ASGI server, also mounted below a root path.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter
from typing import Any

import msgspec

from headrace.gateway import errors, limits, tracing
from headrace.gateway.admin import ROUTER, SPECULATION, WARM, Admin
from headrace.gateway.asgi import (
    JSON_TYPE,
    ClientGone,
    Interrupts,
    Receive,
    Scope,
    Send,
    send_answer,
)
from headrace.gateway.backend import Backend, GatewayMetrics, GatewayOptions, NoMetrics
from headrace.gateway.errors import ApiError, Headers
from headrace.gateway.memory import MEMORY, MemoryAdmin, tenant_of
from headrace.gateway.pick import affinity_key, draftable_tokens
from headrace.gateway.relay import Call, Relay
from headrace.gateway.replicas import ReplicaPool
from headrace.gateway.upstream import Upstream
from headrace_decode.tenants import ALL_ALIKE, Tenants

logger = logging.getLogger("headrace.gateway")

RELAYED_POSTS = ("/v1/chat/completions", "/v1/completions")
MODELS = "/v1/models"
MAX_CHANGE_BODY_BYTES = 1_000
CHANGES = (ROUTER, SPECULATION)
CLIENT_GONE_STATUS = 499  # nginx's number for it; only in logs and metrics

_BODY_LATE = "body late"
_TIME_UP = "time up"
# Not for the replica: hop-by-hop headers (RFC 9110, 7.6.1), the client's key, and what the gateway
# or its HTTP client writes itself.
_NOT_FORWARDED = frozenset(
    {
        b"authorization",
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
    }
)


def build_gateway_app(
    settings: object,
    backend: Backend,
    internal_token: str,
    model_id: str,
    metrics: GatewayMetrics | None = None,
    tenants: Tenants = ALL_ALIKE,
) -> GatewayApp:
    """The gateway for `backend`'s replicas.

    Args:
        settings: the `gateway` section of the configuration; see `GatewayOptions`.
        backend: the cluster.
        internal_token: sent to replicas as `x-headrace-internal`.
        model_id: the model's name, for documents; the replicas decide what they serve.
        metrics: where to report.
        tenants: which are drafted for.

    Raises:
        ValueError: the file of API keys cannot be used.
    """
    options = GatewayOptions.of(settings)
    return GatewayApp(options, backend, internal_token, model_id, metrics or NoMetrics(), tenants)


class GatewayApp:
    """The ASGI callable, bound to the event loop of its first request; see `build_gateway_app`."""

    def __init__(
        self,
        options: GatewayOptions,
        backend: Backend,
        internal_token: str,
        model_id: str,
        metrics: GatewayMetrics,
        tenants: Tenants,
    ) -> None:
        self.options = options
        self._tenants = tenants
        self._backend = backend
        self._internal_token = internal_token
        self._metrics = metrics
        self._keys = limits.KeyRing.load(options.api_keys, options.api_keys_file)
        self._corpora = MemoryAdmin(backend)
        self._admin = Admin(backend, model_id, options, keys_on=bool(self._keys))
        self._relaying = 0
        self._parts: tuple[ReplicaPool, Upstream, Relay] | None = None
        self._traced = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1003})

    async def start(self) -> None:
        """Bind to the running event loop and begin to poll for replicas."""
        if self._parts is None:
            pool = ReplicaPool(self._backend)
            upstream = Upstream(self.options.connect_timeout_s)
            relay = Relay(pool, upstream, self.options, self._internal_token)
            self._parts = pool, upstream, relay
            self._traced = tracing.tracing_is_configured()
            pool.start()

    async def aclose(self) -> None:
        """Stop polling and close the connections to replicas."""
        if self._parts is not None:
            pool, upstream, _ = self._parts
            self._parts = None
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

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        path: str = scope["path"]
        root = scope.get("root_path", "")
        if root and path.startswith(root):
            path = path[len(root) :] or "/"
        seen: dict[bytes, bytes] = dict(scope["headers"])
        query = scope.get("query_string", b"")
        request_id = limits.request_id_of(seen.get(b"x-request-id"))
        method: str = scope["method"]
        call = Call(
            request_id=request_id,
            method=method,
            target=f"{path}?{query.decode('latin-1')}" if query else path,
            headers=_forwarded(scope["headers"], seen, request_id),
            started=started,
        )
        await self.start()
        if path in RELAYED_POSTS and method == "POST":
            await self._guarded(call, path, receive, send, self._completion, seen)
        elif path == MODELS and method in ("GET", "HEAD"):
            await self._guarded(call, path, receive, send, self._models, seen)
        elif path.startswith(MODELS + "/") and method in ("GET", "HEAD"):
            await self._guarded(call, path, receive, send, self._model, seen)
        elif path in CHANGES and method == "PUT":
            call.from_here = _is_loopback(scope.get("client"))
            await self._guarded(call, path, receive, send, self._change, seen)
        elif path == WARM and method == "POST":
            call.from_here = _is_loopback(scope.get("client"))
            await self._guarded(call, path, receive, send, self._warm, seen)
        elif path == MEMORY or path.startswith(MEMORY + "/"):
            call.from_here = _is_loopback(scope.get("client"))
            await self._guarded(call, path, receive, send, self._memory, seen)
        else:
            await self._guarded(call, path, receive, send, self._other, seen)

    async def _guarded(
        self,
        call: Call,
        path: str,
        receive: Receive,
        send: Send,
        handler: Callable[..., Awaitable[None]],
        seen: dict[bytes, bytes],
    ) -> None:
        """Run a handler with its key check, its time limit, its error answers and its log line."""
        interrupts = Interrupts()
        span = tracing.start_span(call, path) if self._traced else None
        try:
            try:
                if path != "/health":
                    self._keys.check(seen.get(b"authorization"))
                await handler(call, path, receive, send, seen, interrupts)
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
            await _refuse(call, error, send)
        except Exception:
            logger.exception("request %s failed in the gateway", call.request_id.decode())
            await _refuse(call, errors.internal_error(), send)
        finally:
            interrupts.close()
            self._report(call, path)
            if span is not None:
                tracing.end_span(span, call)

    async def _completion(
        self,
        call: Call,
        path: str,
        receive: Receive,
        send: Send,
        seen: dict[bytes, bytes],
        interrupts: Interrupts,
    ) -> None:
        """Check a request's body, then relay it."""
        options = self.options
        if self._relaying >= options.max_concurrent:
            raise errors.too_many_requests(options.max_concurrent)
        self._relaying += 1
        try:
            limits.check_content_type(seen.get(b"content-type"))
            limits.check_length(seen.get(b"content-length"), options.max_body_bytes)
            interrupts.set_deadline(options.body_timeout_s, _BODY_LATE)
            began = perf_counter()
            call.body = await limits.read_body(receive, options.max_body_bytes)
            call.waited_s = perf_counter() - began
            request = limits.parse_object(call.body)
            limits.check_fields(request)
            call.affinity = affinity_key(request)
            call.draftable_tokens = draftable_tokens(request, self._tenants)
            left_s = options.request_timeout_s - (perf_counter() - call.started)
            interrupts.set_deadline(left_s, _TIME_UP)
            interrupts.listen(receive)
            await self._relay(call, send)
        finally:
            self._relaying -= 1

    async def _models(
        self,
        call: Call,
        path: str,
        receive: Receive,
        send: Send,
        seen: dict[bytes, bytes],
        interrupts: Interrupts,
    ) -> None:
        """Relay the list of models."""
        interrupts.set_deadline(self.options.request_timeout_s, _TIME_UP)
        interrupts.listen(receive)
        await self._relay(call, send)

    async def _model(
        self,
        call: Call,
        path: str,
        receive: Receive,
        send: Send,
        seen: dict[bytes, bytes],
        interrupts: Interrupts,
    ) -> None:
        """One model out of the replica's list, as vLLM has no route for it."""
        interrupts.set_deadline(self.options.request_timeout_s, _TIME_UP)
        interrupts.listen(receive)
        assert self._parts is not None
        call.target = MODELS
        answer = await self._parts[2].fetch(call)
        answer.close()
        body = self._admin.model(answer.body, path[len(MODELS) + 1 :])
        await _answer(call, send, 200, body, JSON_TYPE)

    async def _change(
        self,
        call: Call,
        path: str,
        receive: Receive,
        send: Send,
        seen: dict[bytes, bytes],
        interrupts: Interrupts,
    ) -> None:
        """Change how the app works; only from this machine, as it concerns every tenant."""
        if not call.from_here:
            raise errors.only_from_here(path)
        limits.check_content_type(seen.get(b"content-type"))
        interrupts.set_deadline(self.options.body_timeout_s, _BODY_LATE)
        wanted = limits.parse_object(await limits.read_body(receive, MAX_CHANGE_BODY_BYTES))
        if path == ROUTER:
            body = await self._admin.set_policy(wanted)
        else:
            body = await self._admin.set_speculation(wanted)
        await _answer(call, send, 200, body, JSON_TYPE)

    async def _warm(
        self,
        call: Call,
        path: str,
        receive: Receive,
        send: Send,
        seen: dict[bytes, bytes],
        interrupts: Interrupts,
    ) -> None:
        """Make prompts' KV now."""
        limits.check_content_type(seen.get(b"content-type"))
        limits.check_length(seen.get(b"content-length"), self.options.max_body_bytes)
        interrupts.set_deadline(self.options.body_timeout_s, _BODY_LATE)
        wanted = limits.parse_object(await limits.read_body(receive, self.options.max_body_bytes))
        interrupts.set_deadline(self.options.request_timeout_s, _TIME_UP)
        interrupts.listen(receive)
        body = await self._admin.warm(wanted, may_pin=call.from_here)
        await _answer(call, send, 200, body, JSON_TYPE)

    async def _memory(
        self,
        call: Call,
        path: str,
        receive: Receive,
        send: Send,
        seen: dict[bytes, bytes],
        interrupts: Interrupts,
    ) -> None:
        """Corpora of the drafting memories; only from this machine, as it concerns every tenant."""
        if not call.from_here:
            raise errors.only_from_here(path)
        corpus = path[len(MEMORY) + 1 :]
        allowed = ["PUT", "DELETE"] if corpus else ["GET", "HEAD"]
        if call.method not in allowed:
            raise errors.method_not_allowed(call.method, allowed)
        wanted: Mapping[str, Any] = {}
        if call.method == "PUT":
            limits.check_content_type(seen.get(b"content-type"))
            limits.check_length(seen.get(b"content-length"), self.options.max_body_bytes)
            interrupts.set_deadline(self.options.body_timeout_s, _BODY_LATE)
            body = await limits.read_body(receive, self.options.max_body_bytes)
            wanted = limits.parse_object(body)
        interrupts.set_deadline(self.options.request_timeout_s, _TIME_UP)
        if call.method == "PUT":
            answer = await self._corpora.load(corpus, wanted)
        elif call.method == "DELETE":
            answer = await self._corpora.drop(corpus, tenant_of(call.target))
        else:
            answer = await self._corpora.listing()
        await _answer(call, send, 200, msgspec.json.encode(answer), JSON_TYPE)

    async def _other(
        self,
        call: Call,
        path: str,
        receive: Receive,
        send: Send,
        seen: dict[bytes, bytes],
        interrupts: Interrupts,
    ) -> None:
        """The gateway's own documents, and what does not exist."""
        if path in RELAYED_POSTS:
            raise errors.method_not_allowed(call.method, ["POST"])
        if path in CHANGES:
            raise errors.method_not_allowed(call.method, ["PUT"])
        if path == WARM:
            raise errors.method_not_allowed(call.method, ["POST"])
        exists = path == MODELS or path.startswith(MODELS + "/")
        document = self._admin.find(path)
        if document is None and not exists:
            raise errors.not_found(path)
        if document is None or call.method not in ("GET", "HEAD"):
            raise errors.method_not_allowed(call.method, ["GET", "HEAD"])
        assert self._parts is not None
        status, body, content_type = await self._admin.answer(document, self._parts[0])
        await _answer(call, send, status, body, (b"content-type", content_type))

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
        level = logging.INFO if path.startswith("/v1/") else logging.DEBUG
        if path in RELAYED_POSTS:
            self._metrics.request_done(path, call.status, call.ttft_s, total_s, call.streamed)
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


def _forwarded(
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
        await _answer(call, send, error.status, error.body(), JSON_TYPE, *error.headers)
    elif call.streamed:
        await send({"type": "http.response.body", "body": error.event()})


def _is_loopback(client: Any) -> bool:
    """Whether a connection comes from this machine."""
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
