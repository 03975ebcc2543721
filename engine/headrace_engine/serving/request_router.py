"""Chooses replicas for Serve's handles of our deployments: the one that the caller names, else the
less busy of two.

A call names its replica with the keyword argument `replica`. If that replica has stopped, or does
not answer Serve's question for its queue, another one takes the call, so the called replica returns
its own id. The class extends Serve's public `RequestRouter`; Serve makes one in each process that
holds a handle.
"""

from __future__ import annotations

import random
from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class NamedReplicaRouter(RequestRouter):
    """Request router that follows `replica=`, and passes the replicas on to `MEMBERS`."""

    def initialize_state(self, role: str = "", **kwargs: Any) -> None:
        """Set the role under which `MEMBERS` keeps the replicas."""
        self._role = role

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the running replicas from Serve's controller, without those that drain."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica that a call found dead before the controller did."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, the best first. Serve takes the least busy of a group."""
        wanted = pending_request.kwargs.get("replica") if pending_request is not None else None
        named = [r for r in candidate_replicas if r.replica_id.unique_id == wanted]
        others = [r for r in candidate_replicas if r.replica_id.unique_id != wanted]
        two = random.sample(others, min(2, len(others)))
        return [group for group in (named, two) if group]

    def _tell(self) -> None:
        # Imported here: Serve sends this class by value, and the registry is each process's own.
        from headrace_engine.serving.members import MEMBERS

        MEMBERS.update(self._role, (each.unique_id for each in self.curr_replicas))


def deployment_name(role: str, group: str = "") -> str:
    """Return the name of a deployment, under which `MEMBERS` also keeps its replicas.

    Args:
        role: `prefill` or `decode`.
        group: the model's name in the configuration; empty if it is the app's only model.
    """
    return f"{role}-{group}" if group else role


def routed_as(role: str) -> RequestRouterConfig:
    """Return the Serve option `request_router_config` that makes handles use this router.

    Args:
        role: the name under which `MEMBERS` keeps the replicas.
    """
    return RequestRouterConfig(
        request_router_class="headrace_engine.serving.request_router:NamedReplicaRouter",
        request_router_kwargs={"role": role},
    )
