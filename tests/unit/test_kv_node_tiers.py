"""Asking the node for what is not in DRAM: once it is known whether there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace_kvstore.connector import node_tiers
from headrace_kvstore.connector.node_tiers import NodeTiers
from headrace_kvstore.connector.store_settings import StoreSettings
from headrace_kvstore.protocol.client import Answer


class Line:
    """The client, its state as the test says."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.timeout_s, self.state = timeout_s, "up"
        self.asked: list[str] = []

    @property
    def up(self) -> bool:
        return self.state == "up"

    def stats(self) -> dict[str, Any]:
        return {"state": self.state}

    def ask_locate(
        self, key: str, digest: bytes, hashes: Sequence[bytes], lease_s: float, compute_s: float
    ) -> None:
        self.asked.append(key)

    def poll(self) -> list[Answer]:
        answers = [Answer(key, ["place"] if self.up else []) for key in self.asked]  # type: ignore[list-item]
        self.asked = []
        return answers


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> NodeTiers:
    monkeypatch.setattr(node_tiers, "NodeClient", Line)
    return NodeTiers(StoreSettings(node_timeout_s=2.0), b"d" * 16)


def line(tiers: NodeTiers) -> Line:
    assert isinstance(tiers._client, Line)
    return tiers._client


def test_a_node_is_given_the_time_of_the_settings(tiers: NodeTiers) -> None:
    assert line(tiers).timeout_s == 2.0


def test_a_node_that_is_there_is_asked_at_once(tiers: NodeTiers) -> None:
    tiers.ask("r", [b"h"], 0.1)
    assert line(tiers).asked == ["r"]
    assert tiers.answer("r") == ["place"]
    assert tiers.answer("r") is None


def test_a_question_waits_until_it_is_known_whether_a_node_is_there(tiers: NodeTiers) -> None:
    line(tiers).state = "trying"
    tiers.ask("r", [b"h"], 0.1)
    assert tiers.answer("r") is None and line(tiers).asked == []
    line(tiers).state = "up"
    assert tiers.answer("r") == ["place"]


@pytest.mark.parametrize("before", ["trying", "down"])
def test_without_a_node_there_is_nothing(tiers: NodeTiers, before: str) -> None:
    line(tiers).state = before
    tiers.ask("r", [b"h"], 0.1)
    line(tiers).state = "down"
    assert tiers.answer("r") == []
