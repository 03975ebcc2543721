"""The DRAM tier's arena: what it promises to one process at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from headrace_kvstore.arena import Arena, ArenaFormatError, LockBusyError
from headrace_kvstore.arena_layout import SECTION, Geometry, slot_bytes
from headrace_kvstore.table import FREE, READY, REMOVED, STORED, WRITING, hash_word, pack_hashes

BLOCK, LAYERS = 4000, 3
BIG_BLOCK = 10_000
DIGEST, OTHER = b"n" * 16, b"o" * 16


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def __call__(self) -> float:
        return self.now_s


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def hashes(*numbers: int) -> list[bytes]:
    return [block_hash(number) for number in numbers]


def sums_of(numbers: tuple[int, ...], layers: int = LAYERS) -> np.ndarray:
    return np.array([[number * 100 + layer for layer in range(layers)] for number in numbers])


Make = Callable[..., Arena]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Arenas for BLOCK-sized blocks in a folder of their own; closed at the end."""
    made = []

    def make(blocks: int = 8, name: str = "arena", **options: object) -> Arena:
        size = blocks * slot_bytes(BLOCK, LAYERS)
        tables = 0
        while True:
            try:
                plan = Geometry.plan(size + tables, BLOCK, LAYERS, BLOCK)
            except ValueError:
                tables += 4096
                continue
            if plan.size_bytes - plan.data_offset >= size:
                break
            tables += 4096
        options = {"folder": tmp_path, "smallest_block_bytes": BLOCK} | options
        arena = Arena.create_or_attach(
            name, size + tables, block_bytes=BLOCK, layers=LAYERS, **options
        )
        made.append(arena)
        return arena

    yield make
    for arena in made:
        arena.close()


def store(arena: Arena, row: int, *numbers: int, **how: object) -> np.ndarray:
    depths = range(len(numbers))
    slots = arena.reserve(row, hashes(*numbers), [0] * len(numbers), depths, **how)
    layers = int(arena._t.spaces["layers"][row])
    there = slots >= 0
    assert arena.publish(slots[there], sums_of(numbers, layers)[there]).all()
    return slots


def present(arena: Arena, row: int, *numbers: int) -> list[int]:
    found = arena.lookup(row, hashes(*numbers))
    return [number for number, slot in zip(numbers, found, strict=True) if slot >= 0]


# Storing and finding


def test_a_block_is_found_only_once_it_is_published(make: Make) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    slots = arena.reserve(row, hashes(1, 2), [0, hash_word(block_hash(1))], [0, 1], tenant=7)
    assert (slots >= 0).all()
    assert (arena.lookup(row, hashes(1, 2)) == -1).all()
    assert (arena.lease(row, hashes(1, 2), 9.0) == -1).all()
    arena.view(slots[0])[:] = 1
    assert arena.publish(slots, sums_of((1, 2))).all()
    assert (arena.lookup(row, hashes(1, 2, 3)) == [*slots, -1]).all()
    assert (arena.sums(slots) == sums_of((1, 2))).all()
    record = arena.table[slots[1]]
    assert record["state"] == READY and record["tenant"] == 7 and record["depth"] == 1
    assert record["parent"] == hash_word(block_hash(1)) and record["bytes"] == slot_bytes(BLOCK, 3)
    assert arena.check() == []


def test_a_block_is_reserved_once(make: Make) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    first = arena.reserve(row, hashes(1, 1), [0, 0], [0, 0])
    assert first[0] >= 0 and first[1] == -1
    assert (arena.reserve(row, hashes(1), [0], [0]) == -1).all()
    arena.abandon(first)
    again = store(arena, row, 1)
    assert again[0] >= 0
    assert (arena.reserve(row, hashes(1), [0], [0]) == -1).all()


def test_each_block_given_to_a_slot_is_another_generation(make: Make) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    seen = set()
    for number in range(5):
        slot = store(arena, row, number)[0]
        seen.add((slot, int(arena.table["generation"][slot])))
        arena.discard(row, hashes(number))
    assert len(seen) == 5


def test_publishing_what_one_does_not_write_does_nothing(make: Make) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    slots = arena.reserve(row, hashes(1), [0], [0])
    arena.abandon(slots)
    assert not arena.publish(slots, sums_of((1,))).any()
    assert not present(arena, row, 1)
    assert arena.table["state"][slots[0]] == FREE


def test_hashes_may_be_bytes_or_an_array_and_shorter_ones_are_padded(make: Make) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    slot = store(arena, row, 5)
    assert arena.lookup(row, pack_hashes(hashes(5))) == slot
    assert arena.lookup(row, np.frombuffer(block_hash(5), np.uint8).reshape(1, 32)) == slot
    assert pack_hashes([b"ab"]).tobytes() == b"ab" + bytes(30)
    assert arena.lookup(row, []).shape == (0,)
    with pytest.raises(ValueError, match="at most 32"):
        arena.lookup(row, [bytes(33)])
    with pytest.raises(ValueError, match="at most 32"):
        arena.lookup(row, [bytes(31), bytes(33)])


def test_blocks_stand_apart_on_whole_pages_and_within_the_size(make: Make) -> None:
    arena = make(blocks=40)
    rows = [arena.namespace(DIGEST, BLOCK, LAYERS), arena.namespace(OTHER, BIG_BLOCK, 1)]
    places = []
    for row in rows:
        slots = store(arena, row, *range(3))
        for slot in slots[slots >= 0]:
            start = arena.address(slot) - arena.base_address
            places.append((start, start + int(arena.table["bytes"][slot])))
            assert start % 4096 == 0 and len(arena.view(slot)) == (BLOCK, BIG_BLOCK)[row]
    places.sort()
    assert len(places) == 6 and places[-1][1] <= arena.geometry.size_bytes
    assert all(end <= start for (_, end), (start, _) in pairwise(places))


# Leases, pins, eviction


def test_the_least_recently_used_block_makes_room_and_a_leaf_before_its_parent(make: Make) -> None:
    clock = Clock()
    arena = make(blocks=4, clock=clock)
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 0, 1)
    clock.now_s += 1
    store(arena, row, 2, 3)
    clock.now_s += 1
    arena.release(arena.lease(row, hashes(0, 1), 5.0))
    clock.now_s += 1
    store(arena, row, 4)
    assert present(arena, row, 0, 1, 2, 3, 4) == [0, 1, 2, 4]
    store(arena, row, 5, 6)
    assert present(arena, row, *range(7)) == [0, 4, 5, 6]
    assert arena.check() == []


def test_leased_pinned_and_unfinished_blocks_stay_whatever_the_chooser_says(make: Make) -> None:
    clock = Clock()

    def everything(table: np.ndarray, now_s: float, need: int) -> np.ndarray:
        return np.arange(len(table))

    arena = make(blocks=4, clock=clock, choose=everything)
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 0, 1, 2)
    arena.reserve(row, hashes(3), [0], [0])
    arena.lease(row, hashes(0), 5.0)
    assert arena.pin(row, hashes(1, 9)).tolist() == [True, False]
    store(arena, row, 4)
    assert present(arena, row, *range(5)) == [0, 1, 4]
    arena.lease(row, hashes(4), 5.0)
    assert (store(arena, row, 5) == -1).all()
    clock.now_s += 5.0
    assert (store(arena, row, 5) >= 0).all()
    arena.pin(row, hashes(1), pinned=False)
    store(arena, row, 6, 7)
    assert 1 not in present(arena, row, *range(8))
    assert arena.check() == []


def test_one_readers_release_leaves_the_others_lease(make: Make) -> None:
    arena = make(blocks=1, clock=Clock())
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 1)
    first, second = arena.lease(row, hashes(1), 9.0), arena.lease(row, hashes(1), 9.0)
    arena.release(first)
    assert (store(arena, row, 2) == -1).all()
    arena.release(second)
    assert (store(arena, row, 2) >= 0).all()


def test_a_reader_that_never_released_is_not_counted_after_its_lease(make: Make) -> None:
    clock = Clock()
    arena = make(blocks=1, clock=clock)
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 1)
    arena.lease(row, hashes(1), 1.0)
    clock.now_s += 2.0
    arena.release(arena.lease(row, hashes(1), 9.0))
    assert (store(arena, row, 2) >= 0).all()


def test_a_lease_counts_a_use_and_a_lookup_none(make: Make) -> None:
    clock = Clock()
    arena = make(clock=clock)
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    slot = store(arena, row, 1)[0]
    stored_s = clock.now_s
    before = bytes(arena._bytes)
    clock.now_s += 3.0
    arena.lookup(row, hashes(1, 2))
    assert bytes(arena._bytes) == before
    arena.lease(row, hashes(1, 2), 4.0)
    record = arena.table[slot]
    assert (record["hits"], record["used_s"], record["stored_s"]) == (1, stored_s + 3, stored_s)
    assert record["lease_until_s"] == stored_s + 7.0
    assert (arena.stats()["hits_total"], arena.stats()["misses_total"]) == (1, 1)


def test_a_tenant_over_its_quota_gives_up_its_own_blocks(make: Make) -> None:
    clock = Clock()
    arena = make(blocks=8, clock=clock, quotas={7: 2 * slot_bytes(BLOCK, LAYERS)})
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 0, 1)
    for number in range(10, 15):
        clock.now_s += 1
        store(arena, row, number, tenant=7)
    assert present(arena, row, 0, 1, *range(10, 15)) == [0, 1, 13, 14]
    store(arena, row, 13, 14, tenant=7)
    assert present(arena, row, 13, 14) == [13, 14]


def test_discard_and_clear_take_leased_and_pinned_blocks_too(make: Make) -> None:
    arena = make()
    rows = [arena.namespace(DIGEST, BLOCK, LAYERS), arena.namespace(OTHER, BLOCK, 1)]
    for row in rows:
        store(arena, row, 1, 2)
        arena.lease(row, hashes(1), 9.0)
        arena.pin(row, hashes(2))
    assert arena.discard(rows[0], hashes(1, 3)) == 1
    assert present(arena, rows[0], 1, 2) == [2]
    assert arena.clear(rows[0]) == 1
    assert present(arena, rows[1], 1, 2) == [1, 2]
    assert arena.clear() == 2
    assert arena.stats()["held_bytes"] == 0
    assert arena.stats()["segments_free"] == arena.stats()["segments"]
    assert arena.check() == []


# Namespaces


def test_a_namespace_is_registered_once_and_only_with_one_block_size(make: Make) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    assert arena.namespace(DIGEST, BLOCK, LAYERS) == row
    with pytest.raises(ValueError, match="not 5000 and 3"):
        arena.namespace(DIGEST, 5000, LAYERS)
    with pytest.raises(ValueError, match="larger than a segment"):
        arena.namespace(OTHER, 1 << 30, LAYERS)
    for row in range(1, 256):
        assert arena.namespace(row.to_bytes(16, "big"), BLOCK, LAYERS) == row
    with pytest.raises(ValueError, match="256 namespaces"):
        arena.namespace(OTHER, BLOCK, LAYERS)
    with pytest.raises(ValueError, match="no namespace"):
        arena.lookup(256, hashes(1))
    assert arena.stats()["repairs_total"] == 0


def test_the_same_hash_in_two_namespaces_is_two_blocks(make: Make) -> None:
    arena = make()
    one, two = arena.namespace(DIGEST, BLOCK, LAYERS), arena.namespace(OTHER, BLOCK, LAYERS)
    store(arena, one, 1)
    assert not present(arena, two, 1)
    slot = store(arena, two, 1)
    assert slot != arena.lookup(one, hashes(1))


def test_memory_moves_to_the_namespace_that_stores_from_the_one_that_idles(make: Make) -> None:
    clock = Clock()
    arena = make(blocks=32, clock=clock)
    idle, busy = arena.namespace(DIGEST, BLOCK, LAYERS), arena.namespace(OTHER, BIG_BLOCK, 1)
    for number in range(40):
        clock.now_s += 1
        store(arena, idle, number)
    assert arena.stats()["segments_free"] == 0
    for number in range(40):
        clock.now_s += 1
        assert (store(arena, busy, number) >= 0).all()
        assert arena.check() == []
    counts = [space["blocks"] for space in arena.stats()["namespaces"]]
    assert counts[0] <= 2 and counts[1] >= 9  # a rest of two small blocks holds no big one


def test_memory_stays_with_a_namespace_whose_blocks_are_newer(make: Make) -> None:
    clock = Clock()
    arena = make(blocks=32, clock=clock)
    one, two = arena.namespace(DIGEST, BLOCK, LAYERS), arena.namespace(OTHER, BIG_BLOCK, 1)
    store(arena, one, *range(10))
    for number in range(20):
        store(arena, two, number)
    held = arena.stats()["namespaces"][0]["blocks"]
    clock.now_s += 1
    arena.release(arena.lease(one, hashes(*range(10)), 1.0))
    clock.now_s += 1
    store(arena, two, 100, 101)
    assert arena.stats()["namespaces"][0]["blocks"] == held
    assert present(arena, two, 100, 101) == [100, 101]


# Events


def test_events_tell_what_was_stored_and_removed_in_order(make: Make) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 1, 2)
    arena.discard(row, hashes(1))
    found, upto, lost = arena.events(0)
    assert not lost and found["seq"].tolist() == [0, 1, 2] and upto == 3
    assert found["kind"].tolist() == [STORED, STORED, REMOVED]
    assert [event.tobytes() for event in found["hash"]] == hashes(1, 2, 1)
    part, upto, _ = arena.events(0, limit=2)
    assert len(part) == 2 and upto == 2
    assert len(arena.events(3)[0]) == 0 and not arena.events(3)[2]


def test_a_reader_that_fell_behind_is_told_and_takes_all_blocks(make: Make) -> None:
    arena = make(blocks=2)
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    for number in range(400):
        store(arena, row, number)
    found, upto, lost = arena.events(0)
    assert lost and not len(found)
    blocks, since = arena.blocks(row)
    assert since == upto
    assert sorted(block.tobytes() for block in blocks["hash"]) == hashes(398, 399)
    store(arena, row, 1000)
    added, _, lost = arena.events(since)
    assert not lost and added["kind"].tolist() == [REMOVED, STORED]
    assert arena.events(since + 1000)[2]  # of another arena


# Repair


def test_garbage_in_everything_derived_is_rebuilt_from_the_slot_table(make: Make) -> None:
    arena = make(blocks=40)
    rows = [arena.namespace(DIGEST, BLOCK, LAYERS), arena.namespace(OTHER, BIG_BLOCK, 1)]
    store(arena, rows[0], *range(5))
    store(arena, rows[1], *range(2))
    writing = arena.reserve(rows[0], hashes(77), [0], [0])
    since = arena.events(0)[1]
    noise = np.random.default_rng(1)
    for array in (arena._t.buckets, arena._t.free, arena._t.readers):
        array.view(np.uint8)[:] = noise.integers(0, 256, array.nbytes)
    for field in ("namespace", "used", "free"):
        arena._t.segments[field] = noise.integers(-9, 9, len(arena._t.segments))
    arena._words[SECTION] += 1
    assert arena.check() == []
    assert present(arena, rows[0], *range(6)) == [0, 1, 2, 3, 4]
    assert present(arena, rows[1], *range(3)) == [0, 1]
    assert arena.publish(writing, sums_of((77,))).all()
    assert arena.events(since)[2]
    assert arena.stats()["repairs_total"] == 1


def test_an_exception_inside_a_section_is_repaired_by_the_next(make: Make) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 1)
    with pytest.raises(KeyboardInterrupt), arena._section:
        arena._t.buckets[:] = 0
        raise KeyboardInterrupt
    assert present(arena, row, 1) == [1]
    assert arena.check() == []


def test_records_that_cannot_be_are_freed(make: Make) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    slots = store(arena, row, 1, 2, 3, 4)
    arena._t.table["state"][slots[0]] = 9
    arena._t.table["namespace"][slots[1]] = 200
    arena._t.table["hash"][slots[2]] = arena._t.table["hash"][slots[3]]
    arena._words[SECTION] += 1
    assert arena.check() == []
    assert present(arena, row, 1, 2, 3, 4) == [4]


def test_a_reservation_that_nothing_living_explains_is_taken_back(make: Make) -> None:
    clock = Clock()
    arena = make(blocks=1, clock=clock)
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    slots = arena.reserve(row, hashes(1), [0], [0])
    clock.now_s += 599.0
    assert (arena.reserve(row, hashes(1, 2), [0, 0], [0, 0]) == -1).all()
    assert arena.table["state"][slots[0]] == WRITING
    clock.now_s += 2.0
    assert (arena.reserve(row, hashes(1), [0], [0]) == slots).all()
    assert arena.check() == []


# The file


def test_a_second_handle_sees_the_same_blocks_whatever_size_it_asks_for(
    make: Make, tmp_path: Path
) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    slots = store(arena, row, 1)
    arena.view(slots[0])[:] = 42
    with Arena.create_or_attach("arena", 1 << 24, folder=tmp_path) as other:
        assert other.geometry == arena.geometry
        assert other.namespace(DIGEST, BLOCK, LAYERS) == row
        assert (other.view(other.lookup(row, hashes(1))[0]) == 42).all()


def test_arenas_of_two_names_share_nothing(make: Make) -> None:
    one, two = make(name="one"), make(name="two")
    for arena in (one, two):
        arena.namespace(DIGEST, BLOCK, LAYERS)
    store(one, 0, 1)
    assert not present(two, 0, 1)


def test_the_file_is_never_larger_than_asked(tmp_path: Path) -> None:
    for size in (300_000, 1 << 20, 12_345_678):
        arena = Arena.create_or_attach(
            f"of{size}", size, folder=tmp_path, block_bytes=65536, layers=2, state_bytes=1000
        )
        path = tmp_path / f"of{size}"
        assert size - 4096 < path.stat().st_size <= size
        assert path.stat().st_blocks * 512 >= path.stat().st_size
        assert arena.state.shape == (1000,) and not arena.state.any()
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
    for at, what in ((0, "not an arena"), (8, "version"), (20, "damaged"), (50, "damaged")):
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
        assert arena.check() == []


def test_after_unlink_the_next_to_come_starts_empty_and_the_others_go_on(make: Make) -> None:
    old = make()
    row = old.namespace(DIGEST, BLOCK, LAYERS)
    store(old, row, 1)
    old.unlink()
    new = make()
    assert new.stats()["blocks"] == 0
    old.unlink()  # the name is the new one's now
    assert new._file.path.exists()
    assert present(old, row, 1) == [1]


def test_a_view_outlives_its_arena(make: Make) -> None:
    arena = make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    view = arena.view(store(arena, row, 1)[0])
    arena.close()
    arena.close()
    view[:] = 1


def test_a_lock_that_somebody_keeps_is_a_miss_and_not_a_hang(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, arena = make(), make()
    row = arena.namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 1)
    monkeypatch.setattr(arena._section, "_patience_s", 0.05)
    with holder._section:
        assert present(arena, row, 1) == [1]
        assert (arena.lease(row, hashes(1), 1.0) == -1).all()
        assert (arena.reserve(row, hashes(2), [0], [0]) == -1).all()
        with pytest.raises(LockBusyError):
            arena.clear()
    assert (arena.lease(row, hashes(1), 1.0) >= 0).all()
