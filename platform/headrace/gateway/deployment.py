"""The gateway as a Ray Serve deployment, and its view of the cluster.

It is the app's Serve ingress, so Serve's own HTTP port leads to it wherever a proxy runs. It also
listens on a port of its own, where no Python proxy is between the client and the relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.schema import ApplicationStatus

from headrace.config.gateway import GatewaySettings
from headrace.gateway import GatewayApp, ReplicaInfo
from headrace.gateway.asgi import Receive, Scope, Send
from headrace.gateway.conversations.setup import StateSetup, folder_of
from headrace.gateway.ingress.http_server import serve_gateway
from headrace.gateway.models.served_model import ModelSource
from headrace.gateway.placement.endpoint_info import EndpointInfo
from headrace.gateway.placement.placer import Placer
from headrace.gateway.upstream import ReplicaLost, Upstream
from headrace.observability.metrics import RayGatewayMetrics, node_metrics
from headrace.router.plan import RouterSettings
from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.ray.serve import (
    add_cluster_value,
    dashboard_address,
    ongoing_requests,
    read_cluster_value,
    remove_cluster_values,
    session_folder,
    shutdown_seconds,
    write_cluster_value,
)
from headrace_engine.serving.added_adapters import AddedAdapters
from headrace_engine.serving.drain_timeouts import grace_s
from headrace_engine.serving.inflight import ASGIApp, InFlight
from headrace_engine.serving.members import MEMBERS
from headrace_engine.serving.model_values import prefix
from headrace_engine.serving.request_router import deployment_name
from headrace_engine.serving.settings_override import OverrideStore
from headrace_engine.serving.startup_heap import freeze_startup_heap

logger = logging.getLogger("headrace.gateway")

ADAPTER_TIMEOUT_S = 120.0
"""Time limit of loading an adapter on all replicas."""
BROADCAST_TIMEOUT_S = 5.0
GRAFANA_VARIABLE = "RAY_GRAFANA_HOST"
"""Environment variable with Grafana's URL, which Ray's dashboard reads as well."""
LEAVING = ("STOPPING", "STOPPED", "PENDING_MIGRATION")
"""Serve's states of replicas that another one replaces, or none."""
METRICS_TIMEOUT_S = 5.0
SECRET = "secret"
"""Key of the secret by which the app's conversation state is encrypted, among the app's values."""
STORE_TIMEOUT_S = 35.0
"""Time limit of store operations, longer than the one of `StoreNodeManager` (`CLEAR_S`)."""


@dataclass(frozen=True)
class ModelDeployments:
    """The deployments of one model, and how the gateway places its requests.

    Attributes:
        model_id: the name by which its replicas know it.
        decode, prefill: handles of the deployments of its decode and prefill replicas.
        router: settings of the router, such as the placement policy.
        group: tells its replicas and settings from those of the app's other models; empty if it is
            the only one.
        adapters: its configured LoRA adapters; None for a model without adapters.
        starts_on_demand: whether both of its roles may be scaled to zero.
    """

    model_id: str
    decode: DeploymentHandle
    prefill: DeploymentHandle
    router: RouterSettings
    group: str = ""
    adapters: AdapterSettings | None = None
    starts_on_demand: bool = False


class Gateways:
    """The app's gateways, asked over Serve's handle of their deployment."""

    def __init__(self) -> None:
        self._handle: DeploymentHandle | None = None

    async def admitted(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return the seconds of engine time that tenants have had: by gateway, also this one, then
        by model, then by tenant."""
        if self._handle is None:
            context = serve.get_replica_context()
            self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        return dict(await _broadcast(self._handle, "headrace_admitted"))


class ServeModelBackend:
    """Requests to one model's replicas, over Serve's handles (`headrace.gateway.ModelBackend`).

    Args:
        model: the model's deployments.
        gateways: the app's gateways.
        is_wanted: returns whether requests wait for a replica.
    """

    def __init__(
        self,
        model: ModelDeployments,
        gateways: Gateways,
        is_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model_id = model.model_id
        self.starts_on_demand = model.starts_on_demand
        self._decode, self._prefill = model.decode, model.prefill
        self._gateways, self._is_wanted = gateways, is_wanted
        self._wake_call: DeploymentResponse[Any] | None = None
        kept: Any = (
            serve.get_replica_context().app_name,
            read_cluster_value,
            write_cluster_value,
            model.group,
        )
        self._overrides, self._added = OverrideStore(*kept), AddedAdapters(*kept)

    async def replicas(self) -> list[ReplicaInfo]:
        """Return the replicas that answer now; a dead one is left out.

        Raises:
            Exception: no decode replica could be asked; the gateway then keeps the last list.
        """
        try:
            answers = await _ask_all(self._decode, "headrace_replica")
            self._wake_call = None
        except DeploymentUnavailableError:  # Serve knows of no running replica
            self._wake_deployment()
            answers = []
        answers += await _broadcast(self._prefill, "headrace_replica")
        return [ReplicaInfo.of(answer) for answer in answers if answer.get("url")]

    async def endpoints(self) -> dict[str, EndpointInfo]:
        """Return the address of each replica's events, for both roles, by replica id."""
        answers = [
            answer
            for handle in (self._decode, self._prefill)
            for answer in await _broadcast(handle, "headrace_replica")
        ]
        found = {
            answer["replica_id"]: EndpointInfo.of(answer.get("endpoint")) for answer in answers
        }
        return {name: endpoint for name, endpoint in found.items() if endpoint is not None}

    def _wake_deployment(self) -> None:
        """Queue a call while requests wait.

        If Serve scaled a deployment to zero, it starts a replica when a handle's call waits for it.
        """
        if not self._is_wanted():
            if self._wake_call is not None:
                self._wake_call.cancel()
                self._wake_call = None
        elif self._wake_call is None:
            self._wake_call = self._decode.headrace_replica.remote()

    async def status(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the state of every prefill replica, and of every decode replica."""
        decode, prefill = await asyncio.gather(
            _broadcast(self._decode, "headrace_status"),
            _broadcast(self._prefill, "headrace_status"),
        )
        return prefill, decode

    async def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of one decode replica; empty if no replica runs."""
        try:
            return dict(await self._decode.headrace_openapi.remote())
        except DeploymentUnavailableError:
            return {}

    async def plan(self, request_id: str) -> dict[str, Any] | None:
        """Return the plan of a request, from the replica that has it; None if there is none."""
        for found in await _broadcast(self._decode, "headrace_plan", request_id):
            if found is not None:
                return dict(found)
        return None

    async def warm(self, body: dict[str, Any], salt: str, pin: bool) -> list[dict[str, Any]]:
        """Have every decode replica make the prompt's KV; replicas of one machine share it."""
        answers = await _ask_all(self._decode, "headrace_warm", [body], salt, pin, timeout_s=None)
        return [outcome for answer in answers for outcome in answer]

    async def set_speculation(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Change how decode replicas draft; return the state of each that drafts."""
        await self._save_override(command)
        answers = await _broadcast(self._decode, "headrace_speculation", command)
        return [dict(answer) for answer in answers if answer]

    async def send_corpus_command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a command to all retrieval memories; return the answers of the replicas."""
        try:
            call = self._decode.broadcast("headrace_corpus", command)
            answers = await call.results_async(timeout_s=None, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        return [
            {"replica_id": "", "error": f"a replica failed: {answer}"}
            if isinstance(answer, BaseException)
            else dict(answer)
            for answer in answers
            if answer is not None
        ]

    async def added_adapters(self) -> dict[str, str]:
        """Return the sources of the adapters that administrators have added, by name."""
        return await asyncio.to_thread(self._added.all)

    async def set_adapter(self, name: str, source: str | None) -> list[dict[str, Any]]:
        """Add an adapter to all replicas, or remove it; return the answer of each replica."""
        sources = await asyncio.to_thread(self._added.set, name, source)
        load = None if source is None else name
        answers = await asyncio.gather(
            *(_ask_each(handle, "headrace_adapters", sources, load) for handle in self._engines)
        )
        return [dict(answer) for each in answers for answer in each if answer is not None]

    @property
    def _engines(self) -> tuple[DeploymentHandle, DeploymentHandle]:
        return self._decode, self._prefill

    async def set_policy(self, policy: str) -> int:
        """Set every decode replica's plan policy; return how many replicas answered."""
        await self._save_override({"policy": policy})
        return len(await _broadcast(self._decode, "headrace_set_policy", policy))

    async def _save_override(self, override: dict[str, Any]) -> None:
        """Save an override for replicas that start later; the caller sends it to those that run."""
        try:
            await asyncio.to_thread(self._overrides.set_override, override)
        except Exception as error:
            logger.error("an override is not saved for replicas that start later: %r", error)

    async def admitted(self) -> dict[str, dict[str, float]]:
        """Return the engine time that tenants have had from the app's other gateways."""
        me = serve.get_replica_context().replica_id.unique_id
        used = await self._gateways.admitted()
        return {name: models.get(self.model_id, {}) for name, models in used.items() if name != me}


class ServeBackend:
    """Requests to the whole app, over Serve's handles (`headrace.gateway.Backend`).

    Args:
        models: the models' replicas.
        gateways: the app's gateways.
        store: handle of the deployment that runs the KV store's nodes; None without a store.
    """

    def __init__(
        self,
        models: Sequence[ServeModelBackend],
        gateways: Gateways,
        store: DeploymentHandle | None = None,
    ) -> None:
        self._models, self._gateways, self._store = tuple(models), gateways, store
        self._nodes: Upstream | None = None
        self._app_name = serve.get_replica_context().app_name
        self._dashboard = dashboard_address() if ray.is_initialized() else ""

    async def status(self) -> dict[str, Any]:
        """Return the state of every replica, and the app's totals."""
        models, store, expected, admitted = await asyncio.gather(
            asyncio.gather(*(model.status() for model in self._models)),
            self._store_status(),
            self._expected_replicas(),
            self._gateways.admitted(),
        )
        decode = [replica for _, replicas in models for replica in replicas]
        plans: dict[str, int] = {}
        for replica in decode:
            for kind, count in replica["router"].get("plans", {}).items():
                plans[kind] = plans.get(kind, 0) + count
        return {
            "replicas": [replica for roles in models for role in roles for replica in role],
            "plans": plans,
            "nixl_bytes": sum(replica["nixl"]["bytes"] for replica in decode),
            "store": store,
            "expected_replicas": expected,
            "engine_s_by_tenant": _sum_by_tenant(
                by_tenant for models in admitted.values() for by_tenant in models.values()
            ),
            "ray": {
                "dashboard": self._dashboard,
                "app": self._app_name,
                "grafana": os.environ.get(GRAFANA_VARIABLE, ""),
            },
        }

    async def _expected_replicas(self) -> dict[str, int]:
        """Return how many replicas Serve runs or starts, by deployment; empty if it is not known.

        A replica that is in this count and gives no status is starting, hangs or is dead.
        """
        try:
            async with asyncio.timeout(BROADCAST_TIMEOUT_S):
                return await asyncio.to_thread(_expected_replicas, self._app_name)
        except Exception as error:
            logger.debug("Serve does not tell its replicas: %r", error)
            return {}

    async def _store_status(self) -> list[dict[str, Any]]:
        """Return the status of each machine's StoreNode; empty without a store."""
        if self._store is None:
            return []
        nodes = await _broadcast(self._store, "status")
        return [dict(node) for answer in nodes for node in answer]

    async def store(
        self, action: str, namespace: str | None = None, hash: str | None = None
    ) -> list[dict[str, Any]]:
        """Ask the store's manager, which asks each machine's node; empty without a store."""
        if self._store is None:
            return []
        answers = await _ask_all(
            self._store, "administer", action, namespace, hash, timeout_s=STORE_TIMEOUT_S
        )
        return [dict(machine) for answer in answers for machine in answer]

    async def metrics(self) -> bytes:
        """Return the metrics of the whole cluster in Prometheus' text format."""
        if self._nodes is None:
            self._nodes = Upstream(METRICS_TIMEOUT_S)
        return await node_metrics(partial(metrics_page, self._nodes))


async def metrics_page(nodes: Upstream, url: str) -> bytes:
    """Return the metrics of a node; `b""` if the node does not answer in time."""
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
        backends = [
            ServeModelBackend(model, gateways, partial(self._is_wanted, model.model_id))
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
            state.make(
                lambda: folder_of(session_folder(), app),
                partial(add_cluster_value, prefix(app) + SECRET),
            ),
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
        freeze_startup_heap()
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

    def _is_wanted(self, model_id: str) -> bool:
        return self._app.is_wanted(model_id)

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


def _expected_replicas(app: str) -> dict[str, int]:
    """Return the replicas of an app by deployment, without those that stop. Blocks."""
    status = serve.status().applications.get(app)
    return {
        name: sum(n for state, n in each.replica_states.items() if state not in LEAVING)
        for name, each in (status.deployments if status is not None else {}).items()
    }


def _sum_by_tenant(gateways: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the engine time in seconds that each tenant has had from all gateways."""
    total: dict[str, float] = {}
    for by_tenant in gateways:
        for tenant, seconds in by_tenant.items():
            total[tenant] = total.get(tenant, 0.0) + seconds
    return total


def _remove_leftovers() -> None:
    """Delete the app's overrides, its secret and its conversations in the session's folder, if the
    app is being deleted. Blocks."""
    app = serve.get_replica_context().app_name
    status = serve.status().applications.get(app)
    if status is not None and status.status == ApplicationStatus.DELETING:
        remove_cluster_values(prefix(app))
        shutil.rmtree(folder_of(session_folder(), app), ignore_errors=True)


async def _broadcast(handle: DeploymentHandle, method: str, *args: Any) -> list[Any]:
    """Call `_ask_all`, but return no answers if that fails."""
    try:
        return await _ask_all(handle, method, *args)
    except Exception as error:
        logger.debug("broadcast %s: %s", method, error)
        return []


async def _ask_each(handle: DeploymentHandle, method: str, *args: Any) -> list[Any]:
    """Call a method on all replicas; a replica that fails gives an answer with `error`."""
    try:
        answers = await handle.broadcast(method, *args).results_async(
            timeout_s=ADAPTER_TIMEOUT_S, return_exceptions=True
        )
    except DeploymentUnavailableError:
        return []
    return [
        {"replica_id": "", "error": f"a replica failed: {answer}"}
        if isinstance(answer, BaseException)
        else answer
        for answer in answers
    ]


async def _ask_all(
    handle: DeploymentHandle,
    method: str,
    *args: Any,
    timeout_s: float | None = BROADCAST_TIMEOUT_S,
) -> list[Any]:
    """Call a method on all replicas; return the answers of those that gave one."""
    answers = await handle.broadcast(method, *args).results_async(
        timeout_s=timeout_s, return_exceptions=True
    )
    return [answer for answer in answers if not isinstance(answer, BaseException)]
