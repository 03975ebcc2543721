"""A node's messages and sockets, and a client that never waits for them."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import MAX_WAITING, NodeClient, NodeUnavailable, call
from headrace_kvstore.protocol.server import NodeAlreadyRunning, NodeServer, StagedReply
from headrace_kvstore.settings.node_settings import NodeSettings
from headrace_kvstore.settings.store_settings import SettingsError
from tests.support.kvnode import DIGEST, SHAPE, answers, key, keys, locate, until

RETRY_S = 0.05
PATIENT_S = 5.0
"""For tests in which a node does answer, on a machine that may be busy."""


def places(count: int) -> list[Location]:
    """Locations of blocks 0 to `count` - 1, three to a file."""
    return [
        Location(
            f"/kv/{i // 3}", i // 3, i % 3, SHAPE, key(i), np.arange(i, i + 4, dtype=np.uint64)
        )
        for i in range(count)
    ]


def bad(number: int) -> wire.BadBlock:
    """The report of a block that a reader could not use."""
    return wire.BadBlock(key(number), "/kv/0", number)


class Node:
    """A node's server that locates everything, or answers what it is told to."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[wire.Request] = []
        self.answers = threading.Event()
        self.answers.set()
        self.pulls: list[Future[wire.Reply]] = []
        self.wait_s = 0.0
        """How long the node says a pull is worth waiting for; 0: it pulls nothing."""
        self.server = NodeServer(wire.socket_path("arena", folder), self.handle)

    def handle(self, request: wire.Request) -> wire.Reply | Future[wire.Reply] | StagedReply:
        self.seen.append(request)
        if isinstance(request, wire.Locate):
            if not self.answers.is_set():
                return Future()
            if self.wait_s:
                self.pulls.append(Future())
                now = wire.pack_locations(places(1))
                now.pulling, now.wait_s = len(request.hashes) - 1, self.wait_s
                return StagedReply(now, self.pulls[-1])
            return wire.pack_locations(places(len(request.hashes)))
        if isinstance(request, wire.GetStats):
            return wire.Stats({})
        if isinstance(request, wire.Lookup):
            raise RuntimeError("no lookups today")
        return wire.Done(1)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.server.close()


@pytest.fixture
def client(tmp_path: Path, node: Node) -> Iterator[NodeClient]:
    client = NodeClient("arena", timeout_s=PATIENT_S, retry_s=RETRY_S, socket_folder=tmp_path)
    until(lambda: answers(client))
    yield client
    client.close()


# Messages


@pytest.mark.parametrize(
    "request_",
    [
        wire.Locate("r-1", DIGEST, keys(0, 1), 30.0),
        wire.Lookup(DIGEST, keys(0, 1), 0.5),
        wire.FindHeld(DIGEST, keys(0, 1)),
        wire.ReportBad(DIGEST, [bad(3)]),
        wire.GetStats(),
    ],
)
def test_requests_come_out_as_they_went_in(request_: wire.Request) -> None:
    assert wire.decode_request(wire.encode(7, request_)) == (7, request_)


@pytest.mark.parametrize(
    "reply",
    [
        wire.Done(3),
        wire.Failed("no"),
        wire.Stats({"a": [1, None]}),
        wire.LookupReply([("nvme", 3, 0.0), ("remote", 1, 0.5)]),
        wire.HeldBlocks([0, 2]),
        wire.pack_locations(places(5)),
    ],
)
def test_replies_come_out_as_they_went_in(reply: wire.Reply) -> None:
    assert wire.decode_reply(wire.encode(7, reply)) == (7, reply)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_locations_come_out_as_they_went_in(count: int) -> None:
    sent = places(count)
    got = wire.unpack_locations(wire.pack_locations(sent), DIGEST, keys(*range(10)))
    for one, other in zip(sent, got, strict=True):
        assert (one.sums == other.sums).all()
        assert (one.path, one.segment, one.slot, one.shape, one.hash) == (
            *(other.path, other.segment, other.slot, other.shape, other.hash),
        )


def test_locations_that_make_no_sense_are_refused() -> None:
    good = wire.pack_locations(places(2))
    for bad in (
        wire.Located(good.layers + 1, good.layer_bytes, good.places),
        wire.Located(good.layers, good.layer_bytes, [wire.Place("/kv/0", 0, 0, b"short")]),
        wire.Located(0, good.layer_bytes, good.places),
    ):
        with pytest.raises(wire.WireError):
            wire.unpack_locations(bad, DIGEST, keys(0, 1))
    with pytest.raises(wire.WireError):
        wire.unpack_locations(good, DIGEST, keys(0))


def test_another_version_and_impossible_fields_are_refused_under_the_request_s_id() -> None:
    pack = msgspec.msgpack.encode
    for frame in (
        pack((wire.PROTOCOL + 1, 9, ["getstats"])),
        pack((wire.PROTOCOL, 9, ["no such thing"])),
        pack((wire.PROTOCOL, 9, ["locate", "r", b"short", [], 1.0])),
        pack((wire.PROTOCOL, 9, ["locate", "r", DIGEST, [b"x" * 33], 1.0])),
        pack((wire.PROTOCOL, 9, ["locate", "r", DIGEST, [], -1.0])),
        pack((wire.PROTOCOL, 9, 5)),
    ):
        with pytest.raises(wire.WireError) as error:
            wire.decode_request(frame)
        assert error.value.id == 9


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(frame: bytes) -> None:
    for decode in (wire.decode_request, wire.decode_reply):
        with suppress(wire.WireError):  # any other error fails the test
            assert isinstance(decode(frame)[0], int)


@given(st.binary(min_size=1, max_size=4), st.data())
def test_a_changed_message_is_a_message_or_refused(patch: bytes, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(7, wire.Locate("r-1", DIGEST, keys(0, 1), 30.0)))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at : at + len(patch)] = patch
    with suppress(wire.WireError):  # any other error fails the test
        assert isinstance(wire.decode_request(bytes(frame))[0], int)


# Where they meet


def test_long_names_stand_as_their_hash_and_stay_apart(tmp_path: Path) -> None:
    short, long, other = (wire.socket_path(n) for n in ("a", "a" * 200, "a" * 199 + "b"))
    assert short.name == "headrace-kv-a.sock"
    assert len({short, long, other}) == 3
    assert max(len(os.fsencode(path)) for path in (short, long, other)) <= wire.MAX_PATH_BYTES
    with pytest.raises(ValueError, match="107 bytes"):
        wire.socket_path("a", "/" + "f" * 100)


def test_the_socket_is_its_owner_s_alone_and_leaves_with_the_node(
    node: Node, tmp_path: Path
) -> None:
    path = wire.socket_path("arena", tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.with_suffix(".lock").stat().st_mode) == 0o600
    node.server.close()
    assert os.listdir(tmp_path) == []
    node.server = NodeServer(path, node.handle)


def test_a_living_node_s_socket_is_not_taken(node: Node, tmp_path: Path) -> None:
    with pytest.raises(NodeAlreadyRunning):
        Node(tmp_path)
    assert call("arena", wire.ReportBad(DIGEST, [bad(0)]), socket_folder=tmp_path) == wire.Done(1)


def test_what_cannot_be_read_is_answered_and_harms_nobody(node: Node, tmp_path: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{wire.socket_path('arena', tmp_path)}")
    deep = b"\x93\x01\x09" + b"\x91" * 10_000
    for frames in ([b""], [deep], [b"a", b"b"], [msgspec.msgpack.encode((99, 5, None))]):
        socket.send_multipart(frames)
        assert socket.poll(5000)
        assert isinstance(wire.decode_reply(socket.recv())[1], wire.Failed)
    context.destroy(0)
    assert call("arena", wire.ReportBad(DIGEST, [bad(0)]), socket_folder=tmp_path) == wire.Done(1)
    assert node.server.counts["malformed"] == 4


def test_a_handler_that_raises_is_answered(node: Node, tmp_path: Path) -> None:
    reply = call("arena", wire.Lookup(DIGEST, keys(0), 0.5), socket_folder=tmp_path)
    assert isinstance(reply, wire.Failed) and "no lookups today" in reply.reason


# The client


def asked(client: NodeClient, key: str, *numbers: int) -> Future[wire.Reply]:
    return client.ask(wire.Locate(key, DIGEST, keys(*numbers), 30.0))


def test_a_future_brings_the_answer(client: NodeClient) -> None:
    assert [place.hash for place in locate(client, 0, 1, 2)] == keys(0, 1, 2)


def test_while_a_peer_s_blocks_are_pulled_the_answer_waits_for_them(
    node: Node, client: NodeClient
) -> None:
    node.wait_s = PATIENT_S
    first = asked(client, "r-1", 0, 1, 2)
    until(lambda: bool(node.pulls))
    assert node.seen[-1] == wire.Locate("r-1", DIGEST, keys(0, 1, 2), 30.0)
    node.wait_s = 0.0
    assert isinstance(asked(client, "r-2", 0).result(PATIENT_S), wire.Located)
    assert not first.done()
    node.pulls[0].set_result(wire.pack_locations(places(1)))
    assert first.result(PATIENT_S) == wire.pack_locations(places(1))


def test_a_pull_that_is_not_worth_waiting_for_any_more_costs_the_pull_only(
    node: Node, client: NodeClient
) -> None:
    node.wait_s = 0.05
    assert [place.hash for place in locate(client, 0, 1, 2)] == keys(0)
    assert client.stats()["late"] == 1 and not client.stats()["away"]
    node.pulls[0].set_result(wire.pack_locations(places(1)))
    node.wait_s = 0.0
    assert len(locate(client, 0)) == 1


def test_a_node_that_dies_during_a_pull_is_answered_for(node: Node, client: NodeClient) -> None:
    node.wait_s = PATIENT_S
    pulled = asked(client, "r-1", 0, 1)
    until(lambda: bool(node.pulls) and client.stats()["asked"] == 1)
    until(lambda: next(iter(client._pending.values())).found is not None)
    client.close()
    located = pulled.result(PATIENT_S)
    assert isinstance(located, wire.Located) and len(located.places) == 1


def test_as_many_questions_at_once_as_may_wait_are_answered(client: NodeClient) -> None:
    """Again and again: ZeroMQ counts what it has sent until the other side reports back."""
    for _ in range(4):
        waiting = [client.ask(wire.GetStats()) for _ in range(MAX_WAITING)]
        assert all(isinstance(one.result(PATIENT_S), wire.Stats) for one in waiting)


def test_no_reply_to_a_client_that_reads_late_is_lost(node: Node, tmp_path: Path) -> None:
    """As an engine on a busy core that asks for many prompts at once."""
    count, question = 400, wire.Locate("r", DIGEST, keys(*range(60)), 30.0)
    context = zmq.Context()
    late = context.socket(zmq.DEALER)
    late.setsockopt(zmq.LINGER, 0)
    late.setsockopt(zmq.RCVHWM, 1)
    late.setsockopt(zmq.RCVTIMEO, int(1e3 * PATIENT_S))
    late.connect(f"ipc://{node.server.path}")
    for number in range(1, count + 1):
        late.send(wire.encode(number, question))
    until(lambda: len(node.seen) == count)
    assert [wire.decode_reply(late.recv())[0] for _ in range(count)] == [*range(1, count + 1)]
    assert node.server.counts["unsent"] == 0
    context.destroy(0)


def test_without_a_node_every_question_is_answered_at_once(tmp_path: Path) -> None:
    client = NodeClient("arena", socket_folder=tmp_path, retry_s=60.0)
    with pytest.raises(NodeUnavailable):
        asked(client, "r-1", 0).result(PATIENT_S)
    assert not client.send(wire.ReportBad(DIGEST, [bad(0)]))
    request, begun = wire.Locate("r-2", DIGEST, keys(0), 30.0), time.thread_time()
    for _ in range(1000):
        assert client.ask(request).done()
    assert time.thread_time() - begun < 0.1  # 100 us each would be far too much
    client.close()
    assert isinstance(asked(client, "r-3", 0).exception(0), NodeUnavailable)


def test_a_node_that_comes_later_is_found(tmp_path: Path) -> None:
    client = NodeClient("arena", socket_folder=tmp_path, timeout_s=PATIENT_S, retry_s=RETRY_S)
    assert not answers(client)
    node = Node(tmp_path)
    until(lambda: answers(client))
    client.close()
    node.server.close()


def test_a_node_that_does_not_answer_costs_one_timeout(tmp_path: Path) -> None:
    node = Node(tmp_path)
    client = NodeClient("arena", socket_folder=tmp_path, timeout_s=PATIENT_S, retry_s=60.0)
    until(lambda: answers(client))
    node.answers.clear()
    client.timeout_s = 0.05
    both = [asked(client, "r-1", 0), asked(client, "r-2", 0)]
    assert all(isinstance(one.exception(PATIENT_S), NodeUnavailable) for one in both)
    assert asked(client, "r-3", 0).done() and client.stats()["timeouts"] == 1
    client.close()
    node.server.close()


def test_a_socket_without_a_node_costs_one_timeout(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(wire.socket_path("arena", tmp_path)))
    client = NodeClient("arena", socket_folder=tmp_path, timeout_s=0.05, retry_s=60.0)
    with pytest.raises(NodeUnavailable, match="nobody listens"):
        asked(client, "r-1", 0).result(PATIENT_S)
    client.close()


def test_a_node_that_was_restarted_is_found_again(
    client: NodeClient, node: Node, tmp_path: Path
) -> None:
    node.server.close()
    client.timeout_s = 0.05
    until(lambda: not answers(client))
    client.timeout_s = PATIENT_S
    node.server = Node(tmp_path).server
    until(lambda: answers(client))
    assert len(locate(client, 0)) == 1


def test_more_requests_than_may_wait_are_refused(
    node: Node, client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_kvstore.protocol.client.MAX_WAITING", 10)
    node.answers.clear()
    replies = [asked(client, "r", 0) for _ in range(15)]
    assert [reply.done() for reply in replies[10:]] == [True] * 5
    client.close()
    assert all(reply.done() for reply in replies)


def test_what_nobody_waits_for_is_not_answered(client: NodeClient, node: Node) -> None:
    node.seen.clear()
    told = [wire.ReportBad(DIGEST, [bad(1)]), wire.ReportBad(DIGEST, [bad(2)])]
    assert all(client.send(request) for request in told)
    assert locate(client) == []
    assert node.seen[:2] == told


def test_threads_may_share_a_client(client: NodeClient) -> None:
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: len(locate(client, 0)), range(60)))
    assert found == [1] * 60


# Settings


def test_settings_take_sizes_as_text_and_name_what_is_wrong() -> None:
    got = NodeSettings.parse({"dram_bytes": "1GiB", "nvme_folder": "/mnt/kv"})
    assert (got.dram_bytes, got.nvme_folder) == (2**30, Path("/mnt/kv"))
    for values, said in (
        ({"dram": 1}, "dram: is unknown"),
        ({"nvme_bytes": "much"}, "nvme_bytes: is 'much'"),
        ({"name": "a/b"}, "name: is 'a/b'"),
        ({"warm": "yes"}, "warm: is 'yes'"),
        ({"retry_s": 0}, "retry_s: is 0"),
        ({"events": "here"}, "events: is 'here'"),
        ({"layers": 0}, "layers: is 0"),
        ({"listen": "7611"}, "listen: is '7611'"),
        ({"secret": "too short"}, "secret: is 'too short': String should have at least 16"),
        ({"listen": "a:1"}, "listen: is 'a:1': give it with secret"),
        ({"peers": ["a:1"]}, "peers: is .*: give it with secret"),
        ({"peers": "a:1, b"}, "peers.1: is 'b': give HOST:PORT"),
        ({"peers": ["a:0"]}, "peers.0: is 'a:0': give HOST:PORT"),
        ({"peers": 5}, "peers: is 5"),
        ({"pull_limit_s": 20}, "peer_lease_s: is 20.0: give more than pull_limit_s"),
    ):
        with pytest.raises(SettingsError, match=said):
            NodeSettings.parse(values)


@pytest.mark.parametrize("given", ["a:1, [::1]:65535", ["a:1", "[::1]:65535"]])
def test_peers_are_a_list_or_text_with_commas(given: Any) -> None:
    known = {"secret": "s" * 16}
    assert NodeSettings.parse({"peers": given, **known}).peers == ("a:1", "[::1]:65535")
    assert NodeSettings.parse({"listen": "0.0.0.0:0", **known}).listen == "0.0.0.0:0"
