"""The gateway as a Ray Serve deployment, and its view of the cluster.

It is the app's Serve ingress, so Serve's own HTTP port leads to it wherever a proxy runs, and it
listens on a port of its own as well: that way no Python proxy stands between the client and the
relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.schema import ApplicationStatus

from headrace.gateway import ReplicaInfo, build_gateway_app
from headrace.gateway.asgi import Receive, Scope, Send
from headrace.gateway.listen import serve_gateway
from headrace.gateway.placing.lines import LineInfo
from headrace.gateway.placing.placer import Placer
from headrace.gateway.upstream import ReplicaLost, Upstream
from headrace.observability.metrics import RayGatewayMetrics, node_metrics
from headrace.router.plan import RouterSettings
from headrace_decode.tenants import Tenants
from headrace_engine.serving._ray_compat import (
    drop_notes,
    ongoing_requests,
    read_note,
    shutdown_seconds,
    write_note,
)
from headrace_engine.serving.draining import grace_s
from headrace_engine.serving.inflight import ASGIApp, InFlight
from headrace_engine.serving.members import MEMBERS
from headrace_engine.serving.orders import Notes, prefix

logger = logging.getLogger("headrace.gateway")

BROADCAST_TIMEOUT_S = 5.0
METRICS_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 35.0
"""More than the store's keeper gives its nodes (`keeper.CLEAR_S`)."""


class ServeBackend:
    """What the gateway asks of the cluster, over Serve's handles (`headrace.gateway.Backend`)."""

    def __init__(
        self,
        decode: DeploymentHandle,
        prefill: DeploymentHandle,
        store: DeploymentHandle | None = None,
    ):
        self._decode, self._prefill, self._store = decode, prefill, store
        self._nodes: Upstream | None = None
        self._gateways: DeploymentHandle | None = None
        self._knock: DeploymentResponse[Any] | None = None
        self.wanted: Callable[[], bool] = lambda: False
        """Whether requests wait for a replica."""
        self._app_name = serve.get_replica_context().app_name
        self._dashboard = dashboard_address()
        self._notes = Notes(self._app_name, read_note, write_note)

    async def replicas(self) -> list[ReplicaInfo]:
        """The decode replicas that answer now; one that is dead is left out.

        Raises:
            Exception: nobody could be asked; the gateway then keeps what it knows.
        """
        try:
            answers = await _ask_all(self._decode, "headrace_replica")
            self._knock = None
        except DeploymentUnavailableError:  # Serve knows of no running replica
            self._ask_for_one()
            answers = []
        answers += await _broadcast(self._prefill, "headrace_replica")
        return [ReplicaInfo.of(answer) for answer in answers if answer.get("url")]

    async def lines(self) -> dict[str, LineInfo]:
        """Where each replica tells of itself, those of both roles, by its id."""
        answers = [
            answer
            for handle in (self._decode, self._prefill)
            for answer in await _broadcast(handle, "headrace_replica")
        ]
        told = {answer["replica_id"]: LineInfo.of(answer.get("line")) for answer in answers}
        return {name: line for name, line in told.items() if line is not None}

    def _ask_for_one(self) -> None:
        """Queue a call while requests wait: Serve starts a replica of a deployment that it scaled
        to zero when a call of a handle waits for one."""
        if not self.wanted():
            if self._knock is not None:
                self._knock.cancel()
                self._knock = None
        elif self._knock is None:
            self._knock = self._decode.headrace_replica.remote()

    async def status(self) -> dict[str, Any]:
        """State of every replica, and the app's totals."""
        decode, prefill, store = await asyncio.gather(
            _broadcast(self._decode, "headrace_status"),
            _broadcast(self._prefill, "headrace_status"),
            self._store_status(),
        )
        plans: dict[str, int] = {}
        for replica in decode:
            for kind, count in replica["router"].get("plans", {}).items():
                plans[kind] = plans.get(kind, 0) + count
        return {
            "replicas": [*prefill, *decode],
            "plans": plans,
            "nixl_bytes": sum(replica["nixl"]["bytes"] for replica in decode),
            "store": store,
            "ray": {"dashboard": self._dashboard, "app": self._app_name},
        }

    async def _store_status(self) -> list[dict[str, Any]]:
        """What each machine's StoreNode says; none without a store."""
        if self._store is None:
            return []
        nodes = await _broadcast(self._store, "status")
        return [dict(node) for answer in nodes for node in answer]

    async def openapi(self) -> dict[str, Any]:
        """What the application of one decode replica says of itself."""
        try:
            return dict(await self._decode.headrace_openapi.remote())
        except DeploymentUnavailableError:
            return {}

    async def plan(self, request_id: str) -> dict[str, Any] | None:
        """The plan of a request, from whichever replica made it."""
        for found in await _broadcast(self._decode, "headrace_plan", request_id):
            if found is not None:
                return dict(found)
        return None

    async def warm(self, body: dict[str, Any], salt: str, pin: bool) -> list[dict[str, Any]]:
        """Have every decode replica make the prompt's KV; those of one machine share it."""
        answers = await _ask_all(self._decode, "headrace_warm", [body], salt, pin, timeout_s=None)
        return [outcome for answer in answers for outcome in answer]

    async def store(
        self, action: str, namespace: str | None = None, hash: str | None = None
    ) -> list[dict[str, Any]]:
        """Ask the store's keeper, which asks each machine's node; empty without a store."""
        if self._store is None:
            return []
        answers = await _ask_all(
            self._store, "administer", action, namespace, hash, timeout_s=STORE_TIMEOUT_S
        )
        return [dict(machine) for answer in answers for machine in answer]

    async def set_speculation(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Have every decode replica draft as the command says; how each that drafts stands."""
        await self._note(command)
        answers = await _broadcast(self._decode, "headrace_speculation", command)
        return [dict(answer) for answer in answers if answer]

    async def memory(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell every decode replica's drafting memory; what those that have one answer."""
        try:
            asked = self._decode.broadcast("headrace_memory", command)
            answers = await asked.results_async(timeout_s=None, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        return [
            {"replica_id": "", "error": f"a replica failed: {answer}"}
            if isinstance(answer, BaseException)
            else dict(answer)
            for answer in answers
            if answer is not None
        ]

    async def set_policy(self, policy: str) -> int:
        """Force every decode replica's plans, or set them free; returns how many obeyed."""
        await self._note({"policy": policy})
        return len(await _broadcast(self._decode, "headrace_set_policy", policy))

    async def _note(self, order: dict[str, Any]) -> None:
        """Keep an order for the replicas that start later; those that run are told anyway."""
        try:
            await asyncio.to_thread(self._notes.give, order, time.time())
        except Exception as error:
            logger.error("an order is not kept for replicas that start later: %r", error)

    async def admitted(self) -> dict[str, dict[str, float]]:
        """What tenants have had from the app's other gateways."""
        me = serve.get_replica_context()
        if self._gateways is None:
            self._gateways = serve.get_deployment_handle(me.deployment, self._app_name)
        answers = await _broadcast(self._gateways, "headrace_admitted")
        return {name: had for name, had in answers if name != me.replica_id.unique_id}

    async def metrics(self) -> bytes:
        """Prometheus text of the whole cluster."""
        if self._nodes is None:
            self._nodes = Upstream(METRICS_TIMEOUT_S)
        return await node_metrics(partial(metrics_page, self._nodes))


async def metrics_page(nodes: Upstream, url: str) -> bytes:
    """What a node exports; `b""` if it does not in time."""
    try:
        async with asyncio.timeout(METRICS_TIMEOUT_S):
            reply = await nodes.send(url, "GET", "/metrics", [], b"")
            try:
                parts = [await reply.read_some()]
                while parts[-1]:
                    parts.append(await reply.read_some())
            finally:
                reply.close()
    except (ReplicaLost, TimeoutError):
        return b""
    return b"".join(parts)


class ThroughServe:
    """ASGI: what Serve says of lifespans changes nothing. It ends its own before `__del__`, when
    requests of the gateway's own port still need the gateway's connections."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})


class GatewayServer:
    """The ingress deployment.

    Args:
        decode, prefill: handles of the two deployments behind.
        store: of the one that keeps the KV store's nodes; None without a store.
        settings: the `gateway` section of the configuration.
        model_id: the served model's name.
        setup: prepares the process (logs, traces).
        tenants: which are drafted for.
        router: how prices are weighed where there are several decode replicas.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        decode: DeploymentHandle,
        prefill: DeploymentHandle,
        store: DeploymentHandle | None,
        settings: Any,
        model_id: str,
        setup: Callable[[str], None],
        tenants: Tenants,
        router: RouterSettings,
    ):
        setup("gateway")
        backend = ServeBackend(decode, prefill, store)
        self._app = build_gateway_app(
            settings,
            backend,
            model_id,
            metrics=RayGatewayMetrics(),
            tenants=tenants,
            make_placer=partial(Placer, router, backend.lines),
        )
        backend.wanted = lambda: self._app.wanted
        loop = asyncio.get_running_loop()

        def tell(replicas: frozenset[str]) -> None:
            loop.call_soon_threadsafe(self._app.members, replicas)

        MEMBERS.watch("decode", tell)
        self._requests = InFlight(self._app)
        self._listener = None
        if settings.port is not None:
            self._listener = await serve_gateway(
                *(self._requests, settings.host, settings.port),
                # A new version of the app starts while the old one finishes its requests, and
                # Serve may run several gateways on a machine: they share the port.
                reuse_port=settings.port != 0,
                trusted_proxies=settings.trusted_proxies,
                tls=settings.tls,
                max_body_bytes=settings.max_body_bytes,
            )

    async def __serve_build_asgi_app__(self) -> Any:
        """The gateway as Serve's proxy reaches it."""
        return ThroughServe(self._requests)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve's count of this gateway's requests, of which Serve sees only those of its proxy."""
        return ongoing_requests(self._requests.count)

    async def headrace_admitted(self) -> tuple[str, dict[str, float]]:
        """This gateway's id, and what each tenant has had from it."""
        return serve.get_replica_context().replica_id.unique_id, self._app.had

    async def headrace_gateway(self) -> dict[str, Any]:
        """Where this gateway listens."""
        return {
            "replica_id": serve.get_replica_context().replica_id.unique_id,
            "port": self._listener.port if self._listener else None,
        }

    async def __del__(self) -> None:
        """Finish the requests of the own port, then end; see `serving.draining`."""
        listener = getattr(self, "_listener", None)
        if listener is not None:
            with contextlib.suppress(Exception):
                await listener.stop(grace_s(*shutdown_seconds()))
        with contextlib.suppress(Exception):
            await self._app.aclose()
        with contextlib.suppress(Exception):
            await asyncio.to_thread(_forget_orders)


def _forget_orders() -> None:
    """Orders end with the app. Blocks."""
    app = serve.get_replica_context().app_name
    status = serve.status().applications.get(app)
    if status is not None and status.status == ApplicationStatus.DELETING:
        drop_notes(prefix(app))


def dashboard_address() -> str:
    """Where the dashboard of this process's cluster is, `host:port`, or what Ray's
    RAY_OVERRIDE_DASHBOARD_URL says; empty without one."""
    if not ray.is_initialized():
        return ""
    return ray.init(ignore_reinit_error=True).dashboard_url or ""  # it only tells, here


async def _broadcast(handle: DeploymentHandle, method: str, *args: Any) -> list[Any]:
    """As `_ask_all`, but nobody is left to answer where nobody can be asked."""
    try:
        return await _ask_all(handle, method, *args)
    except Exception as error:
        logger.debug("broadcast %s: %s", method, error)
        return []


async def _ask_all(
    handle: DeploymentHandle,
    method: str,
    *args: Any,
    timeout_s: float | None = BROADCAST_TIMEOUT_S,
) -> list[Any]:
    """Answers of the replicas that gave one."""
    answers = await handle.broadcast(method, *args).results_async(
        timeout_s=timeout_s, return_exceptions=True
    )
    return [answer for answer in answers if not isinstance(answer, BaseException)]
