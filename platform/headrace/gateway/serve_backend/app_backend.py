"""Requests to the whole app: the replicas of all models, the store, and the nodes' metrics."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from headrace.gateway.serve_backend.gateways import Gateways
from headrace.gateway.serve_backend.model_backend import ServeModelBackend
from headrace.gateway.serve_backend.replica_calls import BROADCAST_TIMEOUT_S, ask_all, broadcast
from headrace.gateway.upstream import ReplicaLost, Upstream
from headrace.observability.metrics import node_metrics
from headrace_engine.ray.serve import dashboard_address

logger = logging.getLogger("headrace.gateway")

GRAFANA_VARIABLE = "RAY_GRAFANA_HOST"
"""Environment variable with Grafana's URL, which Ray's dashboard reads as well."""
LEAVING = ("STOPPING", "STOPPED", "PENDING_MIGRATION")
"""Serve's states of replicas that another one replaces, or none."""
METRICS_TIMEOUT_S = 5.0
STORE_TIMEOUT_S = 35.0
"""Time limit of store operations, longer than the one of `StoreNodeManager` (`CLEAR_S`)."""


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
        nodes = await broadcast(self._store, "status")
        return [dict(node) for answer in nodes for node in answer]

    async def store(
        self, action: str, namespace: str | None = None, hash: str | None = None
    ) -> list[dict[str, Any]]:
        """Ask the store's manager, which asks each machine's node; empty without a store."""
        if self._store is None:
            return []
        answers = await ask_all(
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
