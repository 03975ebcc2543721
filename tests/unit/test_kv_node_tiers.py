"""Asking the node for what is not in DRAM."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from headrace_kvstore.connector import node_tiers
from headrace_kvstore.connector.node_tiers import FORGOTTEN_AT, NodeTiers
from headrace_kvstore.nvme.record import Shape
from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import NodeAway
from headrace_kvstore.settings import StoreSettings

DIGEST, HASH = b"d" * 16, b"h" * 32
PLACE = Location("/kv/1", 1, 0, Shape(DIGEST, 1, 4096), HASH, np.zeros(1, np.uint64))


class Client:
    """Answers when the test says so."""

    def __init__(self, name: str, timeout_s: float) -> None:
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
        NodeAway("away"),
        wire.Failed("busy"),
        wire.Located(1, 4096, [wire.Place("/kv/0", 0, 0, b"")]),
    ],
)
def test_any_other_answer_is_nothing(tiers: NodeTiers, reply: wire.Reply | NodeAway) -> None:
    tiers.ask("r", [HASH], 0.1)
    future = client(tiers).asked[0][1]
    if isinstance(reply, NodeAway):
        future.set_exception(reply)
    else:
        future.set_result(reply)
    assert tiers.answer("r") == []


def test_a_question_that_had_to_be_forgotten_is_answered_with_nothing(tiers: NodeTiers) -> None:
    for number in range(FORGOTTEN_AT + 1):
        tiers.ask(f"r{number}", [HASH], 0.1)
    assert tiers.answer("r0") == [] and tiers.answer("r1") is None
