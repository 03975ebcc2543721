"""A fake replica, a fake cluster and a client for the gateway tests: real HTTP on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from headrace.config import GatewaySettings
from headrace.config.tls_files import TlsFiles
from headrace.gateway import ReplicaInfo, Server, build_gateway_app, serve_gateway
from headrace.gateway.app import GatewayApp
from headrace.gateway.batches.routes import long_bodies
from headrace.gateway.models.served_model import ModelSource
from headrace.observability.gateway_metrics import GatewayMetrics
from headrace_decode.http.public_routes import Route
from headrace_engine.adapters.settings import AdapterSettings

TOKEN = "internal-secret"
MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
ROUTES = (
    Route("POST", CHAT),
    Route("POST", "/v1/completions"),
    Route("GET", "/v1/models", takes_json=False),
    Route("POST", RESPONSES, "responses"),
    Route("GET", RESPONSES + "/{response_id}", "responses", takes_json=False),
    Route("POST", RESPONSES + "/{response_id}/cancel", "responses", takes_json=False),
    Route("POST", MESSAGES, "anthropic"),
)
PROMPT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
BODY = web.RequestKey("body", bytes)
EVENTS = [b'data: {"i":0}\n\n', b'data: {"i":1}\n\n', b"data: [DONE]\n\n"]

Handler = Callable[["FakeReplica", web.Request], Awaitable[web.StreamResponse]]


@dataclass
class FakeReplica:
    """A server in the place of vLLM's, whose answer is `handler`.

    Attributes:
        seen: the requests that came, with their bodies under `BODY`.
        aborted: handlers that were cancelled because the gateway hung up.
        health_s: seconds until its health check answers.
        probes: how often that was asked.
    """

    handler: Handler
    replica_id: str = "decode-1"
    healthy: bool = True
    health_s: float = 0.0
    probes: int = 0
    waiting: int = 0
    seen: list[web.Request] = field(default_factory=list)
    aborted: int = 0
    port: int = 0
    routes: tuple[Route, ...] = ROUTES
    techniques: str = ""
    _runner: web.AppRunner | None = None

    @property
    def info(self) -> ReplicaInfo:
        url = f"http://127.0.0.1:{self.port}"
        told = {"routes": self.routes, "token": TOKEN, "techniques": self.techniques}
        return ReplicaInfo(self.replica_id, url, 0, self.waiting, **told)

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> FakeReplica:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop_listening(self) -> None:
        """Accept no more connections; those that there are stay open."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            self.probes += 1
            await asyncio.sleep(self.health_s)
            return web.Response(status=200 if self.healthy else 503)
        request[BODY] = await request.read()
        self.seen.append(request)
        try:
            return await self.handler(self, request)
        except asyncio.CancelledError:
            self.aborted += 1
            raise


@dataclass
class FakeCluster:
    """The backend of the gateway under test."""

    members: list[FakeReplica] = field(default_factory=list)
    asked: int = 0
    policy: str = "cost"
    told: list[dict[str, Any]] = field(default_factory=list)
    memories: dict[str, Any] = field(default_factory=dict)
    warmed: list[tuple[dict[str, Any], str, bool]] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)
    told_status: dict[str, Any] | None = None
    elsewhere: dict[str, dict[str, float]] = field(default_factory=dict)
    starts_on_demand: bool = False
    added: dict[str, str] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list)

    async def replicas(self) -> list[ReplicaInfo]:
        self.asked += 1
        return [member.info for member in self.members]

    async def status(self) -> dict[str, Any]:
        return self.told_status or {"replicas": []}

    async def warm(self, body: dict[str, Any], salt: str, pin: bool) -> list[dict[str, Any]]:
        self.warmed.append((body, salt, pin))
        return [{"stored_tokens": 128} for _ in self.members]

    async def store(
        self, action: str, namespace: str | None = None, hash: str | None = None
    ) -> list[dict[str, Any]]:
        return []

    async def set_speculation(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        self.told.append(command)
        return [{"replica_id": member.replica_id} for member in self.members]

    async def send_corpus_command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        self.told.append(command)
        return [{"replica_id": each.replica_id, **self.memories} for each in self.members]

    async def added_adapters(self) -> dict[str, str]:
        return dict(self.added)

    async def set_adapter(self, name: str, source: str | None) -> list[dict[str, Any]]:
        self.added.pop(name, None)
        if source is not None:
            self.added[name] = source
        return [{"replica_id": member.replica_id} for member in self.members]

    async def openapi(self) -> dict[str, Any]:
        return self.document

    async def set_policy(self, policy: str) -> int:
        self.policy = policy
        return 1

    async def plan(self, request_id: str) -> dict[str, Any] | None:
        return {"request_id": request_id, "kind": "local"} if request_id == "known" else None

    async def usage(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        return [each for each in self.parts if tenant in (None, each["tenant"])]

    async def admitted(self) -> dict[str, dict[str, float]]:
        return self.elsewhere

    async def metrics(self) -> bytes:
        return b"# TYPE headrace_requests counter\nheadrace_requests 1\n"


@dataclass
class Bench:
    """A gateway, its cluster, and a client of it."""

    gateway: Server
    cluster: FakeCluster
    client: aiohttp.ClientSession
    url: str
    app: GatewayApp

    @property
    def replica(self) -> FakeReplica:
        return self.cluster.members[0]


@contextlib.asynccontextmanager
async def gateway_over(
    *handlers: Handler,
    metrics: Any = None,
    backend: Any = None,
    tls: TlsFiles | None = None,
    client_tls: ssl.SSLContext | None = None,
    make_placer: Any = None,
    state: Any = None,
    batch_state: Any = None,
    usage: Any = None,
    has_adapters: bool = False,
    **options: Any,
) -> AsyncIterator[Bench]:
    """A running gateway over one fake replica for each handler."""
    cluster = FakeCluster()
    for number, handler in enumerate(handlers, 1):
        cluster.members.append(await FakeReplica(handler, f"decode-{number}").start())
    settings = GatewaySettings.model_construct(**options)  # also with limits that are too low
    app = build_gateway_app(
        *(settings, backend or cluster, MODEL, metrics),
        make_placer=make_placer,
        conversations=state,
        batches=batch_state,
        adapters=AdapterSettings(MODEL) if has_adapters else None,
        usage=usage,
    )
    gateway = await serve_gateway(
        *(app, "127.0.0.1", 0),
        tls=tls,
        max_body_bytes=settings.max_body_bytes,
        long_bodies=long_bodies(settings),
    )
    url = f"{'https' if tls else 'http'}://127.0.0.1:{gateway.port}"
    connector = aiohttp.TCPConnector(ssl=client_tls) if client_tls else None
    client = aiohttp.ClientSession(url, auto_decompress=False, connector=connector)
    try:
        yield Bench(gateway, cluster, client, url, app)
    finally:
        await client.close()
        for member in cluster.members:
            await member.stop()
        await gateway.stop(grace_s=1)


@contextlib.asynccontextmanager
async def gateway_of_models(
    models: Mapping[str, Sequence[Handler]],
    *,
    metrics: Any = None,
    state: Any = None,
    batch_state: Any = None,
    adapters: Mapping[str, AdapterSettings] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[aiohttp.ClientSession, dict[str, FakeCluster], GatewayApp]]:
    """A client of a running gateway over several models, with a fake replica for each handler."""
    clusters = {
        model: FakeCluster(
            [await FakeReplica(each, f"{model}-{n}").start() for n, each in enumerate(handlers, 1)]
        )
        for model, handlers in models.items()
    }
    settings = GatewaySettings.model_validate(options)
    app = GatewayApp(
        settings,
        FakeCluster(),
        [
            ModelSource(model, cluster, adapters=(adapters or {}).get(model))
            for model, cluster in clusters.items()
        ],
        metrics or GatewayMetrics(),
        state,
        batches=batch_state,
    )
    gateway = await serve_gateway(app, "127.0.0.1", 0, max_body_bytes=settings.max_body_bytes)
    url = f"http://127.0.0.1:{gateway.port}"
    try:
        async with aiohttp.ClientSession(url, auto_decompress=False) as client:
            yield client, clusters, app
    finally:
        for cluster in clusters.values():
            for member in cluster.members:
                await member.stop()
        await gateway.stop(grace_s=1)


def run_gateway(settings: dict[str, Any], status: dict[str, Any]) -> None:
    """Serve a gateway with the settings of a configuration over one fake replica, for ever."""

    async def run() -> None:
        cluster = FakeCluster([await FakeReplica(answer).start()], told_status=status)
        section = GatewaySettings.model_validate(settings)
        app = build_gateway_app(section, cluster, MODEL)
        await serve_gateway(app, section.host, section.port or 0, tls=section.tls)
        await asyncio.Event().wait()

    asyncio.run(run())


async def asked_from_elsewhere(
    cluster: FakeCluster, method: str, path: str, body: bytes, *, has_adapters: bool = False
) -> dict[str, Any]:
    """How a gateway begins its answer to a JSON body from another machine, as ASGI says it."""
    adapters = AdapterSettings(MODEL) if has_adapters else None
    app = build_gateway_app(GatewaySettings(), cluster, MODEL, adapters=adapters)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("192.0.2.7", 4000),
    }
    await app(scope, receive, send)
    await app.aclose()
    return sent[0]


async def answer(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """A whole answer that tells who gave it."""
    return web.json_response({"by": replica.replica_id, "object": "chat.completion"})


async def stream(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """All of `EVENTS`, each in a write of its own."""
    response = await begin_stream(request)
    for event in EVENTS:
        await response.write(event)
        await asyncio.sleep(0.01)
    return response


async def begin_stream(
    request: web.Request, more: dict[str, str] | None = None
) -> web.StreamResponse:
    """The head of an event stream."""
    kind = {"content-type": "text/event-stream; charset=utf-8"}
    response = web.StreamResponse(headers={**kind, **(more or {})})
    await response.prepare(request)
    return response


async def stall(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.sleep(3600)
    raise AssertionError


async def abort_connection(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """Break the connection off without a word."""
    cut(request)
    return web.Response()


def cut(request: web.Request) -> None:
    """Close the connection at once, as a killed process does."""
    assert request.transport is not None
    request.transport.abort()


def in_turn(*handlers: Handler) -> Handler:
    """The first handler for the first request, and so on; the last one for all that follow."""
    calls = 0

    async def handler(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        nonlocal calls
        chosen = handlers[min(calls, len(handlers) - 1)]
        calls += 1
        return await chosen(replica, request)

    return handler


async def soon(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
