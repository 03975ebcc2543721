"""Blocks get from files into an engine's cache through host memory or directly, as was measured.

NIXL's POSIX plugin stands in for GDS_MT, and a cache in host memory for one on a device. Loads need
Triton's interpreter: `test_kv_device_kernels.py` runs them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nixl")

from headrace_engine.connector.loading import read_paths as ways
from headrace_engine.connector.loading.file_loader import DIRECT_BACKEND
from headrace_engine.connector.loading.read_paths import BounceBufferPath, GdsPath, PathBenchmark
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.nvme.file_io import IoBatchError
from headrace_kvstore.nvme.nixl_file_io import NixlFileIo
from headrace_kvstore.nvme.segment import Location
from tests.support.direct_reads import Direct
from tests.support.kvnode import until
from tests.unit.test_kv_connector_files import (
    BLOCKS,
    HASHES,
    LAYER_BYTES,
    NAMES,
    Engine,
    engines,
    places,
)

__all__ = ["engines", "places"]  # fixtures

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_kv_device_kernels.py has it run"
)
BYTES = 1 << 20
GIGA = 10**9


class TestChoice:
    def test_the_faster_way_is_taken_by_the_medians(self) -> None:
        fast, slow = [0.1, 0.1, 9.0], [0.2, 0.2, 0.2]
        assert PathBenchmark(GIGA, host_s=slow, direct_s=fast).choice() == (
            "direct",
            "10.00 GB/s directly, 5.00 GB/s through host memory",
        )
        assert PathBenchmark(GIGA, host_s=fast, direct_s=slow).choice()[0] == "host"
        assert PathBenchmark(GIGA, host_s=slow, direct_s=slow).choice()[0] == "host"

    @pytest.mark.parametrize(
        ("trial", "why"),
        [
            (PathBenchmark(GIGA, [0.2] * 3, [0.1] * 3, equal=False), "not the file's"),
            (PathBenchmark(GIGA, [0.2] * 3, [0.1] * 3, failed="no luck"), "failed: no luck"),
            (PathBenchmark(GIGA, [0.2] * 3, [0.1] * 2), "2 turns"),
        ],
    )
    def test_a_way_that_was_not_proven_is_not_taken(self, trial: PathBenchmark, why: str) -> None:
        name, told = trial.choice()
        assert name == "host"
        assert why in told


@pytest.fixture
def memory() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, BYTES), np.uint8)


@pytest.fixture
def file_io(memory: np.ndarray) -> Iterator[NixlFileIo]:
    file_io = NixlFileIo("POSIX", "DRAM")
    file_io.register(memory.ctypes.data, len(memory))
    yield file_io
    assert file_io.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    np.random.default_rng(0).integers(0, 256, BYTES, np.uint8).tofile(path)
    return path


def descriptor(file: Path) -> int:
    return os.open(file, os.O_RDONLY | os.O_DIRECT)


class TestNixlMover:
    def test_pieces_land_where_they_are_to(
        self, file_io: NixlFileIo, memory: np.ndarray, file: Path
    ) -> None:
        fd, order = descriptor(file), np.random.default_rng(1).permutation(BYTES // 4096)
        told: list[bool] = []
        move = file_io.read(
            memory.ctypes.data + 4096 * np.arange(len(order)),
            np.full(len(order), fd),
            4096 * order,
            np.full(len(order), 4096),
        )
        move.add_done_callback(lambda move: told.append(move.exception() is None))
        move.result(20)
        assert move.done()
        assert told == [True]
        wanted = np.fromfile(file, np.uint8).reshape(-1, 4096)[order]
        assert (memory.reshape(-1, 4096) == wanted).all()
        file_io.deregister(fd)
        os.close(fd)

    def test_a_number_given_to_another_file_reads_that_one(
        self, file_io: NixlFileIo, memory: np.ndarray, file: Path
    ) -> None:
        other = file.with_name("other")
        other.write_bytes(b"x" * 4096)
        numbers = []
        for path in (file, other):
            numbers.append(fd := descriptor(path))
            file_io.read([memory.ctypes.data], [fd], [0], [4096]).result(20)
            file_io.deregister(fd)
            os.close(fd)
        assert numbers[0] == numbers[1]
        assert memory[:4096].tobytes() == b"x" * 4096

    def test_what_is_called_off_is_done_when_it_has_landed(
        self, file_io: NixlFileIo, memory: np.ndarray, file: Path
    ) -> None:
        fd = descriptor(file)
        move = file_io.read([memory.ctypes.data], [fd], [0], [BYTES])
        move.abort()
        until(move.done)
        with pytest.raises(CancelledError):
            move.result(0)

    def test_no_pieces_are_done_at_once(self, file_io: NixlFileIo) -> None:
        move = file_io.read([], [], [], [])
        assert move.done()
        move.result(0)

    def test_memory_that_it_was_not_given_is_refused(self, file_io: NixlFileIo, file: Path) -> None:
        other = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
        fd = descriptor(file)
        with pytest.raises(Exception, match=r"NIXL|NOT_FOUND"):
            file_io.read([other.ctypes.data], [fd], [0], [4096])

    def test_an_error_ends_all_its_moves_and_gives_no_memory_back(
        self, memory: np.ndarray, file: Path
    ) -> None:
        file_io = NixlFileIo("POSIX", "DRAM")
        file_io.register(memory.ctypes.data, len(memory))
        fd = descriptor(file)
        move = file_io.read([memory.ctypes.data], [fd], [0], [4096])
        agent = file_io._agent
        file_io._agent = type("Failing", (), {"check_xfer_state": lambda *_: "ERR"})()
        with pytest.raises(IoBatchError):
            move.result(20)
        assert file_io.broken
        assert not move.done()
        assert not file_io.close()
        file_io._agent = agent

    def test_a_plugin_that_is_not_there_is_named(self) -> None:
        with pytest.raises(RuntimeError, match="NIXL's plugin NONE cannot be used here"):
            NixlFileIo("NONE", "VRAM")


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> Iterator[Direct]:
    """Direct reads win if they are right."""
    from headrace_kvstore.device import checksum_kernels as kernels

    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", 1024)  # the interpreter counts turns
    choice = PathBenchmark.choice

    def forced(trial: PathBenchmark) -> tuple[str, str]:
        trial.host_s = [each + 1.0 for each in trial.host_s]
        return choice(trial)

    monkeypatch.setattr(PathBenchmark, "choice", forced)
    monkeypatch.setattr(ways, "TRIAL_S", 30.0)
    direct = Direct("POSIX")
    yield direct
    direct.tier.close()


@interpreted
class TestLoads:
    def test_the_first_goes_through_host_memory_and_the_next_by_the_faster_way(
        self, straight: Direct, engines: tuple[Engine, Engine], places: dict[bytes, Location]
    ) -> None:
        first, _ = engines
        source = straight.load(places, [0, 3])
        assert isinstance(source.way, BounceBufferPath)
        straight.tried()
        assert straight.tier.why.startswith("directly: ")
        later = straight.load(places, [5, 1, 2])
        assert isinstance(later.way, GdsPath)
        assert not (source.bad.any() or later.bad.any())
        for block in (0, 1, 2, 3, 5):
            assert straight.content(block) == first.content(block)
        assert not any(straight.content(4))

    def test_a_flipped_bit_is_seen_and_the_file_is_blamed_by_the_other_way_alone(
        self, straight: Direct, engines: tuple[Engine, Engine], places: dict[bytes, Location]
    ) -> None:
        first, _ = engines
        straight.load(places, [0])
        straight.tried()
        place = places[HASHES[4]]
        with open(place.path, "r+b") as file:
            file.seek(place.payload_offset + LAYER_BYTES + 99)
            [byte] = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        source = straight.load(places, [3, 4])
        assert source.bad.tolist() == [False, True]
        assert (source.cause(), source.direct) == ("corrupt", True)
        again = straight.load(places, [4, 5])
        assert again.bad.tolist() == [True, False]
        assert (again.cause(), again.direct) == ("corrupt", False)
        straight.tried()
        assert isinstance(straight.load(places, [1]).way, GdsPath)
        assert [straight.content(n) for n in (1, 3, 5)] == [first.content(n) for n in (1, 3, 5)]

    def test_a_load_that_breaks_off_is_the_last_direct_one_until_it_was_tried_again(
        self, straight: Direct, engines: tuple[Engine, Engine], places: dict[bytes, Location]
    ) -> None:
        straight.load(places, [0])
        straight.tried()
        way = straight.tier._direct
        assert way is not None
        way._file_io.broken = True  # as after an error of NIXL
        with pytest.raises(Exception, match="broken"):
            straight.load(places, [1, 2])
        assert isinstance(straight.load(places, [1, 2]).way, BounceBufferPath)
        straight.tried()
        assert isinstance(straight.load(places, [3]).way, GdsPath)
        assert [straight.content(n) for n in range(4)] == [engines[0].content(n) for n in range(4)]

    def test_where_there_is_no_plugin_all_go_through_host_memory_and_it_says_why(
        self, straight: Direct, engines: tuple[Engine, Engine], places: dict[bytes, Location]
    ) -> None:
        other = Direct(DIRECT_BACKEND)
        other.load(places, [0])
        other.tried()
        source = other.load(places, [1])
        other.tier.close()
        assert isinstance(source.way, BounceBufferPath)
        assert not source.bad.any()
        assert other.tier.why.startswith("through host memory: NIXL's plugin GDS_MT cannot be used")
        assert other.content(1) == engines[0].content(1)


@interpreted
def test_parts_that_are_not_whole_pages_go_through_host_memory() -> None:
    import torch

    from headrace_engine.connector.caches.device_cache import DeviceCache

    tensors = {name: torch.zeros((BLOCKS, 6144), dtype=torch.uint8) for name in NAMES}
    cache = DeviceCache(tensors, BlockLayout.of_tensors(tensors, BLOCKS), saves=False)
    with pytest.raises(ValueError, match="parts of 6144 bytes are not whole pages"):
        GdsPath(cache, "POSIX", BYTES)
