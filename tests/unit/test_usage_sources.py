"""Where a request's KV came from, as the connectors know it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_engine.connector.request_state import TierBlocks
from headrace_engine.pull_proof.connector import NixlConnector
from headrace_engine.pull_proof.scheduler_connector import ProvenScheduler
from headrace_prefill.blending.engine.stored_connector import StoredBlendingConnector


def test_a_block_that_dram_lacked_when_the_node_was_asked_was_fetched() -> None:
    """The node's answer came after its peers and the object store were asked."""
    taken = TierBlocks({b"file": "place"}, asked=frozenset([b"file", b"peer"]))
    sources = [taken.source(name) for name in (b"there", b"file", b"peer")]
    assert sources == ["dram", "nvme", "remote"]


def test_pulled_tokens_are_known_until_the_request_ends() -> None:
    connector: Any = NixlConnector.__new__(NixlConnector)
    scheduler: Any = ProvenScheduler.__new__(ProvenScheduler)
    scheduler.pulled = {"a": 300}
    connector.connector_scheduler = scheduler
    assert connector.kv_sources("a") == {"pulled": 300} and connector.kv_sources("b") == {}
    connector.connector_scheduler = None
    assert connector.kv_sources("a") == {}


@pytest.mark.parametrize(("name", "expected"), [("a", {"blended": 300}), ("b", {})])
def test_blended_tokens_are_known_until_the_request_ends(
    name: str, expected: dict[str, int]
) -> None:
    connector: Any = StoredBlendingConnector.__new__(StoredBlendingConnector)
    connector._sources = {"a": 300}
    assert connector.kv_sources(name) == expected
