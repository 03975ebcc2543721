"""A stranger at a node's port, and a peer that does what no peer does: neither reads KV, stops a
node, or has a wrong block accepted."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from headrace_kvstore.blocks.checksum import payload_sums
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.peers.block_tags import TAG_BYTES
from headrace_kvstore.peers.messages import (
    GetTags,
    HandshakeRequest,
    HandshakeResponse,
    Lease,
    Leased,
    PollRequest,
    PollResponse,
    Release,
    decode_reply,
)
from headrace_kvstore.peers.nixl_agent import NixlAgent
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import Client, NodeUnavailable
from headrace_kvstore.protocol.membership import Membership
from headrace_kvstore.protocol.server import SLOW_AT_ONCE
from tests.support.kvnode import DIGEST, SECRET, SHAPE, Engine, keys, settings, until
from tests.support.kvsums import forge

PATIENT_S = 60.0


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[StoreNode]:
    """A node that leases blocks 0 to 9."""
    (tmp_path / "owner").mkdir()
    node = StoreNode(settings(tmp_path / "owner", nvme_folder=None, listen="127.0.0.1:0")).start()
    engine = Engine(node.settings)
    engine.put(*range(10))
    yield node
    engine.close()
    assert node.close()


def address(node: StoreNode) -> str:
    assert node.tiers.peer_service is not None and node.tiers.peer_service.address is not None
    return node.tiers.peer_service.address


def client(node: StoreNode, secret: str = SECRET, timeout_s: float = PATIENT_S) -> Client:
    members = Membership(secret)
    return Client(f"tcp://{address(node)}", decode_reply, members.enter, timeout_s, 0.05)


@pytest.fixture
def member(owner: StoreNode) -> Iterator[Client]:
    one = client(owner)
    yield one
    one.close()


def lease(generation: str, *numbers: int) -> Lease:
    return Lease(generation, DIGEST, SHAPE.layers, SHAPE.layer_bytes, keys(*numbers), 30.0)


# Strangers


def test_a_peer_with_another_secret_gets_no_answer_and_a_member_does(
    owner: StoreNode, member: Client
) -> None:
    stranger = client(owner, "another app's secret", 1.0)
    for request in (HandshakeRequest(), PollRequest("", 0, 0, 1000), lease("g", 0)):
        with pytest.raises(NodeUnavailable):
            stranger.ask(request).result(PATIENT_S)
    stranger.close()
    assert isinstance(member.ask(HandshakeRequest()).result(PATIENT_S), HandshakeResponse)


@pytest.mark.parametrize("curve", ["none", "own keys", "the members' server key only"])
def test_a_peer_without_the_secret_gets_not_a_byte_of_an_answer(
    owner: StoreNode, member: Client, curve: str
) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    if curve != "none":
        public, private = zmq.curve_keypair()
        known = Membership(SECRET)._public if curve.startswith("the") else public
        socket.setsockopt(zmq.CURVE_SERVERKEY, known)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, private)
    socket.connect(f"tcp://{address(owner)}")
    for _ in range(5):
        socket.send(wire.encode(1, HandshakeRequest()))
    assert isinstance(member.ask(HandshakeRequest()).result(PATIENT_S), HandshakeResponse)
    assert not socket.poll(500)
    context.destroy(0)


def test_a_node_follows_no_owner_that_does_not_know_the_secret(
    owner: StoreNode, tmp_path: Path
) -> None:
    (tmp_path / "reader").mkdir()
    given = settings(
        tmp_path / "reader",
        nvme_folder=None,
        secret="of another app altogether",
        peers=(address(owner),),
    )
    reader = StoreNode(given).start()
    [peer] = reader.operations.stats()["remote"]["peers"].values()
    assert peer["state"] == "down" and peer["blocks"]["DRAM"] == 0
    assert reader.close()


def test_a_node_without_a_secret_lends_to_nobody(tmp_path: Path) -> None:
    node = StoreNode(settings(tmp_path, nvme_folder=None, secret=None)).start()
    with pytest.raises(ValueError, match="secret"):
        node.serve_peers("127.0.0.1:0")
    assert node.close()


# Members that misbehave


def test_frames_that_say_nothing_are_answered_and_the_node_goes_on(
    owner: StoreNode, member: Client
) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    Membership(SECRET).enter(socket)
    socket.connect(f"tcp://{address(owner)}")
    rng = random.Random(0)
    whole = wire.encode(5, lease("g", 0, 1, 2))
    for number in range(300):
        frame = bytearray(whole if number % 2 else rng.randbytes(rng.randrange(200)))
        for _ in range(number % 5):
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        socket.send(bytes(frame))
        if number % 10 == 0:
            socket.send_multipart([b"more", b"than", b"one"])
    assert isinstance(member.ask(HandshakeRequest()).result(PATIENT_S), HandshakeResponse)
    context.destroy(0)


def test_a_message_that_is_too_long_ends_its_line_only(owner: StoreNode, member: Client) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    Membership(SECRET).enter(socket)
    socket.connect(f"tcp://{address(owner)}")
    socket.send(bytes(wire.MAX_REQUEST_BYTES + 1))
    assert not socket.poll(300)
    assert isinstance(member.ask(HandshakeRequest()).result(PATIENT_S), HandshakeResponse)
    context.destroy(0)


def test_as_many_slow_requests_as_may_wait_make_no_greeting_wait(
    owner: StoreNode, member: Client
) -> None:
    dram = owner.tiers.dram
    assert dram is not None and dram.remote is not None
    stuck: list[Future[Leased]] = []

    def serve_peers(_: Lease) -> Future[Leased]:
        stuck.append(Future())
        return stuck[-1]

    dram.remote.lease_server.lease = serve_peers  # type: ignore[method-assign,assignment]
    asked = [member.ask(lease("g", 0)) for _ in range(SLOW_AT_ONCE + 5)]
    until(lambda: sum(each.done() for each in asked) == 5)
    assert {each.result().reason for each in asked if each.done()} == {"the node is busy"}
    assert isinstance(member.ask(HandshakeRequest()).result(PATIENT_S), HandshakeResponse)
    assert isinstance(member.ask(PollRequest("", 0, 0, 1000)).result(PATIENT_S), PollResponse)
    for each in stuck:
        each.set_result(Leased())


def test_a_state_larger_than_a_message_comes_in_pages(owner: StoreNode, member: Client) -> None:
    publisher = owner._events.publisher
    assert publisher is not None
    until(lambda: publisher.log.next_seq > 1)
    for number in range(20):
        publisher.log.add(bytes([number]) * 1000)
    first = publisher.log.next_seq - 20
    at, pages = first, 0
    while True:
        news = member.ask(PollRequest("", 0, at, 3500)).result(PATIENT_S)
        assert news.first == at and len(news.batches) <= 3
        at, pages = at + len(news.batches), pages + 1
        if at == news.next:
            break
    assert pages == 7


# Memory


@contextmanager
def reader_of(owner: StoreNode, folder: Path) -> Iterator[StoreNode]:
    """Another node, which pulls from that one."""
    (folder / "reader").mkdir()
    given = settings(
        *(folder / "reader",),
        nvme_folder=None,
        peers=(address(owner),),
        pull_limit_s=30.0,
        peer_lease_s=60.0,
    )
    reader = StoreNode(given).start()
    Engine(given).close()
    yield reader
    assert reader.close()


def pulled(reader: StoreNode, blocks: int) -> None:
    """Have blocks 0 to 3 pulled; so many must come."""

    def came() -> bool:
        pulling = reader.operations.pull(DIGEST, keys(*range(4)))
        return pulling is not None and pulling.done.result(PATIENT_S) == blocks

    until(came, PATIENT_S)


def test_a_peer_that_writes_reaches_no_table_and_a_block_that_it_spoilt_is_a_miss(
    owner: StoreNode, member: Client, tmp_path: Path
) -> None:
    """Everything that NIXL lets a member do with the metadata that it is given."""
    dram = owner.tiers.dram
    assert dram is not None
    handshake = member.ask(HandshakeRequest()).result(PATIENT_S)
    leased = member.ask(lease(handshake.generation, *range(4))).result(PATIENT_S)
    assert len(leased.rows) == 4

    memory = np.full(2 * SHAPE.payload_bytes, 0xEE, np.uint8)
    agent = NixlAgent(int(memory.ctypes.data), memory.size)
    name = agent.connect(handshake.agent).result(PATIENT_S)
    arena = dram.arena
    tables = arena.memory[: arena.geometry.data_offset].copy()
    for offset in (0, 512, 4096, arena.geometry.data_offset - 4096):
        with pytest.raises(Exception):  # noqa: B017  # NIXL's own
            _write(agent, name, memory, arena.base_address + offset, 4096)
    words = slice(0, 512)
    assert (arena.memory[words] == tables[words]).all()

    spoilt = leased.rows[1].address
    _write(agent, name, memory, spoilt, 4096)
    at = spoilt - arena.base_address
    until(lambda: bool((arena.memory[at : at + 4096] == 0xEE).all()), PATIENT_S)

    with reader_of(owner, tmp_path) as reader:
        pulled(reader, 3)
        engine = Engine(reader.settings)
        assert engine.has(*range(4)) == [True, False, True, True]
        engine.close()
    until(lambda: owner.operations.stats()["remote"]["lease_server"].get("corrupt_here") == 1)
    member.send(Release(leased.lease))
    assert agent.close(PATIENT_S)


def test_a_block_whose_sum_was_kept_while_its_bytes_were_changed_is_a_miss(
    owner: StoreNode, member: Client, tmp_path: Path
) -> None:
    """A member leases a block, and writes bytes of the same public sum before another one reads."""
    dram = owner.tiers.dram
    assert dram is not None
    arena = dram.arena
    handshake = member.ask(HandshakeRequest()).result(PATIENT_S)
    leased = member.ask(lease(handshake.generation, *range(4))).result(PATIENT_S)
    tags = member.ask(GetTags(leased.lease)).result(PATIENT_S)
    assert len(tags.tags) == 4 * TAG_BYTES

    spoilt = leased.rows[1].address
    at = spoilt - arena.base_address
    memory = arena.memory[at : at + SHAPE.payload_bytes].copy()
    row, slots = arena.find_namespace(DIGEST), arena.lookup(0, keys(1))
    forge(memory)
    agent = NixlAgent(int(memory.ctypes.data), memory.size)
    name = agent.connect(handshake.agent).result(PATIENT_S)
    _write(agent, name, memory, spoilt, memory.size)
    until(lambda: bool((arena.memory[at : at + len(memory)] == memory).all()), PATIENT_S)
    layers = spoilt + np.arange(SHAPE.layers) * SHAPE.layer_bytes
    sums = payload_sums(DIGEST, keys(1)[0], 0, layers, SHAPE.layer_bytes)
    assert row == 0 and (sums == arena.sums(slots)[0]).all(), "the public sums must not tell"
    with pytest.raises(Exception):  # noqa: B017  # NIXL's own
        _write(agent, name, memory, int(arena.tables.sums.ctypes.data), 8)

    with reader_of(owner, tmp_path) as reader:
        pulled(reader, 3)
        engine = Engine(reader.settings)
        assert engine.has(*range(4)) == [True, False, True, True]
        engine.close()
    until(lambda: owner.operations.stats()["remote"]["lease_server"].get("corrupt_here") == 1)
    assert agent.close(PATIENT_S)


def _write(agent: NixlAgent, peer: str, memory: np.ndarray, to: int, length: int) -> None:
    """Write into a peer's memory with NIXL alone."""
    nixl: Any = agent._agent

    def pieces(address: int) -> Any:
        row = np.array([[address, length, 0]], np.uint64)
        return nixl.get_xfer_descs(row, mem_type="DRAM")

    handle = nixl.initialize_xfer("WRITE", pieces(memory.ctypes.data), pieces(to), peer)
    state = nixl.transfer(handle)
    while state not in ("DONE", "ERR"):
        os.sched_yield()
        state = nixl.check_xfer_state(handle)
    handle.release()
    assert state == "DONE"
