"""The rendered release on Ray nodes that are separated like pods: each has a network, a file system
and processes of its own, with the resources, token, /dev/shm and rights that the chart gives. A
bridge joins them, and only the ports that the policies allow are open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.app import until
from tests.support.chart import merged, objects, preset, serve_config
from tests.support.pod_network import CLIENTS, OPERATOR, Pod, PodNetwork, can_make_networks
from tests.support.run import engine_started
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(1500)]

START_S = 900.0
MODEL = "tiny"
PROMPT = [(7 * i) % 1500 + 300 for i in range(700)]


def values() -> dict[str, Any]:
    """The laptop's, with a model that loads in seconds."""
    role = {"kv_cache_gb": 0.1, "cpus": 0.1, "engine": {"dtype": "float32", "max_num_seqs": 8}}
    return merged(
        preset("laptop"),
        {
            "config.model": {"id": MODEL, "source": "/tmp/model", "max_model_len": 4096},
            "config.prefill": role,
            "config.decode": role,
            "config.router.policy": "remote",
            "config.store.dram_gb": 0.004,
            "config.drain_s": 20,
        },
    )


class Release:
    """The release, as KubeRay would have deployed it."""

    def __init__(self, network: PodNetwork) -> None:
        self.network = network
        self.head = network.start("head")
        bearer = {"authorization": f"Bearer {network.token}"}
        self.dashboard = network.client(self.head, 8265, OPERATOR, headers=bearer, timeout=60)
        until(self.head_answers, 180, "the dashboard answers", network.logs)
        self.pods = {name: network.start(name) for name in ("gateway", "prefill", "decode")}
        until(lambda: self.nodes() == 4, 180, "four Ray nodes", network.logs)
        engine_started(2)
        self.deploy()

    def head_answers(self) -> bool:
        try:
            return self.dashboard.get("/api/version").status_code == 200
        except httpx.HTTPError:
            return False

    def nodes(self) -> int:
        found = self.dashboard.get("/nodes?view=summary").json()["data"]["summary"]
        return sum(node["raylet"].get("state") == "ALIVE" for node in found)

    def deploy(self) -> None:
        answer = self.dashboard.put("/api/serve/applications/", json=serve_config(values()))
        assert answer.status_code == 200, answer.text

    def app(self) -> dict[str, Any]:
        applications = self.dashboard.get("/api/serve/applications/").json()["applications"]
        return dict(applications.get("headrace", {}))


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    if os.geteuid() != 0 or not can_make_networks():
        pytest.skip("no networks can be made here: it takes root, unshare, nsenter and ip")
    caches = {"model": tiny_llama(), "numba": Path(os.environ["NUMBA_CACHE_DIR"])}
    network = PodNetwork(objects(values()), caches)
    try:
        yield Release(network)
    finally:
        network.close()


def ask(client: httpx.Client, tokens: int = 8) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_pods_become_ready_when_their_engines_have_loaded(release: Release) -> None:
    """Not before: the app is deployed, and no engine is there yet."""
    assert not any(pod.is_ready() for pod in release.pods.values())

    def ready() -> bool:
        app = release.app()
        if app.get("status") == "DEPLOY_FAILED":
            raise RuntimeError(f"{app['message']}\n{release.network.logs()}")
        return all(pod.is_ready() for pod in release.pods.values())

    until(ready, START_S, "all pods are ready", release.network.logs)
    assert release.app()["status"] == "RUNNING"


def test_clients_reach_the_gateway_and_nothing_else(release: Release) -> None:
    gateway = release.pods["gateway"]
    client = release.network.client(gateway, 8088, CLIENTS, timeout=120)
    assert client.get("/v1/models").json()["data"][0]["id"] == MODEL
    for pod in (release.head, *release.pods.values()):
        for port in (6379, 8000, 8080, 8265, 10001):
            with pytest.raises(PermissionError):
                release.network.client(pod, port, CLIENTS)


def test_the_operator_sees_serves_proxy_of_each_worker(release: Release) -> None:
    """By it, KubeRay knows that the app answers."""
    for pod in release.pods.values():
        client = release.network.client(pod, 8000, OPERATOR, timeout=30)
        assert client.get("/-/healthz").status_code == 200, pod.name


def test_kv_moves_between_pods(release: Release) -> None:
    """From the prefill pod's address to the decode pod's. Without keys, the status is only for a
    client on the gateway's own machine, as a port-forward is one."""
    gateway = release.pods["gateway"]
    client = release.network.client(gateway, 8088, CLIENTS, timeout=240)
    first = ask(client)
    assert client.get("/headrace/v1/status").status_code == 403
    own = release.network.port_forward(gateway, 8088, timeout=60)
    status = own.get("/headrace/v1/status").raise_for_status().json()
    assert status["plans"]["remote"] >= 1 and status["nixl_bytes"] > 0
    assert ask(client)["choices"][0]["text"] == first["choices"][0]["text"]


def test_a_pod_that_ends_finishes_its_streams_and_another_takes_its_place(
    release: Release,
) -> None:
    """As in a drain: SIGTERM, the grace period, and a pod that KubeRay makes again."""
    client = release.network.client(release.pods["gateway"], 8088, CLIENTS, timeout=240)
    old: Pod = release.pods["decode"]
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        old.stop()
        rest = list(lines)
    assert rest[-1] == "data: [DONE]" or "data: [DONE]" in rest[-2:], rest[-3:]
    old.end(60)
    engine_started()
    new = release.pods["decode"] = release.network.start("decode")
    assert not new.is_ready()
    until(new.is_ready, START_S, "the new pod is ready", release.network.logs)
    assert ask(client)["usage"]["completion_tokens"] == 8
