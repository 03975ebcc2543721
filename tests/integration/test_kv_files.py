"""Files on a real disk: bytes, errors, and what a tier on a bad disk or a kill -9 leaves."""

from __future__ import annotations

import errno
import gc
import multiprocessing as mp
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headrace_kvstore.nvme import segment_space
from headrace_kvstore.nvme.file_io import FileIo, IoBatchError
from headrace_kvstore.nvme.nvme_tier import FolderBusy, NvmeTier
from headrace_kvstore.nvme.record import PAGE_BYTES
from headrace_kvstore.nvme.segment import page_memory
from tests.support.disk import small_disk
from tests.support.kvfiles import SHAPE, Bench, key

pytestmark = pytest.mark.timeout(120)

SEGMENT_BYTES = PAGE_BYTES + 8 * SHAPE.record_bytes
MEMORY_BYTES = 8 * 2**20


@pytest.fixture
def file_io() -> Iterator[FileIo]:
    file_io = FileIo()
    yield file_io
    assert file_io.close()


@pytest.fixture
def memory() -> tuple[np.ndarray, int]:
    memory, address = page_memory(MEMORY_BYTES)
    memory[:] = np.random.default_rng(3).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
    return memory, address


# File I/O


@pytest.mark.parametrize("direct", [0, os.O_DIRECT])
def test_scattered_pieces_are_written_and_read_back(
    file_io: FileIo, memory: tuple[np.ndarray, int], tmp_path: Path, direct: int
) -> None:
    rows = memory[0].reshape(-1, PAGE_BYTES)
    saved = rows[:1024].copy()
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | direct, 0o600)
    at = memory[1] + np.arange(1024) * PAGE_BYTES
    order = np.random.default_rng(1).permutation(1024)
    fds, lengths = np.full(1024, fd), np.full(1024, PAGE_BYTES)
    file_io.write(at, fds, order * PAGE_BYTES, lengths).result(20)
    rows[:] = 0
    file_io.read(at[::2], fds[::2], order[::2] * PAGE_BYTES, lengths[::2]).result(20)
    assert (rows[:1024:2] == saved[::2]).all()
    assert not rows[1:1024:2].any() and not rows[1024:].any(), "more was read than asked for"
    os.close(fd)


def test_a_long_scatter_list_of_small_pieces_moves_whole(
    file_io: FileIo, memory: tuple[np.ndarray, int], tmp_path: Path
) -> None:
    count = 2000
    (tmp_path / "f").write_bytes(np.arange(count, dtype="<u8").tobytes())
    fd = os.open(tmp_path / "f", os.O_RDWR)
    order = np.random.default_rng(1).permutation(count)
    eight = np.full(count, 8)
    move = file_io.read(memory[1] + order * 8, np.full(count, fd), np.arange(count) * 8, eight)
    move.result(30)
    got = memory[0][: 8 * count].view("<u8")
    assert (got[order] == np.arange(count)).all()
    os.close(fd)


def test_reading_past_the_end_names_the_pieces_that_are_short(
    file_io: FileIo, memory: tuple[np.ndarray, int], tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(bytes(3 * PAGE_BYTES - 1))
    fd = os.open(tmp_path / "f", os.O_RDWR)
    offsets = np.arange(4) * PAGE_BYTES
    move = file_io.read(memory[1] + offsets, [fd] * 4, offsets, [PAGE_BYTES] * 4)
    with pytest.raises(IoBatchError, match="short read") as caught:
        move.result(20)
    assert sorted(caught.value.pieces) == [2, 3] and caught.value.errno == errno.EIO
    os.close(fd)


def test_a_failed_piece_tells_its_errno_and_takes_no_other_move_with_it(
    file_io: FileIo, memory: tuple[np.ndarray, int], tmp_path: Path
) -> None:
    data = os.urandom(64 * PAGE_BYTES)
    (tmp_path / "good").write_bytes(data)
    good = os.open(tmp_path / "good", os.O_RDWR)
    write_only = os.open(tmp_path / "bad", os.O_WRONLY | os.O_CREAT, 0o600)
    offsets = np.arange(64) * PAGE_BYTES
    for _ in range(5):
        memory[0][:] = 0
        pages = [PAGE_BYTES] * 64
        moves = [file_io.read(memory[1] + offsets, [good] * 64, offsets, pages)]
        moves.append(file_io.read([memory[1] + 2**20], [write_only], [0], [PAGE_BYTES]))
        moves.append(file_io.read([memory[1] + 2**21], [good], [0], [PAGE_BYTES]))
        assert moves[0].exception(20) is None and moves[2].exception(20) is None
        error = moves[1].exception(20)
        assert isinstance(error, IoBatchError) and error.errno == errno.EBADF
        assert memory[0][: len(data)].tobytes() == data
        assert memory[0][2**21 : 2**21 + PAGE_BYTES].tobytes() == data[:PAGE_BYTES]


def test_memory_that_is_not_there_fails_its_piece_only(
    file_io: FileIo, memory: tuple[np.ndarray, int], tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(bytes(PAGE_BYTES))
    fd = os.open(tmp_path / "f", os.O_RDWR)
    for move in (file_io.read, file_io.write):
        moving = move([8, memory[1]], [fd] * 2, [0] * 2, [8] * 2)
        with pytest.raises(IoBatchError, match="Bad address") as caught:
            moving.result(20)
        assert list(caught.value.pieces) == [0] and caught.value.errno == errno.EFAULT
    os.close(fd)


def test_in_order_nothing_is_written_behind_a_piece_that_failed(
    file_io: FileIo, memory: tuple[np.ndarray, int], tmp_path: Path
) -> None:
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT, 0o600)
    at, lengths = [memory[1], 8, memory[1]], [PAGE_BYTES] * 3
    move = file_io.write(at, [fd] * 3, [0, PAGE_BYTES, 2 * PAGE_BYTES], lengths, in_order=True)
    assert isinstance(move.exception(20), IoBatchError)
    assert os.fstat(fd).st_size == PAGE_BYTES
    os.close(fd)


def test_an_aborted_batch_ends_and_closed_file_io_accepts_nothing(tmp_path: Path) -> None:
    file_io = FileIo()
    _memory, address = page_memory(PAGE_BYTES)
    (tmp_path / "f").write_bytes(bytes(PAGE_BYTES))
    fd = os.open(tmp_path / "f", os.O_RDWR)
    count = 10_000
    columns = [np.full(count, n) for n in (address, fd, 0, 8)]
    called_off, cut_short = file_io.read(*columns), file_io.read(*columns)
    called_off.abort()
    with pytest.raises(CancelledError):
        called_off.result(20)
    assert file_io.close()
    assert isinstance(cut_short.exception(0), CancelledError)
    assert isinstance(file_io.read([address], [fd], [0], [8]).exception(0), CancelledError)
    assert file_io.close(), "closing twice"
    os.close(fd)


def test_closing_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    def kept() -> tuple[int, int, int]:
        gc.collect()
        return (
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
        )

    before = kept()
    for _ in range(3):
        file_io = FileIo()
        tier = NvmeTier.open(tmp_path, SEGMENT_BYTES, SEGMENT_BYTES, file_io)
        bench = Bench(file_io, blocks=2)
        assert bench.write(tier, 0) == [True] and bench.load(tier, 0) == [True]
        tier.close()
        assert file_io.close()
    until = time.monotonic() + 20  # the kernel takes a thread that has ended off its list later
    while kept() != before and time.monotonic() < until:
        time.sleep(0.05)
    assert kept() == before


def test_idle_file_io_uses_no_cpu(file_io: FileIo, memory: tuple[np.ndarray, int]) -> None:
    before = _cpu_seconds()
    time.sleep(0.5)
    after = _cpu_seconds()
    own = threading.get_native_id()
    used = {thread: s - before.get(thread, s) for thread, s in after.items() if thread != own}
    assert sum(used.values()) <= 0.02, used


def _cpu_seconds() -> dict[int, float]:
    """CPU seconds that each thread of this process has used."""
    return {t.id: t.user_time + t.system_time for t in psutil.Process().threads()}


# A process that dies


def _write_for_ever(folder: str, pipe: Connection) -> None:
    tier = NvmeTier.open(folder, 4 * SEGMENT_BYTES, SEGMENT_BYTES, FileIo())
    bench = Bench(tier.file_io, blocks=8)
    pipe.send("ready")
    number = 0
    while True:
        bench.write(tier, *range(number, number + 8))
        number += 8
        if number == 16:
            pipe.send("written")


@pytest.mark.slow
@pytest.mark.parametrize("later_s", [0.0, 0.013, 0.05])
def test_a_killed_writer_leaves_only_whole_records_and_its_folder_to_the_next(
    file_io: FileIo, tmp_path: Path, later_s: float
) -> None:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    writer = context.Process(target=_write_for_ever, args=(str(tmp_path), theirs), daemon=True)
    writer.start()
    try:
        assert ours.poll(60) and ours.recv() == "ready"
        with pytest.raises(FolderBusy):
            NvmeTier.open(tmp_path, 4 * SEGMENT_BYTES, SEGMENT_BYTES, file_io)
        assert ours.poll(60) and ours.recv() == "written"
        time.sleep(later_s)
    finally:
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join(20)
    tier = NvmeTier.open(tmp_path, 4 * SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    bench = Bench(file_io)
    found = [n for n in range(5000) if bench.has(tier, n) == [True]]
    assert found and tier.scanned.damaged_headers == 0
    assert bench.load(tier, *found) == [True] * len(found)
    assert bench.write(tier, 9999) == [True] and bench.load(tier, 9999) == [True]
    tier.close()


# A bad disk


@pytest.fixture(name="small_disk")
def _small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two segments and a little."""
    with small_disk(tmp_path / "disk", 2 * SEGMENT_BYTES + 64 * PAGE_BYTES) as is_small:
        if not is_small:
            pytest.skip("may not mount a file system")
        yield tmp_path / "disk"


def test_a_full_disk_is_lived_with_and_then_turns_writing_off(
    file_io: FileIo, small_disk: Path
) -> None:
    tier = NvmeTier.open(small_disk / "kv", 10 * SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    bench = Bench(file_io)
    for number in range(24):  # a third segment does not fit: one of ours goes for it
        assert bench.write(tier, number) == [True]
    assert tier.state == "on" and tier.stats()["segments"] == 2
    tier.close()

    for path in (small_disk / "kv").glob("segment-*"):
        path.unlink()
    (small_disk / "others").write_bytes(bytes(SEGMENT_BYTES + 80 * PAGE_BYTES))
    tier = NvmeTier.open(small_disk / "kv", 10 * SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    assert bench.write(tier, 0) == [False]
    assert tier.state == "read-only" and "No space left" in tier.stats()["reason"]
    assert bench.write(tier, 1) == [False] and tier.stats()["writing_off"] == 2
    assert len(list((small_disk / "kv").iterdir())) == 1, "a half-made segment was left"
    tier.close()


def test_a_disk_that_others_keep_full_costs_one_segment_and_not_the_tier(
    file_io: FileIo, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = NvmeTier.open(small_disk / "kv", 10 * SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    bench = Bench(file_io)
    assert bench.write(tier, *range(16)) == [True] * 16
    others = (small_disk / "others").open("wb", buffering=0)
    make = segment_space.make_segment

    def greedy(*given: Any) -> None:
        """Somebody takes all room as soon as there is some."""
        with suppress(OSError):
            others.write(bytes(3 * SEGMENT_BYTES))
        make(*given)

    monkeypatch.setattr(segment_space, "make_segment", greedy)
    assert bench.write(tier, 16) == [False] and tier.state == "read-only"
    assert sum(bench.has(tier, *range(16))) == 8
    for number in range(17, 27):
        tier.heal()
        assert bench.write(tier, number) == [False] and tier.state == "read-only"
    assert sum(bench.has(tier, *range(16))) == 8, "a full disk costs more at each try"
    monkeypatch.setattr(segment_space, "make_segment", make)
    others.truncate(0)
    tier.heal()
    assert bench.write(tier, 27, 28) == [True, True]
    others.close()
    tier.close()


def _hold(folder: str, pipe: Connection) -> None:
    """Open all segments that are there, as an engine does, each time it is told to."""
    held = {}
    while pipe.recv():
        for path in Path(folder).glob("segment-*"):
            held.setdefault(path.name, path.open("rb"))
        pipe.send(len(held))


@pytest.mark.slow
def test_another_process_that_keeps_all_files_open_does_not_fill_the_disk(
    file_io: FileIo, small_disk: Path
) -> None:
    tier = NvmeTier.open(small_disk / "kv", 10 * SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    bench = Bench(file_io)
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_hold, args=(str(small_disk / "kv"), theirs), daemon=True)
    reader.start()
    try:
        for number in range(64):
            assert bench.write(tier, number) == [True], (number, tier.stats()["reason"])
            ours.send(True)
            assert ours.poll(60)
            held = ours.recv()
        assert held >= 7 and tier.state == "on" and tier.stats()["segments"] == 2
        ours.send(False)
    finally:
        reader.terminate()
        reader.join(20)
    tier.close()


def test_a_read_only_disk_serves_reads_of_a_running_tier_and_opens_as_off(
    file_io: FileIo, small_disk: Path
) -> None:
    tier = NvmeTier.open(small_disk / "kv", SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    bench = Bench(file_io)
    assert bench.write(tier, *range(8)) == [True] * 8
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    tier = NvmeTier.open(small_disk / "kv", SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    assert tier.state == "off" and "Read-only file system" in tier.stats()["reason"]
    assert bench.write(tier, 9) == [False] and bench.has(tier, 0) == [False]
    tier.close()


def test_a_limit_on_file_sizes_turns_writing_off(file_io: FileIo, tmp_path: Path) -> None:
    bench = Bench(file_io)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tier = NvmeTier.open(tmp_path, 10 * SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT_BYTES // 2, limits[1]))
        assert bench.write(tier, 0) == [False]
        assert tier.state == "read-only" and "File too large" in tier.stats()["reason"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tier.close()


def test_a_write_that_the_disk_refuses_half_way_fails_and_turns_writing_off(
    file_io: FileIo, tmp_path: Path
) -> None:
    bench = Bench(file_io)
    tier = NvmeTier.open(tmp_path, 10 * SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    assert bench.write(tier, 0, 1) == [True, True]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    place = tier.locate(SHAPE.digest, key(1))
    assert place is not None
    try:
        fits = SHAPE.header_offset(place.slot + 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fits, limits[1]))
        assert bench.write(tier, 2, 3) == [True, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tier.state == "read-only" and tier.stats()["writes_failed"] == 1
    assert bench.load(tier, 0, 1, 2, 3) == [True, True, True, False]
    tier.close()
    tier = NvmeTier.open(tmp_path, 10 * SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    assert tier.state == "on" and bench.load(tier, 0, 1, 2, 3) == [True, True, True, False]
    tier.close()


def test_a_folder_removed_under_the_tier_costs_hits_only(file_io: FileIo, tmp_path: Path) -> None:
    bench = Bench(file_io)
    tier = NvmeTier.open(tmp_path / "kv", 10 * SEGMENT_BYTES, SEGMENT_BYTES, file_io)
    bench.write(tier, *range(8))
    shutil.rmtree(tmp_path / "kv")
    assert bench.load(tier, 0, 1) == [False, False]
    assert bench.write(tier, 8) == [False]
    assert tier.state == "read-only" and "No such file" in tier.stats()["reason"]
    tier.close()
