"""The app's nodes as real Ray actors over real NIXL: introduced to each other, one pulls what the
other holds, also after that one was killed and Ray has restarted it at another port.

Both stand on this machine, so each gets folders of its own, as machines have.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from headrace_engine.store_nodes.manager import StoreNodeActor
from headrace_engine.store_nodes.peer_discovery import PeerDiscovery
from headrace_kvstore.protocol.client import NodeClient
from tests.support.kvnode import Engine, answers, locate, settings, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENT_S = 120.0


async def ask(node: Any, method: str, *arguments: Any) -> Any:
    try:
        return await asyncio.wait_for(getattr(node, method).remote(*arguments), PATIENT_S)
    except ray.exceptions.RayActorError:
        return None


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """By machine."""
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100_000_000)
    try:
        made = {}
        for name in ("owner", "reader"):
            given = settings(tmp_path / name)
            (tmp_path / name).mkdir()
            plain = {
                field: str(value) if isinstance(value, Path) else value
                for field in ("name", "folder", "dram_bytes", "block_bytes", "layers", "secret")
                if (value := getattr(given, field)) is not None
            }
            plain |= {"socket_folder": str(tmp_path / name), "keep_arena": True, "retry_s": 0.1}
            actor = ray.remote(StoreNodeActor).options(
                num_cpus=0, max_restarts=-1, max_concurrency=4
            )
            made[name] = actor.remote(plain)
        yield made
    finally:
        ray.shutdown()


def stats(node: Any) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def there() -> bool:
        try:
            found.append(ray.get(node.stats.remote(), timeout=PATIENT_S))
        except ray.exceptions.RayActorError:
            return False
        return True

    until(there, PATIENT_S)
    return found[-1]


def test_machines_pull_from_each_other_also_after_a_restart(
    nodes: dict[str, Any], tmp_path: Path
) -> None:
    owner, reader = nodes["owner"], nodes["reader"]
    assert all(stats(node)["remote"]["address"] is None for node in nodes.values())
    engines = [Engine(settings(tmp_path / name)) for name in nodes]
    peering = PeerDiscovery(ask)

    def known() -> int:
        asyncio.run(peering.update(nodes))
        [peer] = stats(reader)["remote"]["peers"].values()
        return int(peer["blocks"]["DRAM"])

    def pulls(*numbers: int) -> None:
        """Asked again where a pull was late, as on a busy machine."""

        def brought() -> bool:
            locate(client, *numbers)
            return all(engines[1].has(*numbers))

        until(brought, PATIENT_S)

    engines[0].put(0, 1)
    until(lambda: known() == 2, PATIENT_S)
    client = NodeClient(
        "arena", timeout_s=PATIENT_S, retry_s=0.05, socket_folder=tmp_path / "reader"
    )
    until(lambda: answers(client), PATIENT_S)
    pulls(0, 1)
    before = stats(owner)
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: stats(owner)["pid"] != before["pid"], PATIENT_S)
    engines[0].put(2, 3, 4)
    until(lambda: known() == 5, PATIENT_S)
    assert stats(owner)["remote"]["address"] != before["remote"]["address"]
    pulls(2, 3, 4)
    client.close()
    for engine in engines:
        engine.close()
