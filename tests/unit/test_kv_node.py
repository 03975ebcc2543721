"""A store node: what it writes, finds, brings back, and does without."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import hash_word
from headrace_kvstore.node import dram_service as dram_work
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.protocol.client import NodeClient
from headrace_kvstore.protocol.server import NodeAlreadyRunning
from headrace_kvstore.settings.node_settings import NodeSettings
from tests.support.kvcheck import broken
from tests.support.kvnode import (
    DIGEST,
    LEASE_S,
    SHAPE,
    Engine,
    Reader,
    answers,
    key,
    keys,
    located,
    settings,
    settled,
    until,
    written,
)

Start = Callable[..., StoreNode]


@pytest.fixture
def start(tmp_path: Path, file_io: FileIo) -> Iterator[Start]:
    nodes: list[StoreNode] = []

    def begin(**values: Any) -> StoreNode:
        nodes.append(StoreNode(settings(tmp_path, **values), file_io=file_io).start())
        return nodes[-1]

    yield begin
    for node in nodes:
        assert node.close()


@pytest.fixture
def node(start: Start) -> StoreNode:
    return start()


def nvme(node: StoreNode) -> dict[str, Any]:
    return node.operations.stats()["tiers"]["nvme"]


# Writing behind, and reading


def test_what_an_engine_stores_is_on_nvme_soon_with_equal_bytes(
    node: StoreNode, engine: Engine, reader: Reader
) -> None:
    engine.put(0, 1, 2)
    assert settled(node, 20)
    places = node.operations.locate(DIGEST, keys(0, 1, 2), LEASE_S)
    assert reader.read(places, [0, 1, 2]) == [True] * 3


def test_what_was_stored_before_the_node_came_is_written_too(tmp_path: Path, start: Start) -> None:
    engine = Engine(settings(tmp_path))
    engine.put(0, 1)
    node = start()
    assert settled(node, 20)
    assert located(node, 0, 1) == 2
    engine.close()


def test_a_follower_that_fell_behind_the_ring_starts_over(node: StoreNode, engine: Engine) -> None:
    ring = len(engine.arena.tables.events)
    for first in itertools.count(0, 30):
        engine.put(*range(first, first + 30))  # takes fewer while blocks are being written
        assert settled(node, 20)
        if engine.arena.next_seq > ring:
            break
    dram = node.tiers.dram
    assert dram is not None
    before = dram.follower.lost  # a slow machine falls behind by itself

    def behind() -> bool:
        dram.follower._seq = 0  # the follower's thread may write over it: set until it is seen
        return dram.follower.lost > before

    until(behind)
    engine.put(500)
    until(lambda: located(node, 500) == 1)


def test_only_the_leading_run_is_located(node: StoreNode, engine: Engine) -> None:
    written(node, engine, 0, 1, 3)
    assert located(node, 0, 1, 2, 3) == 2
    assert located(node, 2, 3) == 0
    assert located(node) == 0


def test_another_namespace_has_nothing(node: StoreNode, engine: Engine) -> None:
    written(node, engine, 0)
    assert node.operations.locate(b"another-digest-!", keys(0), LEASE_S) == []


def test_writing_does_not_count_as_use_and_leaves_no_lease(node: StoreNode, engine: Engine) -> None:
    written(node, engine, 0)
    [slot] = engine.arena.lookup(engine.row, keys(0))
    assert engine.arena.table["hits"][slot] == 0
    assert engine.arena.stats()["leased"] == 0
    assert engine.arena.stats()["hits_total"] == 0


def test_a_located_block_stays_for_its_lease_though_the_tier_is_full(
    start: Start, reader: Reader
) -> None:
    node = start(nvme_bytes=2 * settings(Path()).segment_bytes, dram_bytes=2**22)
    engine = Engine(node.settings)
    written(node, engine, *range(16))
    places = node.operations.locate(DIGEST, keys(*range(16)), LEASE_S)
    for first in (16, 32, 48):  # the other segment, over and over
        engine.put(*range(first, first + 16))
        assert settled(node, 20)
    assert reader.read(places, range(16)) == [True] * 16
    assert all(os.path.exists(place.path) for place in places)
    engine.close()


# Bringing back


def test_prefetch_brings_blocks_back_with_their_place_in_the_prefix(
    node: StoreNode, engine: Engine
) -> None:
    engine.put(0, tenant=7)
    engine.put(1, 2, tenant=7)
    assert settled(node, 20)
    engine.arena.clear()
    assert engine.has(0, 1, 2) == [False] * 3
    assert node.operations.prefetch(DIGEST, keys(2, 0, 1)) == 3
    until(lambda: engine.has(0, 1, 2) == [True] * 3)
    rows = engine.arena.table[engine.arena.lookup(engine.row, keys(0, 1, 2))]
    assert rows["depth"].tolist() == [0, 1, 2]
    assert rows["parent"].tolist() == [0, hash_word(key(0)), hash_word(key(1))]
    assert rows["tenant"].tolist() == [7, 7, 7]


def test_prefetch_of_what_is_there_or_nowhere_does_nothing(node: StoreNode, engine: Engine) -> None:
    written(node, engine, 0)
    node.operations.prefetch(DIGEST, keys(0, 5))
    assert settled(node, 20)
    stats = node.operations.stats()["prefetch"]
    assert (stats["already_there"], stats["absent"], stats["dropped"]) == (1, 1, 0)


def test_a_damaged_record_is_never_published_and_is_dropped(
    node: StoreNode, engine: Engine
) -> None:
    written(node, engine, 0, 1)
    [place] = node.operations.locate(DIGEST, keys(0), LEASE_S)
    with open(place.path, "r+b") as file:
        file.seek(place.payload_offset + 3 * SHAPE.layer_bytes + 5)
        file.write(b"damage")
    engine.arena.clear()
    node.operations.prefetch(DIGEST, keys(0, 1))
    until(lambda: engine.has(0, 1) == [False, True])
    assert settled(node, 20)
    assert node.operations.stats()["prefetch"]["dropped_bad"] == 1
    assert located(node, 0) == 0
    assert engine.arena.stats()["writing"] == 0


def test_a_second_request_has_blocks_promoted_the_same_one_has_not(
    node: StoreNode, engine: Engine
) -> None:
    written(node, engine, 0, 1)
    engine.arena.clear()
    assert located(node, 0, 1, request="a") == located(node, 0, 1, request="a") == 2
    assert settled(node, 20) and engine.has(0, 1) == [False, False]
    located(node, 0, request="b")
    until(lambda: engine.has(0, 1) == [True, False])
    assert node.operations.stats()["promoted"] == 1


def test_warm_fills_free_room_only(start: Start) -> None:
    node = start(keep_arena=True)
    engine = Engine(node.settings)
    for first in (0, 30, 60):
        engine.put(*range(first, first + 30))
        assert settled(node, 20)
    engine.arena.clear()
    engine.put(*range(100, 110))
    assert settled(node, 20)
    before = engine.arena.stats()["evicted_total"]
    assert 20 <= node.operations.warm() <= 40
    assert settled(node, 20)
    assert all(engine.has(*range(100, 110)))
    assert sum(engine.has(*range(90))) >= 20
    assert engine.arena.stats()["evicted_total"] == before
    engine.close()


# Keeping and dropping


def test_stats_are_json_and_say_what_each_tier_holds(node: StoreNode, engine: Engine) -> None:
    written(node, engine, 0, 1)
    located(node, 0, 1, 2)
    stats = json.loads(json.dumps(node.operations.stats()))
    dram, disk = stats["tiers"]["dram"], stats["tiers"]["nvme"]
    assert (dram["state"], dram["blocks"]) == ("on", 2)
    assert 0 < dram["bytes"] < dram["size_bytes"]
    assert (disk["state"], disk["blocks"], disk["hits"], disk["misses"]) == ("on", 2, 2, 1)
    assert 0 < disk["bytes"] <= disk["size_bytes"]
    assert stats["write_behind"]["written"] == 2
    assert stats["write_behind"]["dropped"] == 0


# Doing without


def test_a_node_without_a_disk_serves_dram(start: Start) -> None:
    node = start(nvme_folder=None)
    engine = Engine(node.settings)
    engine.put(0)
    assert settled(node, 20)
    assert located(node, 0) == node.operations.prefetch(DIGEST, keys(0)) - 1 == 0
    assert nvme(node)["state"] == "off" and "nvme_folder" in nvme(node)["reason"]
    assert nvme(node)["misses"] == 0
    engine.close()


def test_a_busy_folder_is_waited_for(tmp_path: Path, start: Start, file_io: FileIo) -> None:
    other = NvmeTier.open(tmp_path / "nvme", 2**24, 2**20, file_io)
    node = start()
    engine = Engine(node.settings)
    engine.put(0)
    until(lambda: "owns" in nvme(node)["reason"])
    assert located(node, 0) == 0
    other.close()
    until(lambda: located(node, 0) == 1)
    engine.close()


def test_a_disk_that_cannot_be_used_is_named_and_tried_again(tmp_path: Path, start: Start) -> None:
    (tmp_path / "nvme").write_text("in the way")
    node = start()
    engine = Engine(node.settings)
    engine.put(0)
    until(lambda: "cannot open" in nvme(node)["reason"])
    (tmp_path / "nvme").unlink()
    until(lambda: located(node, 0) == 1)
    engine.close()


def test_a_disk_that_fails_is_tried_again_and_gets_what_it_missed(
    node: StoreNode, engine: Engine
) -> None:
    written(node, engine, 0)
    tier = node.tiers.nvme
    assert tier is not None
    tier._set_state("read-only", "write failed")
    engine.put(1)
    until(lambda: located(node, 0, 1) == 2)
    assert nvme(node)["state"] == "on"


def test_an_arena_that_was_replaced_is_followed(
    node: StoreNode, engine: Engine, tmp_path: Path
) -> None:
    written(node, engine, 0)
    engine.arena.unlink()
    after = Engine(node.settings)
    assert after.has(0) == [False]
    after.put(1)
    until(lambda: located(node, 1) == 1)  # maybe before the arena counts as open

    def fetched() -> bool:
        node.operations.prefetch(DIGEST, keys(0))
        return after.has(0) == [True]

    until(fetched)
    after.close()


def test_an_arena_that_cannot_be_had_is_waited_for(start: Start, tmp_path: Path) -> None:
    (tmp_path / "arena").write_bytes(b"something else" * 1000)
    node = start()
    assert node.operations.stats()["tiers"]["dram"]["state"] == "off"
    (tmp_path / "arena").unlink()
    engine = Engine(node.settings)
    engine.put(0)
    until(lambda: located(node, 0) == 1)
    engine.close()


# Ends


def test_an_arena_that_takes_long_to_make_keeps_nobody_waiting_and_outlives_no_node(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes, made = dram_work.open_arena, threading.Event()

    def slow(given: NodeSettings) -> Arena:
        made.wait(60)
        return makes(given)

    monkeypatch.setattr(dram_work, "open_arena", slow)
    monkeypatch.setattr("headrace_kvstore.node.node.ARENA_S", 0.1)
    node = start(close_s=0.5)
    client = NodeClient("arena", socket_folder=tmp_path)
    assert answers(client)
    assert node.operations.stats()["tiers"]["dram"]["state"] == "off"
    client.close()
    began_s = time.monotonic()
    node.close()
    assert time.monotonic() - began_s < 10
    assert not (tmp_path / "arena").exists()
    made.set()
    until(lambda: not node._checker.is_alive())
    assert node.tiers.dram is None and not (tmp_path / "arena").exists()


def test_nothing_is_left_but_the_arena_if_it_is_to_be_kept(tmp_path: Path, file_io: FileIo) -> None:
    for keep, left in ((False, {"nvme"}), (True, {"nvme", "arena"})):
        node = StoreNode(settings(tmp_path, keep_arena=keep), file_io=file_io).start()
        assert {"arena", "headrace-kv-arena.sock"} < set(os.listdir(tmp_path))
        assert node.close()
        assert set(os.listdir(tmp_path)) == left


def test_a_node_that_ends_leaves_an_arena_that_an_engine_uses(
    tmp_path: Path, file_io: FileIo, start: Start
) -> None:
    node = StoreNode(settings(tmp_path), file_io=file_io).start()
    engine = Engine(node.settings)
    engine.put(0)
    assert node.close() and not engine.arena.replaced()
    assert (tmp_path / "arena").exists(), "the next node would make a second arena"
    after = start()
    assert settled(after, 20) and located(after, 0) == 1
    engine.put(1)
    until(lambda: located(after, 0, 1) == 2)
    engine.close()
    assert after.close() and not (tmp_path / "arena").exists()


def test_at_the_end_of_an_app_the_arena_goes_whoever_uses_it(
    tmp_path: Path, file_io: FileIo
) -> None:
    for keep in (False, True):
        node = StoreNode(settings(tmp_path, keep_arena=keep), file_io=file_io).start()
        engine = Engine(node.settings)
        assert node.close(engines_end=True)
        assert (tmp_path / "arena").exists() == keep
        engine.close()


def test_the_end_writes_what_waits_as_far_as_time_allows(
    tmp_path: Path, file_io: FileIo, start: Start
) -> None:
    node = StoreNode(settings(tmp_path, keep_arena=True), file_io=file_io).start()
    engine = Engine(node.settings)
    engine.put(*range(30))
    until(lambda: node.tiers.dram is not None and node.tiers.dram.follower.caught_up)
    assert node.close()
    engine.arena.unlink()
    after = start()
    assert settled(after, 20) and located(after, *range(30)) == 30
    engine.close()


def test_two_nodes_of_one_arena_are_one_too_many(node: StoreNode, file_io: FileIo) -> None:
    with pytest.raises(NodeAlreadyRunning):
        StoreNode(node.settings, file_io=file_io).start()
    assert node.operations.stats()["tiers"]["dram"]["state"] == "on"


def test_a_later_node_finds_arena_and_files(tmp_path: Path, file_io: FileIo, start: Start) -> None:
    first = StoreNode(settings(tmp_path, keep_arena=True), file_io=file_io).start()
    engine = Engine(first.settings)
    written(first, engine, 0, 1)
    first.close()
    second = start()
    assert settled(second, 20)
    assert located(second, 0, 1) == 2 and engine.has(0, 1) == [True, True]
    assert nvme(second).get("writes", 0) == 0
    engine.close()


def test_the_arena_is_whole_after_all_that(node: StoreNode, engine: Engine) -> None:
    for first in range(0, 120, 30):
        engine.put(*range(first, first + 30))
        node.operations.prefetch(DIGEST, keys(*range(first - 30, first)) if first else [])
    assert settled(node, 20)
    assert broken(engine.arena) == []
    slots = engine.arena.lookup(engine.row, keys(*range(120)))
    assert isinstance(engine.arena, Arena) and (np.unique(slots[slots >= 0]).size > 20)
