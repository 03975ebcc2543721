"""What replicas take from Ray Serve beyond its public interface is there, in the same shape.

Each test names the file to mend when an upgrade moves what it pins.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray._private import worker
from ray._private.node import Node
from ray._private.ray_constants import KV_NAMESPACE_DASHBOARD
from ray._private.workers import default_worker
from ray.experimental import internal_kv
from ray.serve._private import replica, request_router
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import RUNNING_REQUESTS_KEY, DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig
from ray.serve.config import RequestRouterConfig
from ray.serve.context import ReplicaContext
from ray.serve.request_router import PendingRequest, RequestRouter

from headrace_engine.ray import serve as ray_serve
from headrace_engine.ray.serve import ongoing_requests
from headrace_engine.serving.request_router import NamedReplicaRouter, routed_as
from headrace_engine.vllm.engine import cache_layout
from tests.support.contracts import assert_fields, assert_takes, find
from tests.support.free_ports import is_free

SERVING = "engine/headrace_engine/ray/serve.py"
ROUTER = "engine/headrace_engine/serving/request_router.py"
COMPAT = "engine/headrace_engine/vllm/engine.py"
DRAIN_TIMEOUTS = "engine/headrace_engine/serving/drain_timeouts.py"


def test_a_replicas_own_statistics_override_serves_count_of_requests() -> None:
    source = inspect.getsource(
        replica.ReplicaMetricsManager._add_autoscaling_metrics_point_async  # type: ignore[attr-defined]
    )
    assert "metrics_dict.update(custom_metrics)" in source, f"mend {SERVING}"
    assert ongoing_requests(3) == {RUNNING_REQUESTS_KEY: 3}
    for kernel in ("_collect_replica_running_requests", "_replica_running_samples"):
        source = inspect.getsource(getattr(DeploymentAutoscalingState, kernel))
        assert "RUNNING_REQUESTS_KEY" in source, f"mend {SERVING}"


def test_a_replicas_context_has_its_deployments_configuration() -> None:
    names = {field.name for field in dataclasses.fields(ReplicaContext)}
    assert "_deployment_config" in names, f"mend {SERVING}"
    config = DeploymentConfig()
    for name in (
        "max_ongoing_requests",
        "graceful_shutdown_timeout_s",
        "graceful_shutdown_wait_loop_s",
        "max_surge_percent",
    ):
        assert hasattr(config, name), f"mend {SERVING}"


def test_a_changed_configuration_reaches_the_context() -> None:
    source = inspect.getsource(replica.Replica.reconfigure)
    assert "_deployment_config = deployment_config" in source, f"mend {SERVING}"
    assert "_set_internal_replica_context" in source, f"mend {SERVING}"


def test_the_head_leaves_the_dashboards_address_where_workers_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = inspect.getsource(Node.start_api_server)
    assert f'b"{ray_serve.DASHBOARD_KEY}"' in source, f"mend {SERVING}"
    assert "ray_constants.KV_NAMESPACE_DASHBOARD" in source, f"mend {SERVING}"
    assert KV_NAMESPACE_DASHBOARD == ray_serve.DASHBOARD_NAMESPACE, f"mend {SERVING}"
    for found, address in ((b"127.0.0.1:11856", "127.0.0.1:11856"), (None, "")):
        monkeypatch.setattr(ray_serve, "_internal_kv_get", lambda *_, found=found, **__: found)
        assert ray_serve.dashboard_address() == address
    monkeypatch.setenv("RAY_OVERRIDE_DASHBOARD_URL", "https://ray.example.com")
    assert ray_serve.dashboard_address() == "https://ray.example.com"


def test_a_worker_knows_the_folder_of_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(default_worker.__file__).read_text("utf-8")
    assert "ray._private.worker._global_node = node" in source, f"mend {SERVING}"
    node = object.__new__(Node)
    node._session_dir = "/tmp/ray/session_1"
    monkeypatch.setattr(worker, "_global_node", node)
    assert ray_serve.session_folder() == Path("/tmp/ray/session_1"), f"mend {SERVING}"


def test_a_cluster_value_that_exists_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = inspect.signature(internal_kv._internal_kv_put).parameters
    assert parameters["overwrite"].default is True, f"mend {SERVING}"
    kept: dict[str, bytes] = {}

    def put(key: str, value: bytes, overwrite: bool = True, *, namespace: bytes) -> None:
        if overwrite or key not in kept:
            kept[key] = value

    monkeypatch.setattr(ray_serve, "_internal_kv_put", put)
    monkeypatch.setattr(ray_serve, "_internal_kv_get", lambda key, namespace: kept.get(key))
    assert ray_serve.add_cluster_value("a", b"1") == b"1"
    assert ray_serve.add_cluster_value("a", b"2") == b"1"


def test_a_replica_drains_calls_first_and_then_runs_its_destructor() -> None:
    source = inspect.getsource(replica.Replica._perform_graceful_shutdown)
    drained, destroyed = source.index("_drain_ongoing_requests"), source.index("self.shutdown()")
    assert drained < destroyed, f"mend {DRAIN_TIMEOUTS}"


def router() -> Any:
    made = object.__new__(NamedReplicaRouter)
    return made


class Running:
    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, DeploymentID("prefill", "app"))


def pending(**kwargs: Any) -> PendingRequest:
    made = object.__new__(PendingRequest)
    made.kwargs = kwargs
    return made


THREE = [Running("x"), Running("y"), Running("z")]


async def chosen(*args: Any) -> list[list[str]]:
    groups = await router().choose_replicas(*args)
    return [[each.replica_id.unique_id for each in group] for group in groups]


async def test_the_named_replica_is_tried_first_and_then_others() -> None:
    named, others = await chosen(THREE, pending(replica="y"))
    assert named == ["y"] and set(others) == {"x", "z"}


@pytest.mark.parametrize("request_", [None, pending(), pending(replica=""), pending(replica="?")])
async def test_a_call_that_names_none_or_one_that_is_gone_gets_any(request_: Any) -> None:
    [any_two] = await chosen(THREE, request_)
    assert len(set(any_two)) == 2


async def test_a_replica_that_is_alone_is_the_only_choice() -> None:
    assert await chosen(THREE[:1], pending(replica="x")) == [["x"]]
    assert await chosen([], pending(replica="x")) == []


def test_serve_can_send_the_router_to_every_process() -> None:
    config = routed_as("prefill")
    sent = RequestRouterConfig.from_serialized_request_router_cls(
        config.model_dump(), config.get_serialized_request_router_cls()
    )
    loaded = sent.get_request_router_class()
    assert issubclass(loaded, RequestRouter) and loaded.__name__ == "NamedReplicaRouter"
    assert sent.request_router_kwargs == {"role": "prefill"}


def test_a_choice_is_for_the_request_that_asked() -> None:
    """A router that serves requests in order of arrival would give one the other's replica."""
    source = inspect.getsource(
        request_router.request_router.RequestRouter._fulfill_next_pending_request
    )
    assert "_get_pending_request_matching_internal_request_id" in source, f"mend {ROUTER}"
    assert callable(RequestRouter.on_replica_actor_died), f"mend {ROUTER}"
    assert hasattr(serve, "get_replica_context")


def test_an_engine_s_workers_tell_from_which_layouts_its_cache_s_follows() -> None:
    resolve = "vllm.v1.attention.backends.utils:resolve_kv_cache_layout"
    assert_takes(resolve, COMPAT, "vllm_config", "supported_layouts")
    find("vllm.v1.worker.worker_base:WorkerBase.get_supported_kv_cache_layouts", COMPAT)
    assert_fields("vllm.config:CacheConfig", COMPAT, "kv_cache_layout")


async def test_the_layout_is_found_as_the_engine_finds_it() -> None:
    class Engine:
        async def collective_rpc(self, method: str) -> list[list[str]]:
            assert method == "get_supported_kv_cache_layouts"
            return [["LBNHC", "LBHNC"]] * 2

    cache = SimpleNamespace(kv_cache_layout=None)
    config = SimpleNamespace(cache_config=cache, kv_transfer_config=None)
    assert await cache_layout(Engine(), config) == "LBNHC"
    assert cache.kv_cache_layout is None, "the configuration stays as it was"
    assert await cache_layout(object(), config) == "", "who does not tell ends no start"


def test_an_engine_holds_the_ports_of_its_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace_engine.ray import engine as ray_engine

    for name in (ray_engine.SIDE_CHANNEL_HOST, ray_engine.SIDE_CHANNEL_PORT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(ray_engine, "_reserved", None)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    config = SimpleNamespace(
        engine_kwargs={"data_parallel_size": 2},
        get_engine_config=lambda: SimpleNamespace(num_devices=2),
    )
    ray_engine.MeteredVLLMEngine._choose_side_channel(config)
    first = int(os.environ[ray_engine.SIDE_CHANNEL_PORT])
    assert not any(is_free(port, "127.0.0.1") for port in range(first, first + 4))
    ray_engine.MeteredVLLMEngine._choose_side_channel(config)
    assert os.environ[ray_engine.SIDE_CHANNEL_PORT] == str(first), "an engine that starts again"
    assert ray_engine._reserved is not None
    ray_engine._reserved.release()
