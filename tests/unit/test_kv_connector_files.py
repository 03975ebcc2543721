"""Blocks that are not in DRAM come from the tier's files into the engine's cache, or not at all."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_engine.connector.caches.engine_cache import EngineCache
from headrace_engine.connector.loading.file_loader import FileLoader
from headrace_engine.connector.messages import LoadSample
from headrace_engine.connector.store_work import BlockLoad, BlockSave, StoreWork
from headrace_engine.connector.worker_connector import WorkerConnector
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.checksum import block_seed, layer_seeds
from headrace_kvstore.nvme import nvme_tier as nvme
from headrace_kvstore.nvme import record
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.segment import Location, Read
from headrace_kvstore.protocol.wire import BadBlock
from headrace_kvstore.settings.store_settings import StoreSettings
from tests.support.kvfiles import no_descriptors_left
from tests.support.kvnode import SlowMover, until
from tests.support.tensor import Tensor

LAYERS, BLOCKS, LAYER_BYTES = 5, 6, 8192
DIGEST = b"namespace-digest"
HASHES = [bytes([n]) * 32 for n in range(1, BLOCKS + 1)]
NAMES = [f"model.layers.{n}.attn" for n in range(LAYERS)]


class Engine:
    """An engine's cache and its worker side, over an arena of its own."""

    def __init__(self, folder: Path, name: str, fill: int) -> None:
        rng = np.random.default_rng(fill)
        self.data = [
            rng.integers(0, 256, (BLOCKS, LAYER_BYTES), dtype=np.uint8) for _ in range(LAYERS)
        ]
        tensors = {name: Tensor(data) for name, data in zip(NAMES, self.data, strict=True)}
        cache = EngineCache(BlockLayout.of_tensors(tensors, BLOCKS))
        self.arena = Arena.create_or_attach(
            name, 4 << 20, folder=folder, block_bytes=LAYERS * LAYER_BYTES, layers=LAYERS
        )
        row = self.arena.register_namespace(DIGEST, LAYERS * LAYER_BYTES, LAYERS)
        self.worker = WorkerConnector(
            *(self.arena, row, cache, seeds, StoreSettings()),
            partial(FileLoader, staging_bytes=1 << 20),
        )

    def content(self, block: int) -> bytes:
        return b"".join(layer[block].tobytes() for layer in self.data)

    def load(
        self, blocks: list[int], places: dict[bytes, Location], limit_s: float = math.inf
    ) -> set[int]:
        names = [HASHES[block] for block in blocks]
        self.worker.begin(StoreWork(load=BlockLoad([blocks], names, places, [limit_s])))
        for name in NAMES:
            self.worker.wait(name)
        self.worker.end()
        return self.worker.failed_blocks()


def seeds(hashes: Sequence[bytes]) -> np.ndarray:
    return layer_seeds([block_seed(DIGEST, name) for name in hashes], LAYERS)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """One that saved its blocks to DRAM, and one on an empty arena."""
    first, second = Engine(tmp_path, "first", 1), Engine(tmp_path, "second", 2)
    blocks = list(range(BLOCKS))
    save = BlockSave([blocks], HASHES, [b"", *HASHES[:-1]], blocks)
    first.worker.begin(StoreWork(saves={0: save}))
    first.worker.end()
    while not first.worker.finished_jobs():
        pass
    yield first, second
    first.worker.close()
    second.worker.close()


@pytest.fixture
def places(engines: tuple[Engine, Engine], tmp_path: Path) -> Iterator[dict[bytes, Location]]:
    """The first engine's blocks in files."""
    arena = engines[0].arena
    file_io = FileIo()
    tier = nvme.NvmeTier.open(tmp_path / "files", 1 << 22, 1 << 20, file_io)
    slots = arena.lookup(0, HASHES)
    sums = arena.sums(slots)
    saves = [
        record.WriteRequest(name, int(address), total)
        for name, address, total in zip(HASHES, arena.addresses(slots), sums, strict=True)
    ]
    written = tier.write(record.BlockShape(DIGEST, LAYERS, LAYER_BYTES), saves)
    assert all(future.result(20) for future in written)
    found = {name: tier.locate(DIGEST, name) for name in HASHES}
    yield {name: place for name, place in found.items() if place is not None}
    tier.close()
    file_io.close()


def test_blocks_come_from_files(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    first, second = engines
    assert second.load([0, 3, 5], places) == set()
    assert [second.content(n) for n in (0, 3, 5)] == [first.content(n) for n in (0, 3, 5)]
    assert second.load([1], places) == set()


def test_one_load_may_come_from_dram_and_files_and_nowhere(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    first, second = engines
    first.arena.discard(0, HASHES[2:])
    truth = [first.content(n) for n in range(4)]
    for layer in first.data:
        layer[:] = 0
    known = {name: places[name] for name in HASHES[2:4]}
    assert first.load([0, 1, 2, 3, 4], known) == {4}
    assert [first.content(n) for n in range(4)] == truth
    assert first.worker.bad_in_files() == []
    assert second.load([0], {}) == {0}


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_flipped_bit_in_a_file_is_seen_and_told(
    engines: tuple[Engine, Engine], places: dict[bytes, Location], layer: int
) -> None:
    _, second = engines
    place = places[HASHES[4]]
    with open(place.path, "r+b") as file:
        file.seek(place.payload_offset + layer * LAYER_BYTES + 99)
        [byte] = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    assert second.load([3, 4], places) == {4}
    assert second.worker.bad_in_files() == [BadBlock.at(place)]
    assert second.worker.bad_in_files() == []


def test_a_file_that_is_gone_costs_its_blocks_and_nothing_else(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    _, second = engines
    for path in {place.path for place in places.values()}:
        Path(path).unlink()
    assert second.load([0, 1], places) == {0, 1}
    assert second.worker.counts == Counter(lost_gone=2)
    assert second.worker.bad_in_files() == [], "the disk is not at fault"


def test_no_descriptor_left_is_no_fault_of_the_disk(
    engines: tuple[Engine, Engine], places: dict[bytes, Location], tmp_path: Path
) -> None:
    _, second = engines
    with no_descriptors_left(tmp_path / "files"):
        assert second.load([0, 1], places) == {0, 1}
    assert second.worker.counts["lost_unreadable_nvme"] == 0
    assert second.worker.bad_in_files() == []
    assert second.load([0, 1], places) == set()


def slow(engine: Engine, file_io: SlowMover, ahead: bool = False) -> None:
    """Give the engine a disk of this speed, for its steps' loads or for those ahead of them."""
    files = engine.worker.file_loader_ahead if ahead else engine.worker.file_loader
    assert isinstance(files, FileLoader), "the engine has a disk"
    files.file_io = file_io


def test_a_load_that_takes_longer_than_computing_is_given_up_and_its_blocks_stay_on_disk(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    _, second = engines
    file_io = SlowMover()
    slow(second, file_io)
    file_io.bytes_per_s = LAYER_BYTES / 0.3
    assert second.load([0, 1], places, limit_s=0.05) == {0, 1}
    assert second.worker.counts == Counter(lost_slow_nvme=2)
    assert second.worker.bad_in_files() == []
    [sample] = second.worker.samples()
    assert isinstance(sample, LoadSample)
    assert sample.blocks == 2 and sample.seconds >= 0.05 * LAYERS


def test_no_load_begins_before_the_reads_of_one_that_was_given_up_have_landed(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    first, second = engines
    file_io = SlowMover()
    slow(second, file_io)
    file_io.bytes_per_s = LAYER_BYTES / 0.3
    second.load([0, 1], places, limit_s=0.05)
    file_io.bytes_per_s = None
    assert second.load([2], places) == {2}, "the memory may be written to yet"
    until(lambda: second.load([2], places) == set())
    assert second.content(2) == first.content(2)


def test_a_load_ahead_waits_for_reads_of_the_one_before_it_that_was_given_up(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    first, second = engines
    file_io, worker = SlowMover(), second.worker
    slow(second, file_io, ahead=True)
    file_io.bytes_per_s = LAYER_BYTES / 0.3

    def loads(names: dict[str, BlockLoad]) -> set[int]:
        worker.begin(StoreWork(ahead=names))
        worker.file_thread_ahead.submit(lambda: None).result(20)
        worker.end()
        assert worker.loaded_ahead() == set(names)
        return worker.failed_blocks()

    late = BlockLoad([[0, 1]], HASHES[:2], places, [0.05])
    assert loads({"late": late, "next": BlockLoad([[2]], HASHES[2:3], places, [math.inf])}) == {
        0,
        1,
        2,
    }
    assert worker.bad_in_files() == [], "the file is right, its bytes did not come in time"
    file_io.bytes_per_s = None
    until(lambda: loads({"again": BlockLoad([[2]], HASHES[2:3], places, [math.inf])}) == set())
    assert second.content(2) == first.content(2)


def test_a_load_ahead_from_dram_waits_for_no_disk(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    first, _ = engines
    first.arena.discard(0, HASHES[1:])
    file_io, worker = SlowMover(), first.worker
    slow(first, file_io, ahead=True)
    file_io.bytes_per_s = LAYER_BYTES / 0.3
    disk = BlockLoad([[1]], HASHES[1:2], places, [20.0])
    worker.begin(StoreWork(ahead={"disk": disk, "dram": BlockLoad([[0]], HASHES[:1])}))
    worker.dram_thread_ahead.submit(lambda: None).result(20)
    worker.end()
    assert worker.loaded_ahead() == {"dram"} and worker.failed_blocks() == set()
    worker.file_thread_ahead.submit(lambda: None).result(20)
    worker.end()
    assert worker.loaded_ahead() == {"disk"}


def test_what_stands_in_dram_is_loaded_though_the_disk_is_late(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    first, _ = engines
    first.arena.discard(0, HASHES[2:])
    truth = [first.content(n) for n in range(2)]
    for layer in first.data:
        layer[:] = 0
    file_io = SlowMover()
    slow(first, file_io)
    file_io.bytes_per_s = LAYER_BYTES / 0.3
    assert first.load([0, 1, 2, 3], places, limit_s=0.05) == {2, 3}
    assert [first.content(n) for n in range(2)] == truth


def test_a_file_cut_short_is_unreadable_and_told(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    _, second = engines
    place = places[HASHES[4]]
    os.truncate(place.path, place.payload_offset + LAYER_BYTES)
    assert 4 in second.load([0, 4], places)
    assert second.worker.counts["lost_unreadable_nvme"] > 0
    assert BadBlock.at(place) in second.worker.bad_in_files()


def test_a_load_is_measured(engines: tuple[Engine, Engine], places: dict[bytes, Location]) -> None:
    _, second = engines
    second.worker.open()
    second.load([0, 1], places)
    [sample] = second.worker.samples()
    assert isinstance(sample, LoadSample)
    assert sample[:2] == ("nvme", 2) and sample.seconds > 0
    assert second.worker.samples() == []


def test_a_load_ends_with_the_lease_of_its_places(
    engines: tuple[Engine, Engine], places: dict[bytes, Location], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = engines
    limits: list[float] = []
    source = FileLoader.source

    def limited(files: FileLoader, *rest: Any) -> Any:
        limits.append(rest[-1])
        return source(files, *rest)

    monkeypatch.setattr(FileLoader, "source", limited)
    now_s = time.monotonic()
    for until_s in ([now_s + 7, now_s + 20], [now_s - 1], []):
        work = StoreWork(load=BlockLoad([[0]], HASHES[:1], places, [math.inf], until_s))
        second.worker.begin(work)
        second.worker.end()
    assert limits == [pytest.approx(7, abs=2), 0.0, StoreSettings().lease_s]


def test_more_than_staging_holds_is_computed(
    engines: tuple[Engine, Engine], places: dict[bytes, Location]
) -> None:
    _, second = engines
    second.worker.file_loader.staging_bytes = LAYER_BYTES  # type: ignore[union-attr]
    assert second.load([0, 1], places) == {0, 1}
    assert second.load([0], places) == set()


def test_a_load_that_may_take_no_time_is_given_up_at_once(
    engines: tuple[Engine, Engine], places: dict[bytes, Location], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = engines
    limits: list[float | None] = []

    def wait(read: Read, left_s: float | None = None) -> np.ndarray:
        limits.append(left_s)
        raise TimeoutError

    monkeypatch.setattr(Read, "wait", wait)
    assert second.load([0], places, limit_s=0.0) == {0}
    assert limits == [0.0]
    assert second.worker.counts["lost_slow_nvme"] == 1
