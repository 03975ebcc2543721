"""Write-behind and prefetch: what is written, what is dropped, and a disk that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headrace_kvstore.arena.arena import WRITER_TIMEOUT_S
from headrace_kvstore.blocks.slot_record import WRITING
from headrace_kvstore.node.node import StoreNode
from headrace_kvstore.staging import prefetch
from tests.support.kvcheck import broken
from tests.support.kvnode import (
    DIGEST,
    SHAPE,
    Engine,
    HangingMover,
    Reader,
    content,
    keys,
    settings,
    settled,
    until,
)

Begin = Callable[..., tuple[StoreNode, Engine]]


@pytest.fixture(scope="module")
def disk() -> Iterator[HangingMover]:
    disk = HangingMover()
    yield disk
    assert disk.close()


@pytest.fixture
def begin(tmp_path: Path, disk: HangingMover) -> Iterator[Begin]:
    made: list[tuple[StoreNode, Engine]] = []

    def start(**values: Any) -> tuple[StoreNode, Engine]:
        given = settings(tmp_path, close_s=1.0, **values)
        node = StoreNode(given, file_io=disk).start()
        made.append((node, Engine(given)))
        until(lambda: node.tiers.nvme is not None)
        return made[-1]

    yield start
    disk.let_go()
    for node, engine in made:
        node.close()
        engine.close()


def writing(node: StoreNode) -> dict[str, Any]:
    stats: dict[str, Any] = node.operations.stats()["write_behind"]
    return stats


# A disk that hangs


def test_the_backlog_is_bounded_and_what_it_drops_is_written_later(
    begin: Begin, disk: HangingMover
) -> None:
    node, engine = begin(
        writing_bytes=2 * SHAPE.payload_bytes, backlog_bytes=4 * SHAPE.payload_bytes
    )
    disk.hangs = "WRITE"
    engine.put(0, 1)
    until(lambda: writing(node)["writing_bytes"] == 2 * SHAPE.payload_bytes)
    engine.put(*range(2, 12))
    until(lambda: writing(node)["backlog_blocks"] == 4)
    until(lambda: writing(node)["dropped"] >= 6)
    assert writing(node)["backlog_bytes"] <= 4 * SHAPE.payload_bytes
    assert engine.has(*range(12)) == [True] * 12  # nobody waits for the disk
    assert node.operations.locate(DIGEST, keys(0)) == []
    disk.let_go()
    until(lambda: len(node.operations.locate(DIGEST, keys(*range(12)), 0.0)) == 12)


def test_a_slot_that_is_given_away_while_it_is_written_leaves_no_record(
    begin: Begin, disk: HangingMover
) -> None:
    node, engine = begin(sweep_s=60.0)
    disk.hangs = "WRITE"
    engine.put(0, 1)
    until(lambda: writing(node)["writing_bytes"] > 0)
    [slot] = engine.arena.lookup(engine.row, keys(0))
    engine.arena.discard(engine.row, keys(0))
    for number in range(10, 60):
        engine.put(number)
        if (engine.arena.view(int(slot)) == content(number)).all():
            break
    disk.let_go()
    until(lambda: len(node.operations.locate(DIGEST, keys(1), 0.0)) == 1)
    assert settled(node, 20)
    assert node.operations.locate(DIGEST, keys(0), 0.0) == []
    assert writing(node)["dropped_overwritten"] == 1


def test_blocks_evicted_while_they_wait_are_counted(begin: Begin, disk: HangingMover) -> None:
    node, engine = begin(writing_bytes=SHAPE.payload_bytes, sweep_s=60.0)
    disk.hangs = "WRITE"
    engine.put(0)
    until(lambda: writing(node)["writing_bytes"] > 0)
    engine.put(1, 2)
    until(lambda: writing(node)["backlog_blocks"] == 2)
    engine.arena.discard(engine.row, keys(1))
    disk.let_go()
    until(lambda: len(node.operations.locate(DIGEST, keys(2), 0.0)) == 1)
    assert writing(node)["dropped_evicted"] == 1


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_hanging_disk_holds_up_the_end_for_no_longer_than_that(
    begin: Begin, disk: HangingMover, operation: str
) -> None:
    node, engine = begin()
    engine.put(0)
    assert settled(node, 20)
    disk.hangs = operation
    engine.put(1)
    engine.arena.discard(engine.row, keys(0))
    node.operations.prefetch(DIGEST, keys(0))
    until(lambda: bool(disk.held))
    begun = time.monotonic()
    assert not node.close()
    assert time.monotonic() - begun < 4.0
    disk.let_go()  # into memory that is still mapped
    assert engine.has(1) == [True]


def test_a_prefetch_from_a_hanging_disk_keeps_nobody_waiting(
    begin: Begin, disk: HangingMover
) -> None:
    node, engine = begin(reading_bytes=SHAPE.payload_bytes)
    engine.put(0, 1)
    assert settled(node, 20)
    engine.arena.clear()
    disk.hangs = "READ"
    node.operations.prefetch(DIGEST, keys(0), 5)
    until(lambda: bool(disk.held))
    node.operations.prefetch(DIGEST, keys(1))
    assert engine.has(0) == [False]
    engine.put(5)
    until(lambda: len(node.operations.locate(DIGEST, keys(5))) == 1)
    assert node.operations.stats()["prefetch"]["queued_blocks"] == 1
    disk.let_go()
    until(lambda: engine.has(0, 1) == [True, True])


def test_a_slot_that_a_hanging_disk_may_still_fill_is_given_to_nobody_else(
    begin: Begin, disk: HangingMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_kvstore.node.dram_service.WRITER_TIMEOUT_S", 0.0)
    monkeypatch.setattr("headrace_kvstore.node.node.CHECK_S", 0.01)
    node, engine = begin()
    engine.put(0)
    assert settled(node, 20)
    engine.arena.clear()
    disk.hangs = "READ"
    node.operations.prefetch(DIGEST, keys(0))
    until(lambda: bool(disk.held))
    [slot] = (engine.arena.table["state"] == WRITING).nonzero()[0]
    generation = engine.arena.table["generation"][slot]
    engine.arena.table["stored_s"][slot] -= 2 * WRITER_TIMEOUT_S  # so long ago
    until(lambda: engine.arena.table["stored_s"][slot] > time.monotonic() - 1)
    assert not engine.put(0)[0], "an engine got the slot"
    assert engine.arena.table["generation"][slot] == generation
    disk.let_go()
    until(lambda: engine.has(0) == [True])


def test_blocks_that_are_about_to_be_written_are_no_quiet(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, engine = begin()
    assert node.tiers.dram is not None
    writer, about, go = node.tiers.dram.writer, threading.Event(), threading.Event()
    carry_out = writer._run_task

    def slowly(task: tuple[int, list[bytes]]) -> None:
        about.set()
        assert go.wait(20)
        carry_out(task)

    monkeypatch.setattr(writer, "_run_task", slowly)
    engine.put(0)
    assert about.wait(20)
    assert not writer.idle
    go.set()
    assert settled(node, 20)
    assert len(node.operations.locate(DIGEST, keys(0))) == 1


def test_higher_priorities_are_read_first(
    begin: Begin, disk: HangingMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "THREADS", 1)
    node, engine = begin()
    engine.put(0, 1, 2)
    assert settled(node, 20)
    engine.arena.clear()
    disk.hangs = "READ"
    node.operations.prefetch(DIGEST, keys(0))
    until(lambda: len(disk.held) == 1)
    node.operations.prefetch(DIGEST, keys(1), -5)
    node.operations.prefetch(DIGEST, keys(2), 5)
    disk.let_one_go()
    until(lambda: len(disk.held) == 1)
    disk.let_one_go()
    until(lambda: any(engine.has(1, 2)))
    assert engine.has(1, 2) == [False, True]
    disk.let_go()
    until(lambda: all(engine.has(1, 2)))


# Whatever happens


numbers = st.integers(0, 24)
steps = st.one_of(
    st.tuples(st.just("put"), st.lists(numbers, min_size=1, max_size=8, unique=True)),
    st.tuples(st.just("lose"), st.lists(numbers, max_size=4, unique=True)),
    st.tuples(st.just("report"), st.lists(numbers, max_size=4, unique=True)),
    st.tuples(st.just("prefetch"), st.lists(numbers, max_size=8, unique=True)),
    st.tuples(st.sampled_from(["clear dram", "hang", "let go", "wait"]), st.just([])),
)


@given(st.lists(steps, max_size=12), st.integers(1, 4), st.integers(1, 8))
@hypothesis_settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_quiescence_nvme_has_every_block_with_equal_bytes(
    disk: HangingMover, script: list[tuple[str, list[int]]], in_flight: int, backlog: int
) -> None:
    with TemporaryDirectory() as folder:
        given = settings(
            Path(folder),
            writing_bytes=in_flight * SHAPE.payload_bytes,
            backlog_bytes=backlog * SHAPE.payload_bytes,
            sweep_s=0.01,
        )
        node = StoreNode(given, file_io=disk).start()
        engine, reader = Engine(given), Reader(disk)
        dram = node.tiers.dram
        assert dram is not None
        until(lambda: node.tiers.nvme is not None)
        for step, blocks in script:
            if step == "put":
                engine.put(*blocks)
            elif step == "lose":
                engine.arena.discard(engine.row, keys(*blocks))
            elif step == "report":
                for name in keys(*blocks):
                    assert node.tiers.nvme is not None
                    node.tiers.nvme.discard(DIGEST, name, "corrupt")
                dram.writer.missed = True
            elif step == "prefetch":
                node.operations.prefetch(DIGEST, keys(*blocks))
            elif step == "clear dram":
                engine.arena.clear()
            elif step == "hang":
                disk.hangs = "WRITE"
            elif step == "let go":
                disk.let_go()
            else:
                time.sleep(0.02)
        disk.let_go()
        until(lambda: settled(node, 1) and not dram.writer.missed and settled(node, 1))
        there = [number for number in range(25) if engine.has(number)[0]]
        places = [node.operations.locate(DIGEST, keys(number)) for number in there]
        assert all(places)
        assert all(reader.read([place for [place] in places], there))
        assert broken(engine.arena) == []
        assert engine.arena.stats()["leased"] == engine.arena.stats()["writing"] == 0
        reader.close()
        assert node.close()
        engine.close()
