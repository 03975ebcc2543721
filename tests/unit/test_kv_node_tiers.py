"""Asking the node for what is not in DRAM."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from headrace_engine.connector import node_tiers
from headrace_engine.connector.node_tiers import FORGOTTEN_AT, NodeTiers
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.nvme.record import BlockShape
from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import NodeUnavailable
from headrace_kvstore.settings.store_settings import StoreSettings
from tests.support.kvnode import settings, until

DIGEST, HASH = b"d" * 16, b"h" * 32
PLACE = Location("/kv/1", 1, 0, BlockShape(DIGEST, 1, 4096), HASH, np.zeros(1, np.uint64))


class Client:
    """Answers when the test says so."""

    def __init__(self, name: str, timeout_s: float, socket_folder: Path | None) -> None:
        self.timeout_s = timeout_s
        self.asked: list[tuple[wire.Locate, Future[wire.Reply]]] = []

    def ask(self, request: wire.Locate) -> Future[wire.Reply]:
        self.asked.append((request, Future()))
        return self.asked[-1][1]


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> NodeTiers:
    monkeypatch.setattr(node_tiers, "NodeClient", Client)
    return NodeTiers(StoreSettings(node_timeout_s=2.0, lease_s=3600), DIGEST)


def client(tiers: NodeTiers) -> Client:
    assert isinstance(tiers._client, Client)
    return tiers._client


def test_the_node_is_given_the_time_of_the_settings_and_no_lease_that_it_refuses(
    tiers: NodeTiers,
) -> None:
    tiers.ask("r", [HASH], 0.1)
    [(request, _)] = client(tiers).asked
    assert client(tiers).timeout_s == 2.0
    assert request == wire.Locate("r", DIGEST, [HASH], wire.MAX_LEASE_S, 0.1)


def test_the_answer_is_awaited_and_given_once(tiers: NodeTiers) -> None:
    tiers.ask("r", [HASH], 0.1)
    assert tiers.answer("r") is None
    client(tiers).asked[0][1].set_result(wire.pack_locations([PLACE]))
    found = tiers.answer("r")
    assert found is not None and [place.hash for place in found] == [HASH]
    assert tiers.answer("r") == []


@pytest.mark.parametrize(
    "reply",
    [
        NodeUnavailable("away"),
        wire.Failed("busy"),
        wire.Located(1, 4096, [wire.Place("/kv/0", 0, 0, b"")]),
    ],
)
def test_any_other_answer_is_nothing(tiers: NodeTiers, reply: wire.Reply | NodeUnavailable) -> None:
    tiers.ask("r", [HASH], 0.1)
    future = client(tiers).asked[0][1]
    if isinstance(reply, NodeUnavailable):
        future.set_exception(reply)
    else:
        future.set_result(reply)
    assert tiers.answer("r") == []


def test_a_question_that_had_to_be_forgotten_is_answered_with_nothing(tiers: NodeTiers) -> None:
    for number in range(FORGOTTEN_AT + 1):
        tiers.ask(f"r{number}", [HASH], 0.1)
    assert tiers.answer("r0") == [] and tiers.answer("r1") is None


def away(late: bool = False) -> NodeUnavailable:
    error = NodeUnavailable("ipc:///tmp/headrace-kv-n.sock: nobody listens")
    error.late = late
    return error


def answered(tiers: NodeTiers, reply: wire.Reply | NodeUnavailable) -> None:
    tiers.ask("r", [HASH, HASH], 0.1)
    future = client(tiers).asked[-1][1]
    if isinstance(reply, NodeUnavailable):
        future.set_exception(reply)
    else:
        future.set_result(reply)
    tiers.answer("r")


def test_an_engine_without_its_node_says_so_once_and_counts_it(
    tiers: NodeTiers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "headrace.kvstore")
    answered(tiers, away(late=True))
    assert tiers.unanswered == 2 and not caplog.messages, "one late answer is no news"
    for _ in range(3):
        answered(tiers, away())
    assert tiers.unanswered == 8
    [said] = caplog.messages
    assert "headrace-kv-n.sock" in said and "node: false" in said and "socket_folder" in said
    caplog.clear()
    for _ in range(2):
        answered(tiers, wire.pack_locations([PLACE]))
    [said] = caplog.messages
    assert "answers again" in said and tiers.unanswered == 8
    caplog.clear()
    answered(tiers, wire.Failed("protocol 4 is spoken, not 5"))
    assert "protocol 4" in caplog.messages[0]


def test_which_of_some_blocks_are_held_is_answered_once(tiers: NodeTiers) -> None:
    names = [bytes([n]) * 32 for n in range(1, 4)]
    tiers.find_held("r", names)
    assert tiers.held("r") is None
    [(request, asked)] = client(tiers).asked
    assert request == wire.FindHeld(DIGEST, names)
    asked.set_result(wire.HeldBlocks([0, 2, 7]))
    assert tiers.held("r") == {names[0], names[2]}, "a position outside of the question is nothing"
    assert tiers.held("r") == frozenset() and tiers.unanswered == 0


@pytest.mark.parametrize("reply", [NodeUnavailable("away"), wire.Failed("busy"), wire.Done(1)])
def test_without_such_an_answer_none_is_held(
    tiers: NodeTiers, reply: wire.Reply | NodeUnavailable
) -> None:
    tiers.find_held("r", [HASH])
    future = client(tiers).asked[0][1]
    if isinstance(reply, NodeUnavailable):
        future.set_exception(reply)
    else:
        future.set_result(reply)
    assert tiers.held("r") == frozenset() and tiers.unanswered == 1


def test_old_questions_are_dropped(tiers: NodeTiers) -> None:
    for number in range(FORGOTTEN_AT + 1):
        tiers.find_held(str(number), [HASH])
    assert tiers.held("0") == frozenset() and tiers.held("1") is None


def test_engine_and_node_meet_where_the_settings_say(tmp_path: Path) -> None:
    (tmp_path / "sockets").mkdir()
    node = StoreNode(
        settings(tmp_path, socket_folder=tmp_path / "sockets", nvme_folder=None)
    ).start()
    engine = StoreSettings(name="arena", socket_folder=tmp_path / "sockets", node_timeout_s=5.0)
    tiers = NodeTiers(engine, DIGEST)
    tiers.ask("r", [HASH], 0.1)
    until(lambda: tiers.answer("r") is not None)
    assert tiers.unanswered == 0
    tiers.close()
    node.close()
