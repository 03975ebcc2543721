"""Whose memories are shared in an app: those of engines that have the store."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.speculation import SpeculationSection
from headrace.config.store import StoreSection
from headrace.deploy.speculative_decoding import add_speculative_decoding
from headrace.deploy.store import add_store
from headrace.observability import ProcessSetup
from headrace_decode.speculative.settings import (
    CONFIG_KEY,
    ReplicationSettings,
    SpeculationSettings,
)


def drafting(engine: dict[str, Any], **section: Any) -> SpeculationSettings:
    """What an engine's drafting is configured as."""
    assert add_speculative_decoding(SpeculationSection(enabled=True, **section), engine)
    return SpeculationSettings.read(engine["additional_config"][CONFIG_KEY])


def stored() -> dict[str, Any]:
    """An engine's arguments with the store named "kv" in them."""
    engine: dict[str, Any] = {"kv_transfer_config": {"kv_connector": "NixlConnector"}}
    add_store(StoreSection(name="kv"), [engine], ProcessSetup())
    return engine


def test_with_the_store_memories_are_shared_through_its_nodes() -> None:
    assert drafting(stored()).replication == ReplicationSettings(store="kv")


def test_share_false_keeps_each_to_itself() -> None:
    assert drafting(stored(), share=False).replication is None


@pytest.mark.parametrize(
    "engine", [{}, {"kv_transfer_config": {"kv_connector": "NixlConnector"}}], ids=["none", "NIXL"]
)
def test_without_the_store_nothing_is_shared(engine: dict[str, Any]) -> None:
    assert drafting(engine).replication is None
