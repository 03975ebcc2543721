"""What a node makes of a peer's answers: whom it follows, what it forgets, when it asks again."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from headrace_kvstore.peers.block_directory import BlockDirectory
from headrace_kvstore.peers.messages import (
    Failed,
    HandshakeRequest,
    HandshakeResponse,
    PollRequest,
    PollResponse,
)
from headrace_kvstore.peers.peer_link import POLL_INTERVAL_S, PeerLink
from headrace_kvstore.protocol.client import NodeUnavailable
from headrace_kvstore.protocol.events import DRAM, AllBlocksCleared, Change, EventBatch, batches
from headrace_kvstore.protocol.gossip_log import EntryPage, GossipEntry, GossipLog
from tests.support.kvnode import DIGEST, keys

PEER = "host:1"


class Client:
    """Answers when the test says what."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answer: Future[Any] = Future()

    def ask(self, request: Any, limit_s: float | None = None) -> Future[Any]:
        self.asked.append(request)
        self.answer = Future()
        return self.answer

    def close(self, wait: bool = True) -> None:
        pass


class Followed:
    """A link, its client, and the clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.client, self.directory = Client(), BlockDirectory()
        self.gossip_log = GossipLog(2**20, "own")
        client: Any = self.client
        self.link = PeerLink(
            PEER, client, self.directory, self.gossip_log, lambda g: g == "me", 1.0
        )

    def turn(self, answer: Any = None) -> Any:
        """The next request, after this answer to the last one and the time between two."""
        if isinstance(answer, Exception):
            self.client.answer.set_exception(answer)
        elif answer is not None:
            self.client.answer.set_result(answer)
        self.now_s += POLL_INTERVAL_S
        self.link.poll(self.now_s)
        return self.client.asked[-1]

    @property
    def blocks(self) -> int:
        return self.directory.blocks(PEER, DRAM)


def told(*numbers: int) -> list[bytes]:
    """A whole state, as batches."""
    events = batches(Change(True, DRAM, DIGEST, name) for name in keys(*numbers))
    made = [[AllBlocksCleared()], *events]
    return [msgspec.msgpack.encode(EventBatch(0.0, each)) for each in made]  # type: ignore[arg-type]


def news(first: int, told: list[bytes], generation: str = "g", more: int = 0) -> PollResponse:
    return PollResponse(generation, EntryPage("b", 0, 0, []), first, told, first + len(told) + more)


@pytest.fixture
def peer() -> Followed:
    """One that has been greeted."""
    made = Followed()
    assert made.turn() == HandshakeRequest() and made.link.state == "down"
    assert made.turn(HandshakeResponse("g", b"agent")) == PollRequest("", 0, 0, 2**20)
    assert made.link.state == "up"
    return made


def test_a_peer_is_greeted_and_then_asked_from_where_it_was_read_to(peer: Followed) -> None:
    page = EntryPage("b", 7, 9, [GossipEntry(b"w", b"s", 1, b"entry")])
    assert peer.turn(PollResponse("g", page, 5, told(0, 1), 7)) == PollRequest("b", 7, 7, 2**20)
    assert peer.blocks == 2 and peer.gossip_log.head == 1
    assert peer.directory.leading(PEER, DIGEST, keys(0, 1, 2), (DRAM,)) == [DRAM, DRAM]


def test_one_question_waits_at_a_time_and_the_next_one_for_its_time(peer: Followed) -> None:
    asked = len(peer.client.asked)
    peer.turn()
    assert len(peer.client.asked) == asked, "it has not answered yet"
    peer.client.answer.set_result(news(0, told(0)))
    peer.link.poll(peer.now_s)
    asked = len(peer.client.asked)
    peer.link.poll(peer.now_s + POLL_INTERVAL_S / 2)
    assert len(peer.client.asked) == asked


def test_a_peer_that_has_more_is_asked_at_once(peer: Followed) -> None:
    peer.client.answer.set_result(news(0, told(0), more=3))
    asked = len(peer.client.asked)
    peer.link.poll(peer.now_s)
    assert peer.client.asked[asked:] == [PollRequest("b", 0, 2, 2**20)]


@pytest.mark.parametrize(
    "answer",
    [
        NodeUnavailable("gone"),
        Failed("there is no arena to lease from"),
        PollResponse("another", EntryPage("b", 0, 0, []), 0, [], 0),
        EntryPage("b", 0, 0, []),
    ],
)
def test_a_peer_that_does_not_answer_as_itself_is_forgotten_and_greeted_anew(
    peer: Followed, answer: Any
) -> None:
    peer.turn(news(0, told(0, 1)))
    assert peer.blocks == 2
    assert peer.turn(answer) == HandshakeRequest()
    assert (peer.link.state, peer.blocks, peer.link.handshake) == ("down", 0, None)
    assert peer.turn(HandshakeResponse("g2", b"agent")) == PollRequest("b", 0, 0, 2**20)


def test_a_peer_greeted_again_that_is_the_same_is_not_forgotten(peer: Followed) -> None:
    peer.turn(news(0, told(0, 1)))
    peer.link.reconnect()
    assert peer.turn(news(2, [])) == HandshakeRequest()
    assert peer.turn(HandshakeResponse("g", b"agent")) == PollRequest("b", 0, 2, 2**20)
    assert peer.blocks == 2
    peer.link.reconnect()
    peer.turn(news(2, []))
    assert peer.turn(HandshakeResponse("g2", b"agent")) == PollRequest("b", 0, 0, 2**20)
    assert peer.blocks == 0


def test_a_node_does_not_follow_itself() -> None:
    made = Followed()
    made.turn()
    assert made.turn(HandshakeResponse("me", b"agent")) == HandshakeRequest()
    assert made.link.reason == "is this node itself"


@pytest.mark.parametrize(
    "wrong", [[b"nonsense"], told(0)[1:], [*told(0), b"\xc1"]], ids=["bytes", "a gap", "half"]
)
def test_batches_without_sense_drop_what_is_known_and_it_is_told_anew(
    peer: Followed, wrong: list[bytes]
) -> None:
    assert peer.turn(news(3, wrong)) == PollRequest("b", 0, 0, 2**20)
    assert peer.link.counts["unreadable"] == 1 and peer.blocks == 0
    peer.turn(news(0, told(0)))
    assert peer.blocks == 1
