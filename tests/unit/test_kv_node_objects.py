"""A store node with an object tier: what it shares, fetches, tells, and does without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.protocol.events import OBJECT
from headrace_kvstore.settings.node_settings import NodeSettings
from headrace_kvstore.settings.store_settings import SettingsError
from tests.support.kvnode import DIGEST, Engine, key, keys, settings, settled, until

Start = Callable[..., StoreNode]


@pytest.fixture
def start(tmp_path: Path, file_io: FileIo) -> Iterator[Start]:
    """Nodes that share one object store; each has a folder of its own."""
    nodes: list[StoreNode] = []

    def begin(place: str = "a", **values: Any) -> StoreNode:
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        usual: dict[str, Any] = {
            "object_url": (tmp_path / "objects").as_uri(),
            "object_writer": place,
            "object_sweep_s": 0.05,
            "object_refresh_s": 0.1,
        }
        nodes.append(StoreNode(settings(folder, **(usual | values)), file_io=file_io).start())
        return nodes[-1]

    yield begin
    for node in nodes:
        assert node.close()


def objects(node: StoreNode) -> dict[str, Any]:
    """The object tier's part of the node's stats."""
    stats: dict[str, Any] = node.operations.stats()["tiers"]["object"]
    return stats


def shared(node: StoreNode, engine: Engine, *numbers: int) -> None:
    """Blocks that were used and are in the object store now."""
    engine.put(*numbers)
    engine.arena.lease(engine.row, keys(*numbers), 0.1)
    until(lambda: objects(node)["blocks"] >= len(numbers))


def test_only_blocks_that_were_used_again_are_shared(start: Start) -> None:
    node = start()
    engine = Engine(node.settings)
    engine.put(0, 1, 2, 3)
    engine.arena.lease(engine.row, keys(0, 1), 0.1)
    until(lambda: objects(node)["blocks"] == 2)
    sweeps = objects(node)["share"]["sweeps"]
    until(lambda: objects(node)["share"]["sweeps"] > sweeps + 1)
    assert objects(node)["blocks"] == 2
    engine.arena.pin(engine.row, keys(3), True)
    until(lambda: objects(node)["blocks"] == 3)
    engine.close()


def test_a_new_node_with_empty_memory_and_disk_starts_warm(start: Start) -> None:
    node = start("a")
    engine = Engine(node.settings)
    shared(node, engine, 0, 1, 2)
    engine.close()
    later = start("b", warm=True)
    other = Engine(later.settings)
    until(lambda: other.has(0, 1, 2) == [True] * 3)
    assert (objects(later)["hits"], objects(later)["misses"]) == (3, 0)
    record = other.arena.table[other.arena.lookup(other.row, keys(2))][0]
    assert record["depth"] == 2 and record["parent"] == int.from_bytes(key(1)[:8], "little")
    other.close()


def test_a_wanted_block_that_only_objects_hold_is_pulled_into_dram(start: Start) -> None:
    node = start("a")
    engine = Engine(node.settings)
    shared(node, engine, 0, 1, 2)
    engine.close()
    later = start("b", nvme_folder=None)
    other = Engine(later.settings)
    until(lambda: objects(later)["blocks"] == 3)
    pulling = later.operations.pull(DIGEST, keys(0, 1, 2, 7))
    assert pulling is not None and pulling.blocks == 3
    assert pulling.done.result(20) == 3
    assert other.has(0, 1, 2, 7) == [True, True, True, False]
    assert later.operations.pull(DIGEST, keys(7)) is None
    other.close()


def test_what_is_faster_computed_is_not_pulled(start: Start) -> None:
    node = start("a")
    engine = Engine(node.settings)
    shared(node, engine, 0)
    engine.close()
    later = start("b", nvme_folder=None)
    other = Engine(later.settings)
    until(lambda: objects(later)["blocks"] == 1)
    assert later.operations.pull(DIGEST, keys(0), compute_s=1e-6) is None
    assert later.operations.stats()["remote"]["pulls_not_worth_it"] == 1
    other.close()


def test_prefetch_takes_from_disk_what_is_there_and_from_objects_the_rest(start: Start) -> None:
    node = start("a")
    engine = Engine(node.settings)
    shared(node, engine, 0, 1)
    engine.close()
    later = start("b")
    other = Engine(later.settings)
    other.put(0)
    assert settled(later, 20)
    until(lambda: objects(later)["blocks"] == 2)
    other.arena.clear(other.row)
    assert later.operations.prefetch(DIGEST, keys(0, 1, 2)) == 3
    until(lambda: other.has(0, 1, 2) == [True, True, False])
    assert later.operations.stats()["prefetch"]["loaded"] == 1
    assert objects(later)["fetch"]["loaded"] == 1
    other.close()


def test_stats_are_json_and_tell_of_the_object_tier(start: Start) -> None:
    node = start()
    stats = objects(node)
    json.dumps(stats)
    assert {"state", "blocks", "bytes", "fetch", "share", "medium"} <= stats.keys()
    assert start("b", object_url=None).operations.stats()["tiers"]["object"] == {
        "medium": OBJECT,
        "state": "off",
        "reason": "no object_url is given",
        "blocks": 0,
        "bytes": 0,
    }


def test_an_endpoint_that_is_not_there_costs_only_objects(start: Start) -> None:
    options = {
        "endpoint": "http://127.0.0.1:1",
        "access_key_id": "x",
        "secret_access_key": "x",
        "region": "x",
    }
    node = start(object_url="s3://bucket/p", object_options=options, object_timeout_s=0.5)
    engine = Engine(node.settings)
    assert engine.put(0, 1) == [True, True]
    assert settled(node, 20)
    assert len(node.operations.locate(DIGEST, keys(0, 1), 0.0)) == 2
    until(lambda: objects(node)["last_error"] == "unreachable")
    assert node.operations.pull(DIGEST, keys(5)) is None
    engine.close()


def test_a_store_that_nobody_knows_is_refused_at_the_start(start: Start) -> None:
    with pytest.raises(ValueError, match="tape://x"):
        start(object_url="tape://x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("object_url", "bucket/prefix"),
        ("object_writer", "a/b"),
        ("object_options", "endpoint"),
        ("object_bytes", 0),
        ("object_timeout_s", 0),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=name):
        NodeSettings.parse({name: value})
