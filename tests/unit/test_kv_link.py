"""What a node makes of a peer's answers: whom it follows, what it forgets, when it asks again."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from headrace_kvstore.peers.directory import Directory
from headrace_kvstore.peers.link import LOOK_S, Link
from headrace_kvstore.peers.messages import Failed, Hello, Look, News, Welcome
from headrace_kvstore.protocol.board import Board, Note, Page
from headrace_kvstore.protocol.client import NodeAway
from headrace_kvstore.protocol.events import DRAM, AllBlocksCleared, Change, EventBatch, batches
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
        self.client, self.directory = Client(), Directory()
        self.board = Board(2**20, "own")
        client: Any = self.client
        self.link = Link(PEER, client, self.directory, self.board, lambda g: g == "me", 1.0)

    def turn(self, answer: Any = None) -> Any:
        """The next request, after this answer to the last one and the time between two."""
        if isinstance(answer, Exception):
            self.client.answer.set_exception(answer)
        elif answer is not None:
            self.client.answer.set_result(answer)
        self.now_s += LOOK_S
        self.link.turn(self.now_s)
        return self.client.asked[-1]

    @property
    def blocks(self) -> int:
        return self.directory.blocks(PEER, DRAM)


def told(*numbers: int) -> list[bytes]:
    """A whole state, as batches."""
    events = batches(Change(True, DRAM, DIGEST, name) for name in keys(*numbers))
    made = [[AllBlocksCleared()], *events]
    return [msgspec.msgpack.encode(EventBatch(0.0, each)) for each in made]  # type: ignore[arg-type]


def news(first: int, told: list[bytes], generation: str = "g", more: int = 0) -> News:
    return News(generation, Page("b", 0, 0, []), first, told, first + len(told) + more)


@pytest.fixture
def peer() -> Followed:
    """One that has been greeted."""
    made = Followed()
    assert made.turn() == Hello() and made.link.state == "down"
    assert made.turn(Welcome("g", b"agent")) == Look("", 0, 0, 2**20)
    assert made.link.state == "up"
    return made


def test_a_peer_is_greeted_and_then_asked_from_where_it_was_read_to(peer: Followed) -> None:
    page = Page("b", 7, 9, [Note(b"w", b"s", 1, b"note")])
    assert peer.turn(News("g", page, 5, told(0, 1), 7)) == Look("b", 7, 7, 2**20)
    assert peer.blocks == 2 and peer.board.head == 1
    assert peer.directory.leading(PEER, DIGEST, keys(0, 1, 2), (DRAM,)) == [DRAM, DRAM]


def test_one_question_waits_at_a_time_and_the_next_one_for_its_time(peer: Followed) -> None:
    asked = len(peer.client.asked)
    peer.turn()
    assert len(peer.client.asked) == asked, "it has not answered yet"
    peer.client.answer.set_result(news(0, told(0)))
    peer.link.turn(peer.now_s)
    asked = len(peer.client.asked)
    peer.link.turn(peer.now_s + LOOK_S / 2)
    assert len(peer.client.asked) == asked


def test_a_peer_that_has_more_is_asked_at_once(peer: Followed) -> None:
    peer.client.answer.set_result(news(0, told(0), more=3))
    asked = len(peer.client.asked)
    peer.link.turn(peer.now_s)
    assert peer.client.asked[asked:] == [Look("b", 0, 2, 2**20)]


@pytest.mark.parametrize(
    "answer",
    [
        NodeAway("gone"),
        Failed("there is no arena to lend from"),
        News("another", Page("b", 0, 0, []), 0, [], 0),
        Page("b", 0, 0, []),
    ],
)
def test_a_peer_that_does_not_answer_as_itself_is_forgotten_and_greeted_anew(
    peer: Followed, answer: Any
) -> None:
    peer.turn(news(0, told(0, 1)))
    assert peer.blocks == 2
    assert peer.turn(answer) == Hello()
    assert (peer.link.state, peer.blocks, peer.link.welcome) == ("down", 0, None)
    assert peer.turn(Welcome("g2", b"agent")) == Look("b", 0, 0, 2**20)


def test_a_peer_greeted_again_that_is_the_same_is_not_forgotten(peer: Followed) -> None:
    peer.turn(news(0, told(0, 1)))
    peer.link.lost()
    assert peer.turn(news(2, [])) == Hello()
    assert peer.turn(Welcome("g", b"agent")) == Look("b", 0, 2, 2**20)
    assert peer.blocks == 2
    peer.link.lost()
    peer.turn(news(2, []))
    assert peer.turn(Welcome("g2", b"agent")) == Look("b", 0, 0, 2**20)
    assert peer.blocks == 0


def test_a_node_does_not_follow_itself() -> None:
    made = Followed()
    made.turn()
    assert made.turn(Welcome("me", b"agent")) == Hello()
    assert made.link.reason == "is this node itself"


@pytest.mark.parametrize(
    "wrong", [[b"nonsense"], told(0)[1:], [*told(0), b"\xc1"]], ids=["bytes", "a gap", "half"]
)
def test_batches_without_sense_drop_what_is_known_and_it_is_told_anew(
    peer: Followed, wrong: list[bytes]
) -> None:
    assert peer.turn(news(3, wrong)) == Look("b", 0, 0, 2**20)
    assert peer.link.counts["unreadable"] == 1 and peer.blocks == 0
    peer.turn(news(0, told(0)))
    assert peer.blocks == 1
