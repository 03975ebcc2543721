"""The gateway's interfaces to its environment: models, their replicas, and metrics.

They let the gateway run the same on Ray, in a test and in a benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from headrace_decode.http.public_routes import Route

Known = TypeVar("Known")


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """A replica that can answer requests, and its load when it last reported.

    Attributes:
        replica_id: unique among live replicas; a restarted replica has a new one.
        url: `http://ip:port` of the replica's own OpenAI server, without a trailing slash.
        running: number of requests in its engine's batch.
        waiting: number of requests in its engine's queue.
        routes: the routes that clients may use.
        in_flight: number of requests on its port, from all gateways.
        token: secret that its port demands of a gateway.
        is_fallback: whether it is a prefill replica, which answers if no decode replica is ready.
        techniques: the techniques that make its KV approximate; empty if the KV is exact.
    """

    replica_id: str
    url: str
    running: int = 0
    waiting: int = 0
    routes: tuple[Route, ...] = ()
    in_flight: int = 0
    token: str = ""
    is_fallback: bool = False
    techniques: str = ""

    @property
    def reported(self) -> int:
        """Number of requests that it had: on its port or in its engine, whichever is larger.

        The engine may have more, since one request may become several there.
        """
        return max(self.in_flight, self.running + self.waiting)

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> ReplicaInfo:
        """Return the info from a replica's answer to `headrace_replica`, without unknown fields."""
        routes = tuple(_known(Route, route) for route in answer.get("routes", ()))
        return _known(cls, {**answer, "routes": routes})


def _known(cls: type[Known], answer: Mapping[str, Any]) -> Known:
    """Make the dataclass from the answer, without the answer's unknown fields."""
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in answer.items() if name in names})


class ModelBackend(Protocol):
    """The replicas of one model as the gateway sees them.

    Attributes:
        starts_on_demand: whether Serve may have stopped every replica that answers clients, and
            starts one when a request waits for it.
    """

    starts_on_demand: bool = False

    async def replicas(self) -> list[ReplicaInfo]:
        """Return the replicas that are ready now.

        The gateway calls it about once a second and after each failure. If it raises an exception,
        the gateway keeps the last list.
        """

    async def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document of a replica's own application; empty without a replica."""

    async def plan(self, request_id: str) -> dict[str, Any] | None:
        """Return the plan made for a request, or None when it is unknown or was dropped."""

    async def usage(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        """Return what each replica's engine did for a request (`ReplicaUsage.of_request`).

        Args:
            tenant: whose request; None for any tenant's.
        """
        return []

    async def warm(self, body: dict[str, Any], salt: str, pin: bool) -> list[dict[str, Any]]:
        """Make a prompt's KV and have it stored; return the answer of each decode replica."""

    async def set_speculation(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Change how decode replicas draft; return the state of each that drafts."""

    async def send_corpus_command(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a command to the retrieval memory of every decode replica that has one.

        Returns:
            The answer of each with its `replica_id`; that of a failed replica has `error`.
        """

    async def added_adapters(self) -> dict[str, str]:
        """Return the sources of the LoRA adapters that administrators have added, by name."""
        return {}

    async def set_adapter(self, name: str, source: str | None) -> list[dict[str, Any]]:
        """Add a LoRA adapter to all replicas, or remove it.

        Args:
            source: where replicas have it from; None removes it.

        Returns:
            The answer of each replica with its `replica_id`; that of one that failed has `error`.
        """
        return []

    async def set_policy(self, policy: str) -> int:
        """Force all plans `local` or `remote`, or let them follow the `cost`.

        Returns:
            The number of replicas reached.
        """

    async def admitted(self) -> dict[str, dict[str, float]]:
        """Return the engine time that each other gateway has given each tenant since it started.

        With admission, the gateway calls it about once a second.

        Returns:
            Predicted seconds of engine time, by gateway, then by tenant.
        """
        return {}


class Backend(Protocol):
    """The cluster as the gateway sees it: what its models share."""

    async def status(self) -> dict[str, Any]:
        """Return the JSON document of `GET /headrace/v1/status`."""

    async def store(
        self, action: str, namespace: str | None = None, hash: str | None = None
    ) -> list[dict[str, Any]]:
        """Have each machine's StoreNode carry out an operator's action.

        Returns:
            The answer of each machine; empty without a store.
        """
        return []

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format, for `GET /metrics`."""


class OneModelBackend(Backend, ModelBackend, Protocol):
    """The cluster of an app that serves one model."""
