"""Requests to the replicas of one model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.placement.endpoint_info import EndpointInfo
from headrace.gateway.serve_backend.gateways import Gateways
from headrace.gateway.serve_backend.replica_calls import ask_all, ask_each, broadcast
from headrace.router.plan import RouterSettings
from headrace_engine.adapters.settings import AdapterSettings
from headrace_engine.ray.serve import read_cluster_value, write_cluster_value
from headrace_engine.serving.added_adapters import AddedAdapters
from headrace_engine.serving.settings_override import OverrideStore

logger = logging.getLogger("headrace.gateway")

ADAPTER_TIMEOUT_S = 120.0
"""Time limit of loading an adapter on all replicas."""


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


class ServeModelBackend:
    """Requests to one model's replicas, over Serve's handles (`headrace.gateway.ModelBackend`).

    Args:
        model: the model's deployments.
        gateways: the app's gateways.
        is_wanted: returns whether requests wait for a replica.
        on_usage: called with the usage of each replica, about once a second.
    """

    def __init__(
        self,
        model: ModelDeployments,
        gateways: Gateways,
        is_wanted: Callable[[], bool] = lambda: False,
        on_usage: Callable[[Mapping[str, Any]], None] = lambda report: None,
    ) -> None:
        self.model_id = model.model_id
        self.starts_on_demand = model.starts_on_demand
        self._decode, self._prefill = model.decode, model.prefill
        self._gateways, self._is_wanted, self._on_usage = gateways, is_wanted, on_usage
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
            answers = await ask_all(self._decode, "headrace_replica")
            self._wake_call = None
        except DeploymentUnavailableError:  # Serve knows of no running replica
            self._wake_deployment()
            answers = []
        answers += await broadcast(self._prefill, "headrace_replica")
        for answer in answers:
            if "usage" in answer:
                self._on_usage(answer["usage"])
        return [ReplicaInfo.of(answer) for answer in answers if answer.get("url")]

    async def endpoints(self) -> dict[str, EndpointInfo]:
        """Return the address of each replica's events, for both roles, by replica id."""
        answers = [
            answer
            for handle in (self._decode, self._prefill)
            for answer in await broadcast(handle, "headrace_replica")
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
            broadcast(self._decode, "headrace_status"),
            broadcast(self._prefill, "headrace_status"),
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
        for found in await broadcast(self._decode, "headrace_plan", request_id):
            if found is not None:
                return dict(found)
        return None

    async def usage(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        """Return what each replica's engine did for a request; the prefill replicas', too."""
        answers = await asyncio.gather(
            *(
                broadcast(handle, "headrace_usage", request_id, tenant)
                for handle in (self._decode, self._prefill)
            )
        )
        return [part for each in answers for parts in each for part in parts]

    async def warm(self, body: dict[str, Any], salt: str, pin: bool) -> list[dict[str, Any]]:
        """Have every decode replica make the prompt's KV; replicas of one machine share it."""
        answers = await ask_all(self._decode, "headrace_warm", [body], salt, pin, timeout_s=None)
        return [outcome for answer in answers for outcome in answer]

    async def set_speculation(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Change how decode replicas draft; return the state of each that drafts."""
        await self._save_override(command)
        answers = await broadcast(self._decode, "headrace_speculation", command)
        return [dict(answer) for answer in answers if answer]

    async def send_corpus_command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a command to all retrieval memories; return the answers of the replicas."""
        return await ask_each(self._decode, "headrace_corpus", command, timeout_s=None)

    async def added_adapters(self) -> dict[str, str]:
        """Return the sources of the adapters that administrators have added, by name."""
        return await asyncio.to_thread(self._added.all)

    async def set_adapter(self, name: str, source: str | None) -> list[dict[str, Any]]:
        """Add an adapter to all replicas, or remove it; return the answer of each replica."""
        sources = await asyncio.to_thread(self._added.set, name, source)
        load = None if source is None else name
        answers = await asyncio.gather(
            *(
                ask_each(*(handle, "headrace_adapters", sources, load), timeout_s=ADAPTER_TIMEOUT_S)
                for handle in (self._decode, self._prefill)
            )
        )
        return [answer for each in answers for answer in each]

    async def set_policy(self, policy: str) -> int:
        """Set every decode replica's plan policy; return how many replicas answered."""
        await self._save_override({"policy": policy})
        return len(await broadcast(self._decode, "headrace_set_policy", policy))

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
