"""Reports of blocks on NVMe that a reader could not use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.protocol import wire
from tests.support.kvnode import (
    DIGEST,
    LEASE_S,
    SHAPE,
    Engine,
    HangingMover,
    Reader,
    key,
    keys,
    located,
    settings,
    until,
    written,
)


@pytest.fixture
def node(tmp_path: Path, file_io: FileIo) -> Iterator[StoreNode]:
    node = StoreNode(settings(tmp_path), file_io=file_io).start()
    yield node
    assert node.close()


def reports(node: StoreNode, *numbers: int) -> list[wire.BadBlock]:
    return [wire.BadBlock.at(p) for p in node.operations.locate(DIGEST, keys(*numbers), 0.0)]


def damage(block: wire.BadBlock) -> None:
    with open(block.path, "r+b") as file:
        file.seek(SHAPE.payload_offset(block.slot) + 99)
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_reported_block_is_dropped_if_the_node_finds_it_damaged_too(
    node: StoreNode, engine: Engine, reader: Reader
) -> None:
    written(node, engine, 0, 1)
    first, second = reports(node, 0, 1)
    damage(first)
    assert node.operations.report_bad(DIGEST, [first, second]) == 1
    assert located(node, 0) == 0 and engine.has(0) == [True]
    places = node.operations.locate(DIGEST, keys(1), LEASE_S)
    assert reader.read(places, [1]) == [True]
    stats = node.operations.stats()
    assert (stats["reported_bad"], stats["reported_wrongly"]) == (2, 1)


def test_a_report_of_a_place_that_is_out_of_date_drops_nothing(
    node: StoreNode, engine: Engine
) -> None:
    written(node, engine, 0)
    [old] = reports(node, 0)
    tier = node.tiers.nvme
    assert tier is not None and tier.discard(DIGEST, key(0))
    node.tiers.dram.follower.sweep_soon()  # type: ignore[union-attr]
    until(lambda: bool(reports(node, 0)))
    [new] = reports(node, 0)
    assert new != old
    damage(old)
    assert node.operations.report_bad(DIGEST, [old]) == 0
    assert node.operations.report_bad(DIGEST, [wire.BadBlock(key(0), "/etc/passwd", 3)]) == 0
    assert located(node, 0) == 1


def test_a_disk_that_hangs_while_a_report_is_checked_costs_the_check_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_kvstore.nvme.recheck.READ_S", 0.05)
    disk = HangingMover()
    node = StoreNode(settings(tmp_path), file_io=disk).start()
    engine = Engine(node.settings)
    written(node, engine, 0)
    disk.hangs = "READ"
    assert node.operations.report_bad(DIGEST, reports(node, 0)) == 0
    assert located(node, 0) == 1
    disk.let_go()
    engine.close()
    assert node.close()
