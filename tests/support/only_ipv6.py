"""Parts of Headrace on a machine whose only address is ::1; each in a process of its own.

    unshare -n python -m tests.support.only_ipv6 PART FOLDER

Raises whatever is wrong.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

HOST = "::1"


def has_host() -> bool:
    """Whether this machine has it."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((HOST, 0))
    except OSError:
        return False
    return True


HOSTS = ["127.0.0.1", *([HOST] if has_host() else [])]
"""Where a test may listen on this machine."""


def enter() -> None:
    """Leave this network namespace with ::1 alone."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with suppress(subprocess.CalledProcessError):
        subprocess.run(["ip", "addr", "del", "127.0.0.1/8", "dev", "lo"], check=True)
    with suppress(OSError), socket.socket() as four:
        four.bind(("127.0.0.1", 0))
        raise AssertionError("there is an IPv4 address")


def store(folder: Path) -> None:
    """One StoreNode pulls what the other holds, over NIXL and TCP as between two machines."""
    environment = {"UCX_TLS": "tcp,self"}
    from headrace_kvstore.protocol.client import NodeClient
    from tests.support.kvnode import Engine, answers, locate, until
    from tests.support.kvprocess import Node

    fast = {"heal_s": 0.2, "keep_arena": True, "nvme_folder": None}
    owner = Node(folder / "owner", environment, listen=f"[{HOST}]:0", **fast).ready()
    nodes = [owner]
    try:
        address = owner.stats()["remote"]["address"]
        assert address.startswith("[::1]:"), address
        reader = Node(folder / "reader", environment, peers=(address,), **fast).ready()
        nodes.append(reader)
        ours, theirs = Engine(owner.settings), Engine(reader.settings)
        assert all(ours.put(0, 1, 2))
        client = NodeClient("arena", timeout_s=120.0, retry_s=0.05, socket_folder=reader.folder)
        until(lambda: answers(client))
        until(lambda: _blocks(reader) == 3, 120.0)
        until(lambda: locate(client, 0, 1, 2) == [] and all(theirs.has(0, 1, 2)), 120.0)
        client.close()
    finally:
        for node in nodes:
            node.close()


def _blocks(node: object) -> int:
    [peer] = node.stats()["remote"]["peers"].values()  # type: ignore[attr-defined]
    return int(peer["blocks"]["DRAM"])


def gateway(folder: Path) -> None:
    """A gateway at all addresses relays to a replica at ::1."""
    import aiohttp

    from headrace.cli.cluster import port_is_free
    from headrace.config.gateway import GatewaySettings
    from headrace.gateway import ReplicaInfo, build_gateway_app, serve_gateway
    from headrace_kvstore.protocol.address import base_url
    from tests.unit import gateway_fakes as fakes

    class Replica(fakes.FakeReplica):
        @property
        def info(self) -> ReplicaInfo:
            told = {"routes": self.routes, "token": fakes.TOKEN, "techniques": ""}
            return ReplicaInfo(self.replica_id, base_url(HOST, self.port), 0, 0, **told)

    async def run(host: str) -> None:
        replica = await Replica(fakes.answer).start(host=HOST)
        app = build_gateway_app(GatewaySettings(), fakes.FakeCluster([replica]), fakes.MODEL)
        server = await serve_gateway(app, host, 0)
        assert not port_is_free(HOST, server.port)
        async with (
            aiohttp.ClientSession(base_url(HOST, server.port)) as client,
            client.post(fakes.CHAT, json=fakes.PROMPT) as response,
        ):
            assert response.status == 200, await response.text()
        assert replica.seen
        await replica.stop()
        await server.stop(grace_s=1)

    for host in (HOST, "::"):
        asyncio.run(run(host))


def line(folder: Path) -> None:
    """A gateway follows a replica's blocks and reports."""
    from tests.support import event_publishers

    async def run() -> None:
        event_publishers.HOST = HOST
        replica, gateway = event_publishers.Replica(), event_publishers.Gateway()
        replica.change(True, 1, 2)
        gateway.follow(replica)
        await event_publishers.until(lambda: gateway.has("a", 1, 2))
        replica.change(True, 3)
        await event_publishers.until(lambda: gateway.has("a", 1, 2, 3))
        gateway.subscriber.close()
        replica.line.close()

    asyncio.run(run())


def events(folder: Path) -> None:
    """A node's events are reached at all addresses."""
    import zmq

    from headrace_kvstore.protocol.address import connect, host_port
    from headrace_kvstore.protocol.events import EventPublisher

    publisher = EventPublisher("tcp://*:*", None, tuple)
    assert publisher.endpoint is not None
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    connect(subscriber, f"tcp://{host_port(HOST, publisher.endpoint.rpartition(':')[2])}")
    for _ in range(100):
        publisher.resync()
        if subscriber.poll(100):
            break
    assert subscriber.recv_multipart()
    publisher.close()
    context.destroy(0)


def handshake(folder: Path) -> None:
    """An engine's side of a pull: its ports, and the answer to a handshake."""
    from headrace_engine.kv_transfer.ports import reserve_ports
    from tests.unit import test_pull_proof_connectors as halves

    with reserve_ports(2, HOST) as block:
        assert halves.handshake(HOST, block.first) == b"agent"


def doctor(folder: Path) -> None:
    """`headrace doctor --listen` and `--peer` measure the link, NIXL included."""
    from headrace.cli.probes import transfer

    ports: list[int] = []
    listener = threading.Thread(
        target=transfer.listen, args=(0, {}, 20.0, ports.append), daemon=True
    )
    listener.start()
    while not ports:
        assert listener.is_alive()
    found = transfer.read(HOST, ports[0], 0.2)
    assert found.tcp_gbps > 0
    print("NIXL:", found.nixl_gbps, found.nixl_error)


PARTS = {part.__name__: part for part in (store, gateway, line, events, handshake, doctor)}


if __name__ == "__main__":
    enter()
    PARTS[sys.argv[1]](Path(sys.argv[2]))
    print("all is well", flush=True)
    os._exit(0)  # threads of libraries may wait for ever for a network
