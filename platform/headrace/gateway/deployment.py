"""The gateway as a Ray Serve deployment.

It is the app's Serve ingress, so Serve's own HTTP port leads to it wherever a proxy runs. It also
listens on a port of its own, where no Python proxy is between the client and the relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from headrace.config.gateway import GatewaySettings
from headrace.gateway import GatewayApp
from headrace.gateway.asgi import Receive, Scope, Send
from headrace.gateway.batches.routes import long_bodies
from headrace.gateway.batches.setup import make_batch_state
from headrace.gateway.conversations.setup import StateSetup, folder_of
from headrace.gateway.ingress.http_server import serve_gateway
from headrace.gateway.models.served_model import ModelSource
from headrace.gateway.placement.placer import Placer
from headrace.gateway.serve_backend.app_backend import ServeBackend
from headrace.gateway.serve_backend.gateways import Gateways
from headrace.gateway.serve_backend.model_backend import ModelDeployments, ServeModelBackend
from headrace.gateway.usage.setup import make_ledger
from headrace.observability.metrics import RayGatewayMetrics
from headrace_engine.ray.serve import (
    add_cluster_value,
    ongoing_requests,
    remove_cluster_values,
    session_folder,
    shutdown_seconds,
)
from headrace_engine.serving.drain_timeouts import grace_s
from headrace_engine.serving.full_collections import limit_full_collections
from headrace_engine.serving.inflight import ASGIApp, InFlight
from headrace_engine.serving.members import MEMBERS
from headrace_engine.serving.model_values import prefix
from headrace_engine.serving.request_router import deployment_name

SECRET = "secret"
"""Key of the secret by which the app's conversation state is encrypted, among the app's values."""


class ServeLifespanFilter:
    """An ASGI app for Serve that does not pass on Serve's lifespan events.

    Serve ends its lifespan before `__del__`, when requests on the gateway's own port still need the
    gateway's connections.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or acknowledge a lifespan event."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})


class GatewayServer:
    """The ingress deployment.

    Args:
        models: the deployments of each model, at least one.
        store: handle of the deployment that runs the KV store's nodes; None without a store.
        settings: the `gateway` section of the configuration.
        setup: prepares the process (logs, traces).
        state: how conversation state is opened.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        models: Sequence[ModelDeployments],
        store: DeploymentHandle | None,
        settings: GatewaySettings,
        setup: Callable[[str], None],
        state: StateSetup,
    ):
        setup("gateway")
        app = serve.get_replica_context().app_name
        gateways = Gateways()
        places = (
            lambda: folder_of(session_folder(), app),
            partial(add_cluster_value, prefix(app) + SECRET),
        )
        self._usage = make_ledger(state, settings.usage, places[0])
        backends = [
            ServeModelBackend(
                *(model, gateways, partial(self._is_wanted, model.model_id)), self._take_usage
            )
            for model in models
        ]
        self._app = GatewayApp(
            settings,
            ServeBackend(backends, gateways, store),
            [
                ModelSource(
                    *(model.model_id, each),
                    partial(Placer, model.router, each.endpoints),
                    model.adapters,
                )
                for model, each in zip(models, backends, strict=True)
            ],
            RayGatewayMetrics(),
            state.make(*places),
            batches=make_batch_state(state, settings.batches, *places),
            usage=self._usage,
        )
        loop = asyncio.get_running_loop()

        def on_members(model_id: str, replicas: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._app.set_members, model_id, replicas)

        for model in models:
            MEMBERS.watch(
                deployment_name("decode", model.group), partial(on_members, model.model_id)
            )
        self._requests = InFlight(self._app)
        self._listener = None
        limit_full_collections()
        if settings.port is not None:
            self._listener = await serve_gateway(
                *(self._requests, settings.host, settings.port),
                # A new version of the app starts while the old one finishes its requests, and
                # Serve may run several gateways on a machine: they share the port.
                reuse_port=settings.port != 0,
                trusted_proxies=settings.trusted_proxies,
                tls=settings.tls,
                max_body_bytes=settings.max_body_bytes,
                long_bodies=long_bodies(settings),
            )

    def _is_wanted(self, model_id: str) -> bool:
        return self._app.is_wanted(model_id)

    def _take_usage(self, report: Mapping[str, Any]) -> None:
        if self._usage is not None:
            self._usage.take(report)

    async def headrace_take_usage(self, report: dict[str, Any]) -> None:
        """Take the last usage of a replica that stops."""
        self._take_usage(report)

    async def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI app that Serve's proxy calls."""
        return ServeLifespanFilter(self._requests)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of this gateway's requests; Serve itself counts only its proxy's."""
        return ongoing_requests(self._requests.count)

    async def headrace_admitted(self) -> tuple[str, dict[str, dict[str, float]]]:
        """Return this gateway's id, and the engine time that it has given each tenant, by model."""
        return serve.get_replica_context().replica_id.unique_id, self._app.charged_s

    async def __del__(self) -> None:
        """Finish the requests on the gateway's own port, then close; see `drain_timeouts`."""
        listener = getattr(self, "_listener", None)
        if listener is not None:
            with contextlib.suppress(Exception):
                await listener.stop(grace_s(*shutdown_seconds()))
        with contextlib.suppress(Exception):
            await self._app.aclose()
        with contextlib.suppress(Exception):
            await asyncio.to_thread(_remove_leftovers)


def _remove_leftovers() -> None:
    """Delete the app's overrides and its secret, and its conversations and usage in the session's
    folder, if the app is being deleted. Blocks."""
    app = serve.get_replica_context().app_name
    status = serve.status().applications.get(app)
    if status is not None and status.status == ApplicationStatus.DELETING:
        remove_cluster_values(prefix(app))
        shutil.rmtree(folder_of(session_folder(), app), ignore_errors=True)
