"""The gateway as a Serve deployment: what it asks of Serve, records, and lets through."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import ApplicationStatus

from headrace.gateway import deployment
from headrace.gateway.conversations.setup import folder_of
from headrace.gateway.deployment import ServeLifespanFilter
from headrace.gateway.serve_backend import model_backend
from headrace.gateway.serve_backend.app_backend import GRAFANA_VARIABLE, ServeBackend
from headrace.gateway.serve_backend.gateways import Gateways
from headrace.gateway.serve_backend.model_backend import ModelDeployments, ServeModelBackend
from headrace.observability import metrics
from headrace.router.plan import RouterSettings
from headrace_engine.serving.model_values import prefix
from tests.support.only_ipv6 import HOSTS


class Response:
    """A call that waits for a replica."""

    def __init__(self) -> None:
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


class Handle:
    """Of a deployment with the replicas whose answers these are."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers = answers
        self.queued: list[Response] = []
        self.told: list[tuple[Any, ...]] = []
        self.headrace_replica = SimpleNamespace(remote=self._queue)

    def _queue(self) -> Response:
        self.queued.append(Response())
        return self.queued[-1]

    def broadcast(self, method: str, *args: Any) -> Any:
        if not self.answers:
            raise DeploymentUnavailableError(SimpleNamespace(name="decode"))
        self.told.append((method, *args))

        async def results(**_: Any) -> list[dict[str, Any]]:
            return self.answers

        return SimpleNamespace(results_async=results)


@pytest.fixture
def cluster_values(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The cluster's values, by key."""
    kept: dict[str, bytes] = {}
    context = SimpleNamespace(app_name="app")
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(model_backend, "read_cluster_value", kept.get)
    monkeypatch.setattr(model_backend, "write_cluster_value", kept.__setitem__)
    return kept


def backend(
    decode: Handle, prefill: Handle | None = None, group: str = "", gateways: Gateways | None = None
) -> ServeModelBackend:
    handles: Any = (decode, prefill or Handle([]))
    model = ModelDeployments(group or "only", *handles, RouterSettings(), group)
    return ServeModelBackend(model, gateways or Gateways())


def wanted(cluster: ServeModelBackend, is_wanted: bool) -> None:
    cluster._is_wanted = lambda: is_wanted


async def test_while_requests_wait_one_call_asks_serve_for_a_replica(
    cluster_values: object,
) -> None:
    handle = Handle([])
    cluster = backend(handle)
    wanted(cluster, True)
    for _ in range(3):
        assert await cluster.replicas() == []
    assert len(handle.queued) == 1


async def test_nobody_asks_serve_for_a_replica_that_nobody_waits_for(
    cluster_values: object,
) -> None:
    handle = Handle([])
    cluster = backend(handle)
    await cluster.replicas()
    assert handle.queued == []
    wanted(cluster, True)
    await cluster.replicas()
    wanted(cluster, False)
    await cluster.replicas()
    assert [each.cancelled for each in handle.queued] == [1]


async def test_a_replica_without_a_url_is_not_listed(cluster_values: object) -> None:
    told = [{"replica_id": "a", "url": "http://a", "token": "t"}, {"replica_id": "b", "url": None}]
    [only] = await backend(Handle(told)).replicas()
    assert (only.replica_id, only.token) == ("a", "t")


async def test_a_prefill_replica_that_can_stand_in_is_listed_also_without_a_decode_replica(
    cluster_values: object,
) -> None:
    told = [{"replica_id": "p", "url": "http://p", "is_fallback": True}, {"replica_id": "q"}]
    [only] = await backend(Handle([]), Handle(told)).replicas()
    assert only.replica_id == "p" and only.is_fallback


async def test_an_order_is_kept_for_replicas_that_start_later(
    cluster_values: dict[str, bytes],
) -> None:
    handle = Handle([{}])
    assert await backend(handle).set_policy("local") == 1
    assert handle.told == [("headrace_set_policy", "local")]
    assert len(cluster_values) == 1
    await backend(handle).set_speculation({"mode": "off", "draft_cap": 3})
    assert len(cluster_values) == 3


async def test_an_order_that_cannot_be_kept_reaches_the_replicas_that_are_there(
    cluster_values: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ConnectionError("no GCS")

    monkeypatch.setattr(model_backend, "read_cluster_value", broken)
    handle = Handle([{}])
    assert await backend(handle).set_policy("local") == 1


async def test_serves_end_of_its_lifespan_leaves_the_gateway_running() -> None:
    """Serve ends it before `__del__`, while streams on the gateway's own port go on."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    through = ServeLifespanFilter(app)
    serves = uvicorn.Config(through)
    serves.load()
    assert serves.interface == "asgi3"
    said = iter(["lifespan.startup", "lifespan.shutdown"])
    sent: list[str] = []

    async def receive() -> dict[str, Any]:
        return {"type": next(said)}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await through({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    await through({"type": "http"}, receive, send)
    assert seen == ["http"]


@pytest.mark.parametrize("host", HOSTS)
async def test_the_metrics_are_those_of_all_nodes_that_answer(
    cluster_values: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    async def export(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n# TYPE ray_vllm_x counter\nray_vllm_x 1\nother 2\n")
        writer.close()

    async def abort_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    servers = [await asyncio.start_server(turn, host, 0) for turn in (export, abort_connection)]
    nodes = [
        {
            "Alive": True,
            "NodeManagerAddress": host,
            "MetricsExportPort": server.sockets[0].getsockname()[1],
        }
        for server in servers
    ]
    monkeypatch.setattr(metrics.ray, "nodes", lambda: [*nodes, {"Alive": False}])
    page = await ServeBackend([], Gateways()).metrics()
    assert page == b"# TYPE ray_vllm_x counter\nray_vllm_x 1\n"
    for server in servers:
        server.close()


@pytest.mark.parametrize("is_deleted", [True, False])
def test_the_app_leaves_nothing_when_it_is_deleted(
    is_deleted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster_values: dict[str, bytes],
) -> None:
    """Its overrides, its secret and its conversations; a redeployed app keeps them."""
    status = ApplicationStatus.DELETING if is_deleted else ApplicationStatus.RUNNING
    apps = SimpleNamespace(applications={"app": SimpleNamespace(status=status)})
    removed: list[str] = []
    monkeypatch.setattr(serve, "status", lambda: apps)
    monkeypatch.setattr(deployment, "remove_cluster_values", removed.append)
    monkeypatch.setattr(deployment, "session_folder", lambda: tmp_path)
    folder = folder_of(tmp_path, "app")
    folder.mkdir()
    (folder / "conversations").write_text("")
    deployment._remove_leftovers()
    assert removed == ([prefix("app")] if is_deleted else [])
    assert folder.exists() is not is_deleted


async def test_the_queues_of_all_models_share_an_answer_of_the_gateways(
    cluster_values: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = SimpleNamespace(replica_id=SimpleNamespace(unique_id="a"), app_name="app")
    monkeypatch.setattr(serve, "get_replica_context", lambda: me)
    handle, gateways = Handle([("a", {}), ("b", {"x": {"shop": 1.0}, "y": {}})]), Gateways()  # type: ignore[list-item]
    gateways._handle = handle  # type: ignore[assignment]
    x, y = (backend(Handle([]), group=name, gateways=gateways) for name in "xy")
    assert await x.admitted() == {"b": {"shop": 1.0}}
    assert await y.admitted() == {"b": {}}
    assert handle.told == [("headrace_admitted",)]


class TestStatus:
    """What the status says beside the replicas' own documents."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch, cluster_values: object) -> ServeBackend:
        """Of an app with two gateways, whose second decode replica starts."""
        states = {
            "decode": {"RUNNING": 1, "STARTING": 1, "STOPPING": 1},
            "prefill": {"RUNNING": 1},
        }
        deployments = {
            name: SimpleNamespace(replica_states=counts) for name, counts in states.items()
        }
        app = SimpleNamespace(deployments=deployments)
        monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"app": app}))
        monkeypatch.setenv(GRAFANA_VARIABLE, "https://grafana.example")
        gateways = Gateways()
        gateways._handle = Handle(  # type: ignore[assignment]
            [("a", {"only": {"shop": 2.0, "bank": 1.0}}), ("b", {"only": {"shop": 0.5}})]  # type: ignore[list-item]
        )
        return ServeBackend([backend(Handle([]), gateways=gateways)], gateways)

    async def test_counts_the_replicas_that_run_or_start(self, asked: ServeBackend) -> None:
        assert (await asked.status())["expected_replicas"] == {"decode": 2, "prefill": 1}

    async def test_adds_up_the_engine_time_of_each_tenant(self, asked: ServeBackend) -> None:
        assert (await asked.status())["engine_s_by_tenant"] == {"shop": 2.5, "bank": 1.0}

    async def test_names_grafana_where_ray_knows_it(self, asked: ServeBackend) -> None:
        assert (await asked.status())["ray"]["grafana"] == "https://grafana.example"

    async def test_is_made_without_the_counts_if_serve_does_not_answer(
        self, asked: ServeBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            raise ConnectionError

        monkeypatch.setattr(serve, "status", fail)
        assert (await asked.status())["expected_replicas"] == {}
