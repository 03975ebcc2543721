"""Ray nodes of the rendered release in networks of their own: what the loss of the head's pod does
to the others, as docs/recovery.md says it. No engine runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.app import until
from tests.support.chart import merged, objects, preset
from tests.support.pod_network import OPERATOR, Pod, PodNetwork, can_make_networks

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(450)]

GIVE_UP = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Variable of the seconds after which a Ray node without a head ends. Ray's default: 60."""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[PodNetwork]:
    if os.geteuid() != 0 or not can_make_networks():
        pytest.skip("no networks can be made here: it takes root, unshare, nsenter and ip")
    values = merged(preset("laptop"), {"gateway.env": {GIVE_UP: 5}})
    made = PodNetwork(objects(values), {"model": tmp_path})
    try:
        yield made
    finally:
        made.close()


def start_head(network: PodNetwork) -> httpx.Client:
    """The head's pod; a client of its dashboard, as the operator is one."""
    head = network.start("head")
    bearer = {"authorization": f"Bearer {network.token}"}
    client = network.client(head, 8265, OPERATOR, headers=bearer, timeout=60)
    until(lambda: client.get("/api/version").is_success, 180, "the dashboard", network.logs)
    return client


def alive(client: httpx.Client) -> int:
    """Ray nodes that the head counts."""
    found = client.get("/nodes?view=summary").json()["data"]["summary"]
    return sum(node["raylet"].get("state") == "ALIVE" for node in found)


def test_a_pod_without_its_head_ends_and_starts_again_at_the_next_one(network: PodNetwork) -> None:
    dashboard = start_head(network)
    gateway = network.start("gateway")
    until(lambda: alive(dashboard) == 2, 180, "two nodes", network.logs)
    network.pods["head"].kill()
    assert gateway.process.wait(120) != 0, "Kubernetes starts the container again"
    dashboard = start_head(network)
    again: Pod = network.start("gateway")
    until(lambda: alive(dashboard) == 2, 180, "two nodes", network.logs)
    assert again.process.poll() is None
