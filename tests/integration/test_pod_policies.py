"""Pods of the rendered release in networks of their own, with a plain server in place of Ray: who
reaches which port, what the probes say, what a container may write."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support import pod_network
from tests.support.app import until
from tests.support.chart import objects, preset
from tests.support.chart_objects import groups
from tests.support.pod_network import (
    CLIENTS,
    OPERATOR,
    Pod,
    PodNetwork,
    can_make_networks,
    ray_start,
)

SERVER = """
import http.server, socketserver, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *words): pass
for port in map(int, sys.argv[1:]):
    server = http.server.ThreadingHTTPServer(("0.0.0.0", port), Handler)
    threading.Thread(target=server.serve_forever).start()
"""
PORTS = (6379, 8000, 8080, 8088, 8265, 33333)
GROUPS = ("head", "gateway", "prefill", "decode")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodNetwork]:
    if os.geteuid() != 0 or not can_make_networks():
        pytest.skip("no networks can be made here: it takes root, unshare, nsenter and ip")
    with pytest.MonkeyPatch.context() as patch:
        # A pod has a /tmp of its own: an environment that lies there is not seen in it.
        python = os.path.realpath(sys.executable)
        command = [python, "-c", SERVER, *map(str, PORTS)]
        patch.setattr(pod_network, "ray_start", lambda group, head: command)
        made = PodNetwork(objects(preset("laptop")), {"model": tmp_path_factory.mktemp("model")})
        try:
            for name in GROUPS:
                made.start(name)
            until(lambda: all(reaches(pod, pod) for pod in made.pods.values()), 90, "the servers")
            yield made
        finally:
            made.close()


def reaches(source: Pod, destination: Pod, port: int = PORTS[-1]) -> bool:
    """Whether a connection within the release is taken."""
    ask = f"exec 3<>/dev/tcp/{destination.address}/{port}"
    return source.run(["timeout", "5", "bash", "-c", ask]).returncode == 0


def by_role(network: PodNetwork) -> dict[str, Pod]:
    return {pod.labels["headrace/role"]: pod for pod in network.pods.values()}


def test_pods_of_the_release_reach_each_other_on_any_port(network: PodNetwork) -> None:
    """Ray, NIXL, UCX and the store choose theirs."""
    pods = by_role(network)
    for source, destination in zip(GROUPS, (*GROUPS[1:], GROUPS[0]), strict=True):
        for port in PORTS:
            assert reaches(pods[source], pods[destination], port), (source, destination, port)


@pytest.mark.parametrize("role", GROUPS)
@pytest.mark.parametrize("port", PORTS)
def test_clients_reach_gateways_alone(network: PodNetwork, role: str, port: int) -> None:
    pod = by_role(network)[role]
    if (role, port) == ("gateway", 8088):
        assert network.client(pod, port, CLIENTS).get("/health").status_code == 200
        return
    with pytest.raises(PermissionError):
        network.client(pod, port, CLIENTS)


@pytest.mark.parametrize("port", [8000, 8265])
def test_the_operator_reaches_the_dashboard_and_serves_proxy(
    network: PodNetwork, port: int
) -> None:
    pod = by_role(network)["head"]
    client = network.client(pod, port, OPERATOR)
    until(lambda: client.get("/").status_code == 200, 10, "an answer")
    with pytest.raises(PermissionError):
        network.client(pod, 6379, OPERATOR)


def test_the_probes_of_engines_go_by_their_file_and_the_gateways_by_its_answer(
    network: PodNetwork,
) -> None:
    pods = by_role(network)
    assert pods["gateway"].is_ready(), "it answers 200"
    for role in ("prefill", "decode"):
        assert not pods[role].is_ready(), "no engine is there"
        assert pods[role].run(["touch", "/tmp/headrace-engine-ready"]).returncode == 0
        assert pods[role].is_ready()
        old = ["touch", "-d", "1 minute ago", "/tmp/headrace-engine-ready"]
        assert pods[role].run(old).returncode == 0
        assert not pods[role].is_ready(), "the engine does not answer any more"


def test_a_container_writes_to_its_volumes_only_and_has_the_shared_memory_of_the_chart(
    network: PodNetwork,
) -> None:
    pod = by_role(network)["decode"]
    assert pod.run(["touch", str(Path(__file__).parent / "not-here")]).returncode != 0
    assert pod.run(["touch", "/tmp/here", "/dev/shm/here"]).returncode == 0
    size = pod.run(["df", "--output=size", "-BM", "/dev/shm"]).stdout.split()[-1]
    [shm] = [v for v in pod.group["template"]["spec"]["volumes"] if v["name"] == "shm"]
    assert f"{size}i" == shm["emptyDir"]["sizeLimit"]


def test_a_pod_that_is_killed_is_gone_for_its_clients(network: PodNetwork) -> None:
    pod = network.start("gateway")
    until(lambda: reaches(pod, pod), 60, "the server")
    client = network.client(pod, 8088, CLIENTS)
    assert client.get("/health").status_code == 200
    pod.kill()
    with pytest.raises(httpx.HTTPError):
        client.get("/health")


def test_ray_is_started_as_kuberay_starts_it() -> None:
    """`generateRayStartCommand`: `resources` of the group come before the container's limits."""
    found = groups(objects(preset("gpu-cluster")))
    head, decode = ray_start(found["head"], None), ray_start(found["decode"], "10.0.0.1")
    assert head[:4] == ["ray", "start", "--head", "--block"]
    assert {"--num-cpus=0", "--dashboard-host=0.0.0.0", "--resources={}"} <= set(head)
    assert {"--address=10.0.0.1:6379", "--num-cpus=8", "--num-gpus=1"} <= set(decode)
    assert '--resources={"headrace_decode": 1.0}' in decode
