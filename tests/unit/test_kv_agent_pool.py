"""Which of several agents reads, and when all of them have met a peer."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from headrace_kvstore.peers.agent_pool import AgentPool
from headrace_kvstore.peers.nixl_agent import NixlAgent, PullError

NOWHERE = np.zeros(1, np.uint64)


class Scripted:
    """An agent whose futures the test ends."""

    def __init__(self) -> None:
        self.connected: Future[str] = Future()
        self.pulls: list[Future[None]] = []
        self.forgot: list[str] = []
        self.waited_s: list[float] = []
        self.closes = True

    def connect(self, metadata: bytes) -> Future[str]:
        return self.connected

    def read(self, *_: Any) -> Future[None]:
        self.pulls.append(Future())
        return self.pulls[-1]

    def disconnect(self, peer: str) -> None:
        self.forgot.append(peer)

    def close(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return self.closes


@pytest.fixture
def agents() -> list[Scripted]:
    return [Scripted(), Scripted()]


@pytest.fixture
def readers(agents: list[Scripted]) -> AgentPool:
    return AgentPool(cast(list[NixlAgent], agents))


def read(readers: AgentPool, size: int) -> Future[Any]:
    return readers.read("peer", NOWHERE, NOWHERE, np.array([size // 2, size - size // 2]), 1.0)


def test_the_agent_with_the_fewest_bytes_on_their_way_reads(
    readers: AgentPool, agents: list[Scripted]
) -> None:
    for size in (100, 10, 10, 10):
        read(readers, size)
    assert [len(agent.pulls) for agent in agents] == [1, 3]


@pytest.mark.parametrize("failure", [None, PullError("lost")])
def test_a_read_that_is_over_counts_no_more(
    readers: AgentPool, agents: list[Scripted], failure: Exception | None
) -> None:
    pull = read(readers, 100)
    if failure is None:
        agents[0].pulls[0].set_result(None)
    else:
        agents[0].pulls[0].set_exception(failure)
    assert pull.exception() is failure
    read(readers, 10)
    assert [len(agent.pulls) for agent in agents] == [2, 0]


def test_a_peer_is_met_when_every_agent_has_met_it(
    readers: AgentPool, agents: list[Scripted]
) -> None:
    agents[1].connected.set_result("peer")
    with pytest.raises(PullError, match="slow"):
        readers.connect(b"", 0.01)
    agents[0].connected.set_result("peer")
    assert readers.connect(b"", 1.0) == "peer"


def test_a_peer_that_one_cannot_meet_is_not_met(readers: AgentPool, agents: list[Scripted]) -> None:
    agents[0].connected.set_result("peer")
    agents[1].connected.set_exception(PullError("refused"))
    with pytest.raises(PullError, match="refused"):
        readers.connect(b"", 1.0)


def test_all_forget_and_all_close(readers: AgentPool, agents: list[Scripted]) -> None:
    readers.disconnect("peer")
    assert [agent.forgot for agent in agents] == [["peer"], ["peer"]]
    agents[0].closes = False
    assert not readers.close(5.0)
    assert all(0 < wait <= 5.0 for agent in agents for wait in agent.waited_s)
