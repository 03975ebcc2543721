"""Two store nodes in processes of their own: one pulls what the other holds, over real NIXL (UCX),
and every fault on the way is a miss with a name."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import NodeClient
from headrace_kvstore.protocol.gossip_log import GossipEntry
from tests.support.kvnode import DIGEST, SHAPE, Engine, answers, keys, locate, until
from tests.support.kvprocess import Node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENT_S = 120.0
FAST = {"heal_s": 0.2, "keep_arena": True, "nvme_folder": None}
OVER_TCP = {"UCX_TLS": "tcp,self"}
"""Where the owner has a part in each read, as between machines without RDMA."""

Begin = Callable[..., Node]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    nodes: list[Node] = []

    def start(name: str, environment: dict[str, str] | None = None, **values: Any) -> Node:
        node = Node(tmp_path / name, environment, forked=True, **(FAST | values))
        nodes.append(node)
        return node.ready()

    yield start
    for node in nodes:
        node.close()


@pytest.fixture
def engine_of() -> Iterator[Callable[[Node], Engine]]:
    engines: list[Engine] = []

    def engine(node: Node) -> Engine:
        engines.append(Engine(node.settings))
        return engines[-1]

    yield engine
    for each in engines:
        each.close()


@pytest.fixture
def client_of() -> Iterator[Callable[[Node], NodeClient]]:
    clients: list[NodeClient] = []

    def client(node: Node) -> NodeClient:
        one = NodeClient("arena", timeout_s=PATIENT_S, retry_s=0.05, socket_folder=node.folder)
        clients.append(one)
        until(lambda: answers(one))
        return one

    yield client
    for each in clients:
        each.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def remote(node: Node) -> dict[str, Any]:
    return dict(node.stats()["remote"])


def peer(node: Node) -> dict[str, Any]:
    """What a node says of its only peer."""
    [one] = remote(node)["peers"].values()
    return dict(one)


def knows(node: Node, blocks: int, medium: str = "DRAM") -> None:
    """Wait until a node knows so many blocks of its peer's."""
    until(lambda: peer(node)["blocks"][medium] == blocks, PATIENT_S)


def nothing_leaks(owner: Node, reader: Node) -> None:
    """No lease is left, and no slot that is being written."""
    until(lambda: remote(owner)["lease_server"]["leases"] == 0, PATIENT_S)
    for node in (owner, reader):
        until(lambda node=node: node.stats()["tiers"]["dram"]["writing"] == 0, PATIENT_S)  # type: ignore[misc]
    # One that ran out beside one that was released holds its slot to its own end.
    until(lambda: owner.stats()["tiers"]["dram"]["leased"] == 0, PATIENT_S)


def pair(
    begin: Begin, environment: dict[str, str] | None = None, **values: Any
) -> tuple[Node, Node]:
    """An owner, and a reader that knows it as its peer."""
    owner = begin("owner", environment, listen="127.0.0.1:0", **values)
    reader = begin("reader", environment, peers=(remote(owner)["address"],), **values)
    return owner, reader


def test_entries_of_one_node_s_gossip_log_come_to_the_other_s_and_no_further(begin: Begin) -> None:
    here = f"127.0.0.1:{free_port()}"
    owner = begin("owner", listen="127.0.0.1:0", peers=(here,))
    reader = begin("reader", listen=here, peers=(remote(owner)["address"],))
    place = owner.call(wire.ReadEntries("", 0, 2**20)).generation
    for last in (1, 2):
        owner.call(wire.AppendEntry(place, GossipEntry(b"writer", b"stream", last, b"entry")))
    owner.call(
        wire.AppendEntry("another", GossipEntry(b"writer", b"stream", 3, b"for another log"))
    )
    until(lambda: reader.stats()["gossip"]["entries"] == 2, PATIENT_S)
    page = reader.call(wire.ReadEntries("", 0, 2**20))
    assert [(entry.last, entry.data) for entry in page.entries] == [(1, b"entry"), (2, b"entry")]
    reader.call(wire.AppendEntry(page.generation, GossipEntry(b"other", b"stream", 1, b"back")))
    until(lambda: owner.stats()["gossip"]["entries"] == 3, PATIENT_S)
    assert peer(owner)["entries"] == 1, "its own are not sent back"


@pytest.mark.parametrize("environment", [None, OVER_TCP], ids=["shared memory", "tcp"])
def test_what_one_node_holds_its_neighbour_s_engine_finds_in_dram(
    begin: Begin,
    engine_of: Callable[[Node], Engine],
    client_of: Callable[[Node], NodeClient],
    environment: dict[str, str] | None,
) -> None:
    owner, reader = pair(begin, environment, pull_limit_s=60.0, peer_lease_s=90.0)
    ours, theirs = engine_of(owner), engine_of(reader)
    client = client_of(reader)
    ours.put(*range(20))
    knows(reader, 20)
    assert locate(client, *range(22)) == []
    assert theirs.has(*range(22)) == [True] * 20 + [False] * 2
    nothing_leaks(owner, reader)
    assert remote(reader)["pull"]["pulled_bytes"] == 20 * SHAPE.payload_bytes
    assert remote(owner)["lease_server"]["released"] == 20

    ours.arena.clear()
    knows(reader, 0)
    theirs.arena.clear()
    locate(client, *range(20))
    assert theirs.has(0) == [False]


def test_blocks_that_the_owner_has_on_nvme_only_are_pulled_too(
    begin: Begin,
    engine_of: Callable[[Node], Engine],
    client_of: Callable[[Node], NodeClient],
    tmp_path: Path,
) -> None:
    owner = begin("owner", listen="127.0.0.1:0", nvme_folder=tmp_path / "nvme")
    reader = begin(
        "reader", peers=(remote(owner)["address"],), pull_limit_s=60.0, peer_lease_s=90.0
    )
    ours, theirs = engine_of(owner), engine_of(reader)
    ours.put(*range(6))
    until(lambda: owner.stats()["tiers"]["nvme"]["blocks"] == 6, PATIENT_S)
    ours.arena.clear()
    knows(reader, 6, "NVME")
    knows(reader, 0)
    locate(client_of(reader), *range(6))
    assert theirs.has(*range(6)) == [True] * 6
    assert remote(owner)["lease_server"]["raised_from_nvme"] == 6
    nothing_leaks(owner, reader)


def test_what_is_computed_faster_than_pulled_is_not_pulled(
    begin: Begin, engine_of: Callable[[Node], Engine], client_of: Callable[[Node], NodeClient]
) -> None:
    owner, reader = pair(begin)
    ours, theirs = engine_of(owner), engine_of(reader)
    ours.put(0, 1)
    knows(reader, 2)
    locate(client_of(reader), 0, 1, compute_s=1e-9)
    assert theirs.has(0, 1) == [False, False]
    assert remote(reader)["pulls_not_worth_it"] == 1


def test_a_flipped_bit_is_a_miss_and_the_owner_drops_the_block(
    begin: Begin, engine_of: Callable[[Node], Engine], client_of: Callable[[Node], NodeClient]
) -> None:
    owner, reader = pair(begin, pull_limit_s=60.0, peer_lease_s=90.0)
    ours, theirs = engine_of(owner), engine_of(reader)
    ours.put(*range(5))
    knows(reader, 5)
    [slot] = ours.arena.lookup(ours.row, keys(3))
    ours.arena.view(slot)[1234] ^= 16
    locate(client_of(reader), *range(5))
    assert theirs.has(*range(5)) == [True, True, True, False, True]
    nothing_leaks(owner, reader)
    until(lambda: ours.has(3) == [False], PATIENT_S)
    assert remote(reader)["pull"]["failed_corrupt"] == 1
    assert remote(owner)["lease_server"]["corrupt_here"] == 1
    knows(reader, 4)


@pytest.mark.parametrize("environment", [None, OVER_TCP], ids=["shared memory", "tcp"])
def test_an_owner_killed_during_pulls_costs_hits_and_comes_back_as_another(
    begin: Begin,
    engine_of: Callable[[Node], Engine],
    client_of: Callable[[Node], NodeClient],
    environment: dict[str, str] | None,
) -> None:
    port = free_port()
    limits = {"pull_limit_s": 5.0, "peer_lease_s": 10.0}
    owner = begin("owner", environment, listen=f"127.0.0.1:{port}", **limits)
    reader = begin("reader", environment, peers=(f"127.0.0.1:{port}",), **limits)
    ours, theirs = engine_of(owner), engine_of(reader)
    client = client_of(reader)
    ours.put(*range(30))
    knows(reader, 30)
    before = peer(reader)["generation"]
    locate(client, 0, 1)
    asked = [
        client.ask(wire.Locate("r", DIGEST, keys(*range(first, first + 4)), 30.0))
        for first in range(2, 30, 4)
    ]
    owner.kill()
    for reply in asked:
        assert isinstance(reply.result(PATIENT_S), wire.Located)
    theirs.has(*range(30))  # compares bytes and checksums of what is there
    until(lambda: peer(reader)["state"] == "down", PATIENT_S)
    until(lambda: reader.stats()["tiers"]["dram"]["writing"] == 0, PATIENT_S)
    theirs.arena.clear()
    assert locate(client, 0) == [] and theirs.has(0) == [False]

    owner = begin("owner", environment, listen=f"127.0.0.1:{port}", **limits)
    knows(reader, 30)
    assert peer(reader)["generation"] != before

    def pulled() -> bool:
        locate(client, *range(10))
        return all(theirs.has(*range(10)))

    until(pulled, PATIENT_S)
    nothing_leaks(owner, reader)


def test_an_owner_that_stands_still_is_given_up_and_left_alone(
    begin: Begin, engine_of: Callable[[Node], Engine], client_of: Callable[[Node], NodeClient]
) -> None:
    owner, reader = pair(begin, OVER_TCP, pull_limit_s=1.0, peer_lease_s=2.0)
    ours, theirs = engine_of(owner), engine_of(reader)
    client = client_of(reader)
    ours.put(*range(10))
    knows(reader, 10)

    owner.process.send_signal(signal.SIGSTOP)
    try:
        assert locate(client, *range(10)) == []
        assert not any(theirs.has(*range(10)))
        until(lambda: reader.stats()["tiers"]["dram"]["writing"] == 0, PATIENT_S)
        until(lambda: peer(reader)["state"] == "down", PATIENT_S)
        said = peer(reader)
        assert said.get("failed_slow", 0) + said.get("failed_lost", 0) >= 1
    finally:
        owner.process.send_signal(signal.SIGCONT)

    def pulled() -> bool:
        locate(client, *range(10))
        return all(theirs.has(*range(10)))

    until(pulled, PATIENT_S)
    nothing_leaks(owner, reader)


def test_an_arena_that_was_replaced_is_met_anew(
    begin: Begin, engine_of: Callable[[Node], Engine], client_of: Callable[[Node], NodeClient]
) -> None:
    owner, reader = pair(begin, pull_limit_s=60.0, peer_lease_s=90.0)
    ours, theirs = engine_of(owner), engine_of(reader)
    client = client_of(reader)
    ours.put(*range(4))
    knows(reader, 4)
    before = peer(reader)["generation"]
    locate(client, 0)
    os.unlink(owner.folder / "arena")
    ours = engine_of(owner)
    ours.put(10, 11)
    until(lambda: peer(reader)["generation"] not in ("", before), PATIENT_S)
    knows(reader, 2)
    locate(client, 10, 11)
    assert theirs.has(10, 11) == [True, True]
    nothing_leaks(owner, reader)


def test_a_node_that_is_told_of_itself_is_no_peer_of_its_own(
    begin: Begin, engine_of: Callable[[Node], Engine]
) -> None:
    owner = begin("owner", listen="127.0.0.1:0")
    there, itself = remote(owner)["address"], f"127.0.0.1:{free_port()}"
    reader = begin("reader", listen=itself, peers=(there, itself))
    engine_of(owner).put(0)
    until(lambda: remote(reader)["peers"][there]["blocks"]["DRAM"] == 1, PATIENT_S)
    until(lambda: "itself" in remote(reader)["peers"][itself]["reason"], PATIENT_S)
    assert owner.end() == 0 and reader.end() == 0
