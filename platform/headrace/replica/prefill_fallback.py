"""The prefill fallback: a prefill replica answers clients while no decode replica is ready.

It has an engine and the weights, and often the prompt's KV. So it answers clients over a port of
its own, as a decode replica does. But it computes each request completely itself, without plans and
without drafts. Gateways send it requests, and streams to resume, only while no decode replica can
be asked (`gateway.replica_selection`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from ray.util import get_node_ip_address

from headrace_decode.apis.api_layer import add_api_layer
from headrace_decode.http.engine_health import EngineHealth
from headrace_decode.http.internal_port import InternalPort
from headrace_decode.http.public_routes import keep_public_routes, public_routes
from headrace_decode.http.vllm_environment import without_responses_store
from headrace_decode.llm.vllm_engine import PlannedVLLMEngine
from headrace_decode.resume.recorder import RecordingMiddleware
from headrace_engine.ray.serve import shutdown_seconds
from headrace_engine.serving.drain_timeouts import grace_s
from headrace_engine.serving.inflight import InFlight
from headrace_engine.supervise import supervise
from headrace_engine.vllm.engine import engine_progress
from headrace_kvstore.protocol.address import base_url

BUILD_AFTER_S = 5.0
"""Time from the start until the application is made. An earlier request has it made at once."""


class PrefillFallback:
    """The port of one prefill replica.

    Args:
        make_app: makes vLLM's application over the engine; about a second of work.
        engine: the replica's engine.
    """

    def __init__(self, make_app: Callable[[], Awaitable[Any]], engine: PlannedVLLMEngine) -> None:
        self._make_app, self._engine = make_app, engine
        self._token = secrets.token_urlsafe(32)
        self._making: asyncio.Task[Any] | None = None
        self._maker: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._listener: Any = None
        self._routes: list[dict[str, Any]] = []
        progress = partial(engine_progress, engine.vllm_config, engine.meter, engine.llm)
        well = EngineHealth(self._answer, progress)
        self._port = InFlight(RecordingMiddleware(well))

    async def start(self) -> None:
        """Listen at a free port, and make the application soon."""
        from headrace.gateway.ingress.http_server import GATEWAY_READS_S, serve_gateway

        without_responses_store()
        guarded = InternalPort(self._port, self._token)
        host = get_node_ip_address()
        self._listener = await serve_gateway(guarded, host, 0, send_timeout_s=GATEWAY_READS_S)
        self._maker = supervise(self._make_soon, "make the application of a prefill fallback")

    def info(self) -> dict[str, Any]:
        """Return the facts that gateways read (`backend.ReplicaInfo`)."""
        listens = self._listener is not None and not self._engine.llm.errored
        meter = self._engine.meter
        return {
            "url": base_url(get_node_ip_address(), self._listener.port) if listens else None,
            "token": self._token,
            "routes": self._routes,
            "in_flight": self._port.count,
            "running": meter.running,
            "waiting": meter.waiting,
            "is_fallback": True,
            "techniques": self._engine.llm.offered_techniques,
        }

    async def stop(self) -> None:
        """Finish the requests of the port, within the time that Serve gives."""
        for task in (self._maker, self._making):
            if task is not None:
                task.cancel()
        if self._listener is not None:
            grace = 1.0 if self._engine.llm.errored else grace_s(*shutdown_seconds())
            with contextlib.suppress(Exception):
                await self._listener.stop(grace)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return  # the server's lifespan: at its start there is no application yet
        self._wanted.set()
        app = await asyncio.shield(self._made())
        await app(scope, receive, send)

    async def _make_soon(self) -> None:
        """Make the application at the first request, or after a while without one."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wanted.wait(), BUILD_AFTER_S)
        await asyncio.shield(self._made())

    def _made(self) -> asyncio.Task[Any]:
        """Return the task that makes the application; a failed one is replaced."""
        task = self._making
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._making = asyncio.create_task(self._make())
        return task

    async def _make(self) -> Any:
        app, engine = await self._make_app(), self._engine
        keep_public_routes(app)
        add_api_layer(
            *(app, engine.parsers.why_no_tools, lambda: bool(engine.llm.errored)),
            book=engine.meter.usage,
        )
        self._routes = [asdict(route) for route in public_routes(app)]
        return app
