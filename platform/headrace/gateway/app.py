"""The gateway as one ASGI callable: routes, refusals, and the life of a request.

It is plain ASGI: a framework's router and middleware would cost time on each request. It runs under
any ASGI server, also mounted below a root path. Paths that are not the gateway's own go to the
replicas, which report their routes with their load. Until one has, such a request waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from headrace.config.gateway import GatewaySettings
from headrace.gateway import errors, tracing
from headrace.gateway.adapters import AdapterAdmin
from headrace.gateway.admin import Admin
from headrace.gateway.asgi import (
    ClientGone,
    Interrupts,
    Receive,
    Scope,
    Send,
    abort_connection,
    path_of,
    write_nowait,
)
from headrace.gateway.backend import Backend, OneModelBackend
from headrace.gateway.batches.batch_service import BatchService
from headrace.gateway.batches.tenant_batches import BatchState
from headrace.gateway.body_reader import BodyReader
from headrace.gateway.builtin_routes import (
    OURS,
    BuiltinRoutes,
    needs_no_key,
    open_console,
    redirect,
)
from headrace.gateway.conversations.routes import ConversationRoutes
from headrace.gateway.conversations.state import ConversationState
from headrace.gateway.corpora import CorpusAdmin
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress import limits
from headrace.gateway.ingress.allowed_hosts import AllowedHosts
from headrace.gateway.ingress.api_keys import ADMIN, OPERATOR, ApiKeys
from headrace.gateway.ingress.cors import cors
from headrace.gateway.models.adapter_names import AdapterNames
from headrace.gateway.models.model_names import ModelNames
from headrace.gateway.models.model_table import ModelTable
from headrace.gateway.models.served_model import MakePlacer, ModelSource, ServedModel
from headrace.gateway.relay.call import Call, finished
from headrace.gateway.relay.headers import forwarded
from headrace.gateway.relay.request_history import RequestHistory
from headrace.gateway.relayed_routes import RelayedRoutes
from headrace.gateway.request_context import BODY_LATE, TIME_UP, RequestContext
from headrace.gateway.upstream import Upstream
from headrace.gateway.usage.ledger import UsageLedger
from headrace.gateway.usage.routes import UsageRoutes
from headrace.observability.gateway_metrics import GatewayMetrics
from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.loop_stall import LoopStall

logger = logging.getLogger("headrace.gateway")

CLIENT_GONE_STATUS = 499  # as in nginx; only in logs and metrics


def build_gateway_app(
    settings: GatewaySettings,
    backend: OneModelBackend,
    model_id: str,
    metrics: GatewayMetrics | None = None,
    make_placer: MakePlacer | None = None,
    conversations: ConversationState | None = None,
    *,
    batches: BatchState | None = None,
    adapters: AdapterSettings | None = None,
    usage: UsageLedger | None = None,
) -> GatewayApp:
    """Return the gateway of an app that serves one model.

    Args:
        settings: the `gateway` section of the configuration.
        backend: the cluster.
        model_id: the model's name, for documents; the replicas decide what they serve.
        metrics: receives the gateway's metrics.
        make_placer: makes the `Placer` that plans requests; None to let the pool choose replicas.
        conversations: keeps responses and conversations; None to keep none.
        batches: keeps files and batches; None for a gateway without them.
        adapters: the configured LoRA adapters; None for an app without adapters.
        usage: the ledger of what requests cost; None for none.

    Raises:
        ValueError: the key file cannot be used.
    """
    source = ModelSource(model_id, backend, make_placer, adapters)
    return GatewayApp(
        *(settings, backend, [source], metrics or GatewayMetrics(), conversations),
        batches=batches,
        usage=usage,
    )


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The objects that belong to one event loop."""

    upstream: Upstream
    models: ModelTable
    builtin: BuiltinRoutes
    relayed: RelayedRoutes
    batches: BatchService | None


class GatewayApp:
    """The ASGI callable, bound to the event loop of its first request.

    Args:
        settings: the `gateway` section of the configuration.
        backend: the cluster.
        models: the models, at least one.
        metrics: receives the gateway's metrics.
        conversations: keeps responses and conversations; None to keep none.
        batches: keeps files and batches; None for a gateway without them.
        usage: the ledger of what requests cost; None for none.

    Raises:
        ValueError: the key file cannot be used.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        backend: Backend,
        models: Sequence[ModelSource],
        metrics: GatewayMetrics,
        conversations: ConversationState | None = None,
        *,
        batches: BatchState | None = None,
        usage: UsageLedger | None = None,
    ) -> None:
        self.settings, self._conversations = settings, conversations
        self._batches, self._usage = batches, usage
        self._sources = tuple(models)
        self._names = names = ModelNames(
            tuple(model.model_id for model in models),
            settings.aliases,
            settings.default_model,
            AdapterNames(
                {one.model_id: one.adapters for one in models if one.adapters is not None}
            ),
        )
        self._adapters = AdapterAdmin(models, names) if names.adapters.models else None
        self._metrics = metrics
        classes = None if settings.admission is None else settings.admission.classes
        hashes = {ADMIN: settings.admin_key_hash, OPERATOR: settings.operator_key_hash}
        admins = {name: hashed for name, hashed in hashes.items() if hashed is not None}
        self._keys = ApiKeys(settings.api_keys, settings.api_keys_file, admins, classes=classes)
        keys_on = bool(self._keys)
        self._corpora = CorpusAdmin([model.backend for model in models], keys_on=keys_on)
        self._admin = Admin(backend, models, names, settings, keys_on=keys_on, gateway=self)
        self.body_reader = BodyReader(settings, keys_on=keys_on)
        self._stall = LoopStall()
        self._history = RequestHistory()
        self._cross_origin = cors(settings, self._http)
        self._hosts = AllowedHosts([settings.host, *settings.allowed_hosts])
        self.parts: GatewayParts | None = None
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

    async def start(self) -> None:
        """Bind to the running event loop and start to poll for replicas."""
        if self.parts is None:
            self.parts = parts = self._make_parts()
            self._traced = tracing.tracing_is_configured()
            self._keys.start()
            for model in parts.models:
                model.start()
            if self._conversations is not None:
                self._conversations.start()
            if parts.batches is not None:
                parts.batches.start()
            if self._usage is not None:
                self._usage.start()

    def _make_parts(self) -> GatewayParts:
        settings, metrics = self.settings, self._metrics
        upstream = Upstream()
        models = ModelTable(
            [
                ServedModel(
                    *(source, settings, metrics),
                    upstream=upstream,
                    body_reader=self.body_reader,
                    one_tenant=not self._keys,
                    on_poll=self._export_metrics,
                )
                for source in self._sources
            ],
            self._names,
        )
        relayed = RelayedRoutes(
            *(settings, self.body_reader, metrics, models),
            conversations=self._conversations,
            on_end=lambda call: self._log_and_count(call, call.path),
        )
        routes = None
        if self._conversations is not None and relayed.background is not None:
            routes = ConversationRoutes(
                *(self._conversations, self.body_reader),
                background=relayed.background,
                max_bytes=settings.max_body_bytes,
            )
        batches = None
        if self._batches is not None:
            batches = BatchService(
                *(self._batches, settings),
                relayed=relayed,
                models=models,
                body_reader=self.body_reader,
                caller=self._keys.caller_of_hash,
                on_end=lambda call: self._log_and_count(call, call.path),
            )
        builtin = BuiltinRoutes(
            *(self._admin, self._corpora, self._adapters, self.body_reader),
            relayed=relayed,
            models=models,
            usage=UsageRoutes(
                self._usage, [source.backend for source in self._sources], self.body_reader
            ),
            conversations=routes,
            batches=None if batches is None else batches.routes,
        )
        return GatewayParts(upstream, models, builtin, relayed, batches)

    async def aclose(self) -> None:
        """Stop polling and close the connections to replicas."""
        if self.parts is not None:
            parts, self.parts = self.parts, None
            await self._keys.aclose()
            if parts.batches is not None:
                await parts.batches.aclose()
            if parts.relayed.background is not None:
                await parts.relayed.background.aclose()
            parts.models.added.close()
            for model in parts.models:
                await model.aclose()
            await parts.upstream.aclose()
            if self._conversations is not None:
                await self._conversations.aclose()
            if self._usage is not None:
                await self._usage.aclose()

    # State

    def is_wanted(self, model_id: str) -> bool:
        """Return whether there is work for a model's replica, or was a short time ago."""
        model = None if self.parts is None else self.parts.models.get(model_id)
        return model is not None and model.is_wanted

    @property
    def relaying(self) -> int:
        """Number of requests that replicas work on, or that wait for one."""
        return 0 if self.parts is None else self.parts.relayed.relaying

    @property
    def charged_s(self) -> dict[str, dict[str, float]]:
        """Seconds of engine time that tenants have had from this gateway: by model, by tenant."""
        models = () if self.parts is None else self.parts.models
        return {model.model_id: model.charged_s for model in models}

    def set_members(self, model_id: str, replica_ids: frozenset[str]) -> None:
        """Set a model's replicas that run, as Ray Serve reports them; others get no requests."""
        model = None if self.parts is None else self.parts.models.get(model_id)
        if model is not None:
            model.pool.set_members(replica_ids)

    def state(self) -> dict[str, Any]:
        """Return this gateway's state, for the status: that of the only model in it, or of several
        models under `models`."""
        models = [] if self.parts is None else list(self.parts.models)
        states = {model.model_id: model.state() for model in models}
        if len(states) == 1:
            (told,) = states.values()
        else:
            told = {"standing_in": sum(one["standing_in"] for one in states.values())}
            told |= {"models": states} if states else {}
        return {
            **told,
            "pid": os.getpid(),
            "relaying": self.relaying,
            "body_bytes": self.body_reader.held_bytes,
            "keys_stale": self._keys.are_stale,
            **self._batch_state(),
            **self._stall.snapshot(),
        }

    def _batch_state(self) -> dict[str, Any]:
        """Return the progress of unfinished batches; nothing in a gateway without batches."""
        service = None if self.parts is None else self.parts.batches
        return {} if service is None else {"batches": service.batches()}

    def requests(self) -> dict[str, Any]:
        """Return the requests in flight and the last finished ones."""
        now = self._history.now()
        in_flight = [] if self.parts is None else self.parts.relayed.in_flight(now)
        return self._history.requests(in_flight)

    def last_minute(self) -> dict[str, float | None]:
        """Return the key figures of the last minute."""
        return self._history.last()

    def history(self) -> dict[str, Any]:
        """Return the key figures since this gateway's start."""
        return self._history.history()

    def _export_metrics(self, model: ServedModel) -> None:
        """Export a model's state, and this gateway's, as metrics."""
        name = model.model_id
        self._metrics.state(name, model.pool.ready_now, model.relaying, model.oldest_report_s)
        self._metrics.keys_stale(self._keys.are_stale)
        if model.queue is not None:
            stats = model.queue.stats()
            self._metrics.queue(name, stats["waiting"], stats["predicted_wait_s"])

    # Requests

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
        if self._cross_origin is not None and not path_of(scope).startswith(OURS):
            return self._cross_origin
        return self._http

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        path = path_of(scope)
        pairs: list[tuple[bytes, bytes]] = scope["headers"]
        headers: dict[bytes, bytes] = dict(pairs)
        query = scope.get("query_string", b"")
        request_id = limits.request_id_of(headers.get(b"x-request-id"))
        method: str = scope["method"]
        call = Call(
            request_id=request_id,
            method=method,
            target=f"{path}?{query.decode('latin-1')}" if query else path,
            headers=forwarded(pairs, request_id),
            encodings=tuple(value for name, value in pairs if name == b"content-encoding"),
            started=started,
            write_nowait=write_nowait(scope),
        )
        await self.start()
        context = RequestContext(call, path, receive, send, headers, scope.get("client"))
        context.abort_connection = abort_connection(scope)
        context.interrupts.set_deadline(self.settings.request_timeout_s, TIME_UP)
        context.is_over_tls = scope.get("scheme") == "https"
        await self._guarded(context, self._handler(context))

    def _handler(self, context: RequestContext) -> Callable[[RequestContext], Awaitable[None]]:
        assert self.parts is not None
        parts, path = self.parts, context.path
        if path.endswith("/") and parts.builtin.has(path.rstrip("/")):
            return redirect
        if context.is_browser_start:
            return open_console
        builtin = parts.builtin.find(path)
        if builtin is not None:
            return builtin
        context.call.route = parts.models.routes.at(path).get(context.call.method)
        return parts.relayed.handle

    async def _guarded(
        self, context: RequestContext, handler: Callable[[RequestContext], Awaitable[None]]
    ) -> None:
        """Run a handler with its key check, its time limit, its error answers and its log line."""
        call, path, interrupts = context.call, context.path, context.interrupts
        template = call.route.path if call.route else path
        span = tracing.start_span(call, template) if self._traced else None
        try:
            try:
                if needs_no_key(path) or context.is_browser_start:
                    await handler(context)
                else:
                    if not (self._keys or context.is_over_tls):
                        self._hosts.check(context.headers.get(b"host"))
                    context.caller = self._keys.caller(
                        context.headers.get(b"authorization"), context.headers.get(b"x-api-key")
                    )
                    call.tenant = context.caller.tenant
                    makes_work = call.route is not None or _makes_work(call.method, path)
                    limit = context.caller.rate_limit
                    with limit.request(call.started, makes_work=makes_work):
                        await handler(context)
            except ClientGone:
                call.status = call.status or CLIENT_GONE_STATUS
            except asyncio.CancelledError:
                reason = interrupts.taken()
                if reason is None:
                    raise errors.stopping() from None
                if reason == Interrupts.CLIENT_GONE:
                    call.status = call.status or CLIENT_GONE_STATUS
                elif reason == BODY_LATE:
                    raise errors.body_timeout(self.settings.body_timeout_s) from None
                else:
                    raise errors.request_timeout(self.settings.request_timeout_s) from None
        except ApiError as error:
            await self._refuse(context, error)
        except Exception:
            logger.exception("request %s failed in the gateway", call.request_id.decode())
            await self._refuse(context, errors.internal_error())
        finally:
            interrupts.close()
            call.drop_body()
            self._log_and_count(call, path)
            if span is not None:
                tracing.end_span(span, call)

    async def _refuse(self, context: RequestContext, error: ApiError) -> None:
        context.call.error = error.code or error.kind
        context.call.drop_body()  # a client that does not read the refusal holds nothing
        self._metrics.refused(error.status, error.code or error.kind)
        await context.refuse(error)

    def _log_and_count(self, call: Call, path: str) -> None:
        """Log a request, and count it if it has a replica's route.

        Requests for the gateway's own documents are logged at DEBUG.
        """
        total_s = perf_counter() - call.started
        level = logging.INFO if path.startswith("/v1/") or call.route else logging.DEBUG
        if call.route is not None:
            name = call.route.path
            self._metrics.request_done(
                *(call.model_id, name, call.status, call.ttft_s, total_s, call.streamed)
            )
            if call.tenant is not None:
                self._metrics.tenant_done(call.tenant, call.model_id, call.status, call.tokens)
            self._history.record(finished(call, self._history.now()))
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


def _makes_work(method: str, path: str) -> bool:
    """Return whether a request to the gateway itself makes work, and does not only read, end or
    delete what is there."""
    return method == "POST" and not path.endswith("/cancel")
