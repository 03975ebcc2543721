"""The arena's file, and what is left of it after damage and death."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace_kvstore.arena import shared_file
from headrace_kvstore.arena.arena import (
    EXISTS,
    NO_ROOM,
    WRITER_TIMEOUT_S,
    Arena,
    ArenaFormatError,
    LockBusyError,
)
from headrace_kvstore.arena.geometry import SECTION
from headrace_kvstore.arena.locking import FileLock
from headrace_kvstore.blocks.slot_record import WRITING
from tests.support.kvarena import (
    BIG_BLOCK,
    BLOCK,
    DIGEST,
    LAYERS,
    OTHER,
    Make,
    hashes,
    machine_clock,
    present,
    store,
    sums_of,
)
from tests.support.kvcheck import broken

# Repair


def test_garbage_in_everything_derived_is_rebuilt_from_the_slot_table(make: Make) -> None:
    arena = make(blocks=40)
    rows = [
        arena.register_namespace(DIGEST, BLOCK, LAYERS),
        arena.register_namespace(OTHER, BIG_BLOCK, 1),
    ]
    store(arena, rows[0], *range(5))
    store(arena, rows[1], *range(2))
    writing = arena.reserve(rows[0], hashes(77), [0], [0])
    since = arena.events(0)[1]
    noise = np.random.default_rng(1)
    for array in (arena.tables.buckets, arena.tables.free, arena.tables.readers):
        array.view(np.uint8)[:] = noise.integers(0, 256, array.nbytes)
    for field in ("namespace", "used", "free"):
        arena.tables.segments[field] = noise.integers(-9, 9, len(arena.tables.segments))
    arena.words[SECTION] += 1
    assert broken(arena) == []
    assert present(arena, rows[0], *range(6)) == [0, 1, 2, 3, 4]
    assert present(arena, rows[1], *range(3)) == [0, 1]
    assert arena.publish(writing, sums_of((77,))).all()
    assert arena.events(since)[2]
    assert arena.stats()["repairs_total"] == 1


def test_an_exception_inside_a_section_is_repaired_by_the_next(make: Make) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 1)
    with pytest.raises(KeyboardInterrupt), arena.section:
        arena.tables.buckets[:] = 0
        raise KeyboardInterrupt
    assert present(arena, row, 1) == [1]
    assert broken(arena) == []


def test_records_that_cannot_be_are_freed(make: Make) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    slots = store(arena, row, 1, 2, 3, 4)
    arena.tables.table["state"][slots[0]] = 9
    arena.tables.table["namespace"][slots[1]] = 200
    arena.tables.table["hash"][slots[2]] = arena.tables.table["hash"][slots[3]]
    arena.words[SECTION] += 1
    assert broken(arena) == []
    assert present(arena, row, 1, 2, 3, 4) == [4]


def test_a_reservation_that_is_past_its_time_is_taken_back(make: Make) -> None:
    clock = machine_clock()
    arena = make(blocks=1, clock=clock)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    slots = arena.reserve(row, hashes(1), [0], [0])
    clock.now_s += WRITER_TIMEOUT_S - 1.0
    assert arena.reserve(row, hashes(1, 2), [0, 0], [0, 0]).tolist() == [EXISTS, NO_ROOM]
    assert arena.table["state"][slots[0]] == WRITING
    clock.now_s += 2.0
    assert (arena.reserve(row, hashes(1), [0], [0]) == slots).all()
    assert broken(arena) == []


def test_a_second_handle_sees_the_same_blocks_whatever_size_it_asks_for(
    make: Make, tmp_path: Path
) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    slots = store(arena, row, 1)
    arena.view(slots[0])[:] = 42
    with Arena.create_or_attach("arena", 1 << 24, folder=tmp_path) as other:
        assert other.geometry == arena.geometry
        assert other.register_namespace(DIGEST, BLOCK, LAYERS) == row
        assert (other.view(other.lookup(row, hashes(1))[0]) == 42).all()


def test_arenas_of_two_names_share_nothing(make: Make) -> None:
    one, two = make(name="one"), make(name="two")
    for arena in (one, two):
        arena.register_namespace(DIGEST, BLOCK, LAYERS)
    store(one, 0, 1)
    assert not present(two, 0, 1)


def test_the_file_is_never_larger_than_asked(tmp_path: Path) -> None:
    for size in (300_000, 1 << 20, 12_345_678):
        arena = Arena.create_or_attach(
            f"of{size}", size, folder=tmp_path, block_bytes=65536, layers=2
        )
        path = tmp_path / f"of{size}"
        assert size - 4096 < path.stat().st_size <= size
        assert path.stat().st_blocks * 512 >= path.stat().st_size
        arena.close()


def test_a_size_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no block of 65536: (\d+) are the least"):
        Arena.create_or_attach("arena", 50_000, folder=tmp_path, block_bytes=65536, layers=2)
    assert not (tmp_path / "arena").exists()
    with pytest.raises(ValueError, match="no file name"):
        Arena.create_or_attach("a/b", 1 << 20, folder=tmp_path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_too_little_shared_memory_is_an_error_at_start() -> None:
    folder = os.statvfs("/dev/shm")
    name = f"headrace-test-{os.getpid()}"
    with pytest.raises(OSError, match="bytes free"):
        Arena.create_or_attach(name, folder.f_blocks * folder.f_frsize + (1 << 30))
    assert not Path("/dev/shm", name).exists()


def test_files_of_another_version_or_with_a_damaged_header_are_refused(
    make: Make, tmp_path: Path
) -> None:
    make().close()
    path = tmp_path / "arena"
    good = path.read_bytes()
    for at, what in ((0, "no arena"), (8, "version"), (20, "damaged"), (50, "damaged")):
        damaged = bytearray(good)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ArenaFormatError, match=what):
            Arena.create_or_attach("arena", 1 << 24, folder=tmp_path)
    path.write_bytes(good[:-4096])
    with pytest.raises(ArenaFormatError, match="damaged"):
        Arena.create_or_attach("arena", 1 << 24, folder=tmp_path)


def test_a_file_whose_creator_died_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "arena").write_bytes(bytes(8) + b"half made" * 1000)
    with Arena.create_or_attach("arena", 1 << 20, folder=tmp_path, block_bytes=BLOCK) as arena:
        assert broken(arena) == []


def test_after_unlink_the_next_to_come_starts_empty_and_the_others_go_on(make: Make) -> None:
    old = make()
    row = old.register_namespace(DIGEST, BLOCK, LAYERS)
    store(old, row, 1)
    old.unlink()
    new = make()
    assert new.stats()["blocks"] == 0
    old.unlink()  # the name is the new one's now
    assert new._file.path.exists()
    assert present(old, row, 1) == [1]


def test_a_view_outlives_its_arena(make: Make) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    view = arena.view(store(arena, row, 1)[0])
    arena.close()
    arena.close()
    view[:] = 1
    assert view.all()


def test_a_lock_that_somebody_keeps_is_a_miss_and_not_a_hang(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, arena = make(), make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 1)
    monkeypatch.setattr(arena.section, "_patience_s", 0.05)
    with holder.section:
        assert present(arena, row, 1) == [1]
        assert (arena.lease(row, hashes(1), 1.0) == -1).all()
        assert arena.reserve(row, hashes(2), [0], [0]) == [NO_ROOM]
        with pytest.raises(LockBusyError):
            arena.clear()
    assert (arena.lease(row, hashes(1), 1.0) >= 0).all()


def test_misses_that_a_kept_lock_delays_are_counted_with_the_next_ones(make: Make) -> None:
    holder, arena = make(), make()
    with holder.section:
        arena.record_misses(3)
    assert arena.stats()["misses_total"] == 0
    arena.record_misses(2)
    assert arena.stats()["misses_total"] == 5


def test_files_that_nobody_has_open_are_removed_and_others_stay(make: Make, tmp_path: Path) -> None:
    used, left = make(name="kv-used"), make(name="kv-left")
    make(name="other").close()
    making = FileLock(os.open(tmp_path / "kv-making", os.O_RDWR | os.O_CREAT))
    making.acquire(1.0)
    assert shared_file.remove_unused_files(tmp_path, "kv-*") == []
    child = os.fork()
    if not child:
        time.sleep(600)
    left.close()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert shared_file.remove_unused_files(tmp_path, "kv-*") == ["kv-left"]
    assert {"kv-used", "kv-making", "other"} <= {path.name for path in tmp_path.iterdir()}
    used.close()
    making.close()
    assert set(shared_file.remove_unused_files(tmp_path, "kv-*")) == {"kv-used", "kv-making"}


def test_who_makes_a_large_arena_is_waited_for_as_long_as_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "CREATE_PATIENCE_S", 0.2)
    path = tmp_path / "arena"
    maker = FileLock(os.open(path, os.O_RDWR | os.O_CREAT))
    maker.acquire(1.0)
    stopped = threading.Event()

    def allocate() -> None:
        for size in range(1, 11):
            os.posix_fallocate(maker.fd, 0, size * 65536)
            time.sleep(0.1)
        stopped.wait(20)

    thread = threading.Thread(target=allocate)
    began_s = time.monotonic()
    thread.start()
    with pytest.raises(LockBusyError):
        Arena.create_or_attach("arena", 1 << 20, folder=tmp_path, block_bytes=BLOCK)
    assert time.monotonic() - began_s > 0.9, "given up while the file grew"
    stopped.set()
    thread.join()
    maker.close()
