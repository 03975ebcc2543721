"""Who is introduced to whom: a manager's view of its machines' nodes, and a node that begins to
lease blocks while it runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from ray.exceptions import RayActorError

from headrace_engine.store_nodes import manager as managing
from headrace_engine.store_nodes.manager import StoreNodeActor, StoreNodeManager
from headrace_engine.store_nodes.peer_discovery import PeerDiscovery
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.protocol.address import split_host_port
from tests.support.kvnode import DIGEST, Engine, keys, settings, until
from tests.support.only_ipv6 import HOSTS


class Fake:
    """A machine's node: `address` is where it would listen; `deaf` ones answer nothing."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.deaf = False
        self.serves = 0
        self.follows: list[str] | None = None


async def ask(node: Fake, method: str, *arguments: Any) -> Any:
    if node.deaf:
        return None
    if method == "serve_peers":
        node.serves += 1
        return node.address
    assert method == "set_peers"
    [node.follows] = arguments
    return None


def turn(peering: PeerDiscovery, nodes: Mapping[str, Fake]) -> None:
    asyncio.run(peering.update(nodes))


def test_each_node_follows_all_others() -> None:
    nodes = {name: Fake(f"{name}:1") for name in "abc"}
    turn(PeerDiscovery(ask), nodes)
    assert nodes["a"].follows == ["b:1", "c:1"]
    assert nodes["b"].follows == ["a:1", "c:1"]
    assert nodes["c"].follows == ["a:1", "b:1"]


def test_a_node_alone_opens_no_port() -> None:
    node = Fake("a:1")
    turn(PeerDiscovery(ask), {"a": node})
    assert (node.serves, node.follows) == (0, None)


def test_machines_come_and_go() -> None:
    peering, nodes = PeerDiscovery(ask), {name: Fake(f"{name}:1") for name in "abc"}
    turn(peering, {"a": nodes["a"], "b": nodes["b"]})
    assert (nodes["a"].follows, nodes["b"].follows) == (["b:1"], ["a:1"])
    turn(peering, nodes)
    assert nodes["a"].follows == ["b:1", "c:1"]
    turn(peering, {"a": nodes["a"], "c": nodes["c"]})
    assert (nodes["a"].follows, nodes["c"].follows) == (["c:1"], ["a:1"])
    turn(peering, {"a": nodes["a"]})
    assert nodes["a"].follows == [], "the last one is left alone"


def test_a_restarted_node_is_followed_at_its_new_port() -> None:
    peering, nodes = PeerDiscovery(ask), {name: Fake(f"{name}:1") for name in "ab"}
    turn(peering, nodes)
    nodes["b"] = Fake("b:2")
    turn(peering, nodes)
    assert (nodes["a"].follows, nodes["b"].follows) == (["b:2"], ["a:1"])


def test_a_node_that_does_not_answer_for_once_keeps_its_place() -> None:
    peering, nodes = PeerDiscovery(ask), {name: Fake(f"{name}:1") for name in "ab"}
    turn(peering, nodes)
    nodes["b"].deaf = True
    turn(peering, nodes)
    assert nodes["a"].follows == ["b:1"]


def test_a_node_that_never_answered_is_followed_by_nobody() -> None:
    nodes = {name: Fake(f"{name}:1") for name in "ab"}
    nodes["b"].deaf = True
    turn(PeerDiscovery(ask), nodes)
    assert (nodes["a"].follows, nodes["b"].follows) == ([], None)


# A manager


class Remote:
    """A method of an actor."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def remote(self, *_: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def manager(nodes: Mapping[str, Any], **settings: Any) -> StoreNodeManager:
    """One that has these nodes, without Ray."""
    made = StoreNodeManager.__new__(StoreNodeManager)
    made.failures, made.nodes, made.settings = Counter(), dict(nodes), settings
    return made


def test_what_a_manager_asks_in_vain_is_counted_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = SimpleNamespace(administer=Remote(ValueError("secret: is not set")))
    one = manager({"a": node})
    for _ in range(3):
        [answer] = asyncio.run(one.administer("stats"))
        assert "error" in answer
    assert one.failures == {"administer_ValueError": 3}
    assert [record.message for record in caplog.records] == [
        "a store node's administer failed: secret: is not set"
    ]


def test_a_manager_takes_over_the_secret_of_the_nodes_there_are_or_makes_one() -> None:
    known = {"a": SimpleNamespace(secret=Remote(None)), "b": SimpleNamespace(secret=Remote("old"))}
    for nodes, given, expected in ((known, None, "old"), (known, "given", "given")):
        one = manager(nodes, **({} if given is None else {"secret": given}))
        asyncio.run(one.agree_on_secret())
        assert one.settings["secret"] == expected
    first, second = manager({}), manager({})
    for one in (first, second):
        asyncio.run(one.agree_on_secret())
    assert len(first.settings["secret"]) == 64
    assert first.settings["secret"] != second.settings["secret"]


async def test_a_manager_looks_again_after_a_look_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(managing, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(managing.ray, "nodes", lambda: [{"NodeID": "a", "Alive": True}])
    one = manager({"a": SimpleNamespace(stats=Remote(RayActorError()))})
    one.down_reasons, one._observe, one._peer_discovery = {}, None, None
    made: list[str] = []

    def make(machine: str) -> Any:
        made.append(machine)
        if len(made) == 1:
            raise RuntimeError("no such runtime environment")
        return SimpleNamespace(stats=Remote({}))

    one.start_node = make  # type: ignore[method-assign]
    task = asyncio.create_task(one.check_loop())
    while len(made) < 2 or one.down_reasons:
        await asyncio.sleep(0.01)
    task.cancel()
    assert "checking the store nodes failed" in caplog.text


# A node that begins to grant leases


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[StoreNode]]:
    """Two that grant no lease yet."""
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made.append(StoreNode(settings(tmp_path / name, nvme_folder=None)).start())
    yield made
    for node in made:
        node.close()


def address(node: StoreNode) -> str | None:
    """Where it grants leases."""
    return None if node.tiers.peer_service is None else node.tiers.peer_service.address


def peers(node: StoreNode) -> dict[str, str]:
    """Each one's state."""
    return {
        name: peer["state"] for name, peer in node.operations.stats()["remote"]["peers"].items()
    }


@pytest.mark.parametrize("host", HOSTS)
def test_a_managers_node_tells_where_other_machines_reach_it(
    nodes: list[StoreNode], host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: host)
    told = []
    for node in nodes:
        actor = object.__new__(StoreNodeActor)
        actor._node = node
        told.append(actor.serve_peers())
    assert [split_host_port(each)[0] for each in told] == [host, host]
    nodes[0].set_peers(told)
    until(lambda: peers(nodes[0]).get(told[1]) == "up")


def test_a_node_at_all_addresses_is_reached_at_its_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "fd00::7")
    actor = object.__new__(StoreNodeActor)
    for bound in ("[::]:7611", "0.0.0.0:7611"):
        actor._node = SimpleNamespace(serve_peers=lambda _, bound=bound: bound)  # type: ignore[assignment]
        assert actor.serve_peers() == "[fd00::7]:7611"


def test_nodes_lease_to_each_other_once_they_are_told_to(nodes: list[StoreNode]) -> None:
    one, two = nodes
    assert address(one) is None and one.operations.stats()["events"] == {}
    one.set_peers(["127.0.0.1:1"])
    assert peers(one) == {}, "nobody to pull from before it listens itself"
    addresses = [node.serve_peers("127.0.0.1:0") for node in nodes]
    assert [node.serve_peers("127.0.0.1:0") for node in nodes] == addresses, "once"
    one.set_peers(addresses[1:])
    two.set_peers(addresses[:1])
    engine = Engine(one.settings)
    engine.put(0, 1)
    until(lambda: two.operations.stats()["remote"]["peers"][addresses[0]]["blocks"]["DRAM"] == 2)
    until(lambda: peers(one) == {addresses[1]: "up"})
    reader = Engine(two.settings)
    [told] = two.operations.find_available(DIGEST, keys(0, 1, 2), 1.0)
    assert (told.medium, told.length) == ("remote", 2) and 0 < told.wait_s < 1
    assert two.operations.find_available(DIGEST, keys(0, 1, 2), 1e-9) == [], "computing is faster"
    assert two.operations.stats()["remote"]["pulls"] == 0
    reader.close()
    one.set_peers([])
    assert peers(one) == {}
    engine.close()


def test_peers_of_the_settings_stay(tmp_path: Path) -> None:
    node = StoreNode(settings(tmp_path, nvme_folder=None, peers=("127.0.0.1:1",))).start()
    node.set_peers(["127.0.0.1:2"])
    assert set(peers(node)) == {"127.0.0.1:1", "127.0.0.1:2"}
    node.set_peers([])
    assert set(peers(node)) == {"127.0.0.1:1"}
    node.close()


def test_an_address_that_is_not_this_machine_s_is_told_and_changes_nothing(
    nodes: list[StoreNode],
) -> None:
    with pytest.raises(zmq.ZMQError):
        nodes[0].serve_peers("192.0.2.1:0")
    assert "cannot listen at 192.0.2.1:0" in nodes[0].operations.stats()["remote"]["reason"]
    assert address(nodes[0]) is None
    nodes[0].serve_peers("127.0.0.1:0")
    assert "cannot" not in nodes[0].operations.stats()["remote"]["reason"]


def test_a_closed_node_lends_nothing(nodes: list[StoreNode]) -> None:
    nodes[0].close()
    with pytest.raises(RuntimeError, match="closed"):
        nodes[0].serve_peers("127.0.0.1:0")
