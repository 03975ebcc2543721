"""Replicas in processes of their own that share what they learn over a real store node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.draft_memory.corpora import Exchange
from benchmarks.draft_memory.processes import Child, Node, Replica
from tests.support.kvnode import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENT_S = 60.0
Begin = Callable[[Any], Child]


def answers(seed: int, count: int = 6, tokens: int = 120) -> list[Exchange]:
    """Exchanges that have nothing in common."""
    random = np.random.default_rng(seed)
    runs = random.integers(0, 40_000, (count, tokens + 8)).astype(np.int32)
    return [Exchange(run[:8], run[8:]) for run in runs]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    children: list[Child] = []

    def start(make: Any) -> Child:
        children.append(Child(make, tmp_path))
        return children[-1]

    yield start
    for child in children:
        child.kill()


def learned(replica: Child, exchanges: list[Exchange]) -> float:
    """Accepted tokens per query, nothing of it kept."""
    return float(replica.call("ask", exchanges).accepted_per_query)


def test_a_replica_drafts_anothers_answers_as_well_as_that_one_itself(begin: Begin) -> None:
    node, a, b = begin(Node), begin(Replica), begin(Replica)
    asked = answers(0)
    before = learned(b, asked)
    a.call("answer", asked)
    assert b.call("wait", len(asked), PATIENT_S)
    assert before == 0.0
    assert learned(b, asked) >= 0.9 * learned(a, asked) > 1.0
    assert node.call("gossip_stats")["entries"] >= 1


def test_a_new_replica_starts_with_what_the_others_know(begin: Begin) -> None:
    begin(Node)
    a = begin(Replica)
    asked = answers(1)
    a.call("answer", asked)
    until(lambda: a.call("stats")["pending"] == 0 and a.call("stats")["posted"] > 0, PATIENT_S)
    a.kill()
    new = begin(Replica)
    assert new.call("wait", len(asked), PATIENT_S)
    assert learned(new, asked) > 1.0


def test_killing_the_node_costs_acceptance_and_never_a_request(begin: Begin) -> None:
    node, a, b = begin(Node), begin(Replica), begin(Replica)
    first, second, third = answers(2), answers(3), answers(4)
    a.call("answer", first)
    assert b.call("wait", len(first), PATIENT_S)
    node.kill()
    assert a.call("answer", second).queries > 0
    until(lambda: a.call("stats")["state"] == b.call("stats")["state"] == "away", PATIENT_S)
    assert learned(a, second) > 1.0
    assert learned(b, second) == 0.0
    assert learned(b, first) > 1.0
    begin(Node)
    a.call("answer", third)
    assert b.call("wait", len(first + second + third), PATIENT_S)
    assert learned(b, second) > 1.0
    assert learned(b, third) > 1.0
    assert all(r.call("stats")["failed"] == r.call("stats")["damaged"] == 0 for r in (a, b))
