"""The DRAM tier's arena: what it promises to one process at a time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_kvstore.arena import shared_file
from headrace_kvstore.arena.arena import EXISTS, NO_ROOM, WRITER_TIMEOUT_S, ArenaFormatError
from headrace_kvstore.arena.shared_file import is_in_memory
from headrace_kvstore.blocks.slot_record import FREE, READY, REMOVED, STORED, hash_word, pack_hashes
from tests.support.kvarena import (
    BIG_BLOCK,
    BLOCK,
    DIGEST,
    LAYERS,
    OTHER,
    SLOT_BYTES,
    Make,
    block_hash,
    hashes,
    machine_clock,
    present,
    store,
    sums_of,
)
from tests.support.kvcheck import broken

# Storing and finding


def test_a_block_is_found_only_once_it_is_published(make: Make) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
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
    assert record["parent"] == hash_word(block_hash(1)) and record["bytes"] == SLOT_BYTES
    assert broken(arena) == []


def test_a_block_is_reserved_once(make: Make) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    first = arena.reserve(row, hashes(1, 1), [0, 0], [0, 0])
    assert first[0] >= 0 and first[1] == EXISTS
    assert arena.reserve(row, hashes(1), [0], [0]) == [EXISTS]
    arena.abandon(first)
    again = store(arena, row, 1)
    assert again[0] >= 0
    assert arena.reserve(row, hashes(1), [0], [0]) == [EXISTS]


def test_each_block_given_to_a_slot_is_another_generation(make: Make) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    seen = set()
    for number in range(5):
        slot = store(arena, row, number)[0]
        seen.add((slot, int(arena.table["generation"][slot])))
        arena.discard(row, hashes(number))
    assert len(seen) == 5


def test_publishing_what_one_does_not_write_does_nothing(make: Make) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    slots = arena.reserve(row, hashes(1), [0], [0])
    arena.abandon(slots)
    assert not arena.publish(slots, sums_of((1,))).any()
    assert not present(arena, row, 1)
    assert arena.table["state"][slots[0]] == FREE


def test_a_late_thread_gives_up_no_slot_that_another_thread_has_got(make: Make) -> None:
    now = machine_clock()
    arena = make(clock=now)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    late = arena.reserve(row, hashes(1), [0], [0])
    ticket = arena.generations(late)
    now.now_s += WRITER_TIMEOUT_S + 1
    [slot] = slots = arena.reserve(row, hashes(1), [0], [0])
    assert slot == late[0], "the slot was given to another thread of this process"
    arena.abandon(late, ticket)
    assert not arena.publish(late, sums_of((9,)), generations=ticket).any()
    assert arena.publish(slots, sums_of((1,)), generations=arena.generations(slots)).all()
    assert (arena.sums(arena.lookup(row, hashes(1))) == sums_of((1,))).all()
    assert broken(arena) == []


def test_a_slot_that_is_renewed_stays_with_its_writer(make: Make) -> None:
    now = machine_clock()
    arena = make(clock=now)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    slots = arena.reserve(row, hashes(1, 2), [0, 0], [0, 0])
    tickets = arena.generations(slots)
    for _ in range(4):
        now.now_s += 0.9 * WRITER_TIMEOUT_S
        arena.renew(slots[:1], tickets[:1])
    again = arena.reserve(row, hashes(1, 2), [0, 0], [0, 0])
    assert again[0] == EXISTS and again[1] >= 0
    reserved_s = now.now_s
    now.now_s += 0.5 * WRITER_TIMEOUT_S
    arena.renew(slots[1:], tickets[1:])  # it is another reservation's by now
    assert arena.table["stored_s"][again[1]] == reserved_s
    assert arena.publish(slots[:1], sums_of((1,)), generations=tickets[:1]).all()
    arena.renew(slots[:1], tickets[:1])
    assert broken(arena) == []


def test_the_slot_of_a_dead_writer_is_reclaimed_and_no_block_is_evicted_for_it(make: Make) -> None:
    now = machine_clock()
    arena = make(clock=now)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    kept = store(arena, row, 5)
    arena.reserve(row, hashes(1), [0], [0])
    now.now_s += WRITER_TIMEOUT_S + 1.0

    assert arena.reserve(row, hashes(1), [0], [0])[0] >= 0
    assert arena.lookup(row, hashes(5))[0] == kept
    assert broken(arena) == []


def test_hashes_may_be_bytes_or_an_array_and_shorter_ones_are_padded(make: Make) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
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
    rows = [
        arena.register_namespace(DIGEST, BLOCK, LAYERS),
        arena.register_namespace(OTHER, BIG_BLOCK, 1),
    ]
    places = []
    for row in rows:
        slots = store(arena, row, *range(3))
        for slot in slots[slots >= 0]:
            start = int(arena.addresses(np.array([slot]))[0]) - arena.base_address
            places.append((start, start + int(arena.table["bytes"][slot])))
            assert start % 4096 == 0 and len(arena.view(slot)) == (BLOCK, BIG_BLOCK)[row]
    places.sort()
    assert len(places) == 6 and places[-1][1] <= arena.geometry.size_bytes
    assert all(end <= start for (_, end), (start, _) in pairwise(places))


@pytest.mark.parametrize("layers", [1, LAYERS, 10])
def test_no_block_s_checksums_lie_among_the_data_or_on_another_block_s(
    make: Make, layers: int
) -> None:
    arena = make(blocks=100)
    given: dict[int, np.ndarray] = {}
    for digest, each in ((DIGEST, layers), (OTHER, LAYERS)):
        row = arena.register_namespace(digest, BLOCK, each)
        slots = arena.reserve(row, hashes(*range(20)), [0] * 20, range(20))
        assert (slots >= 0).any()
        for number, slot in enumerate(slots.tolist()):
            if slot >= 0:
                given[slot] = sums_of((number + 1000 * row,), each)
                assert arena.publish(np.array([slot]), given[slot]).all()
                arena.view(slot)[:] = 255
    data = arena.memory[arena.geometry.data_offset :]
    assert set(np.unique(data)) <= {0, 255}
    there = [slot for slot in given if arena.table["state"][slot] == READY]
    assert len(there) >= 20
    assert all((arena.sums(np.array([slot])) == given[slot]).all() for slot in there)


# Leases


def test_one_readers_release_leaves_the_others_lease(make: Make) -> None:
    arena = make(blocks=1, clock=machine_clock())
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 1)
    first, second = arena.lease(row, hashes(1), 9.0), arena.lease(row, hashes(1), 9.0)
    arena.release(first)
    assert store(arena, row, 2) == [NO_ROOM]
    arena.release(second)
    assert (store(arena, row, 2) >= 0).all()


def test_a_reader_that_never_released_is_not_counted_after_its_lease(make: Make) -> None:
    clock = machine_clock()
    arena = make(blocks=1, clock=clock)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 1)
    arena.lease(row, hashes(1), 1.0)
    clock.now_s += 2.0
    arena.release(arena.lease(row, hashes(1), 9.0))
    assert (store(arena, row, 2) >= 0).all()


def test_a_lease_counts_a_use_and_a_lookup_none(make: Make) -> None:
    clock = machine_clock()
    arena = make(clock=clock)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    slot = store(arena, row, 1)[0]
    stored_s = clock.now_s
    before = bytes(arena.memory)
    clock.now_s += 3.0
    arena.lookup(row, hashes(1, 2))
    assert bytes(arena.memory) == before
    arena.lease(row, hashes(1, 2), 4.0)
    record = arena.table[slot]
    assert (record["hits"], record["used_s"], record["stored_s"]) == (1, stored_s + 3, stored_s)
    assert record["lease_until_s"] == stored_s + 7.0
    assert (arena.stats()["hits_total"], arena.stats()["misses_total"]) == (1, 1)
    arena.record_misses(3)
    assert (arena.stats()["hits_total"], arena.stats()["misses_total"]) == (1, 4)


def test_discard_and_clear_take_leased_and_pinned_blocks_too(make: Make) -> None:
    arena = make()
    rows = [
        arena.register_namespace(DIGEST, BLOCK, LAYERS),
        arena.register_namespace(OTHER, BLOCK, 1),
    ]
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
    assert broken(arena) == []


# Namespaces


def test_a_namespace_is_registered_once_and_only_with_one_block_size(make: Make) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    assert arena.register_namespace(DIGEST, BLOCK, LAYERS) == row
    with pytest.raises(ValueError, match="not 5000 and 3"):
        arena.register_namespace(DIGEST, 5000, LAYERS)
    with pytest.raises(ValueError, match="exceeds a segment"):
        arena.register_namespace(OTHER, 1 << 30, LAYERS)
    for row in range(1, 256):
        assert arena.register_namespace(row.to_bytes(16, "big"), BLOCK, LAYERS) == row
    with pytest.raises(ValueError, match="256 namespaces"):
        arena.register_namespace(OTHER, BLOCK, LAYERS)
    with pytest.raises(ValueError, match="no namespace"):
        arena.lookup(256, hashes(1))
    assert arena.stats()["repairs_total"] == 0


def full_of_namespaces(arena: Any) -> None:
    for number in range(256):
        arena.register_namespace(number.to_bytes(16, "big"), BLOCK, LAYERS)


def test_a_namespace_that_nobody_uses_makes_room_for_a_new_one(make: Make) -> None:
    gone = make()
    full_of_namespaces(gone)
    store(gone, 3, 1, 2)
    arena = make()
    assert arena.register_namespace((7).to_bytes(16, "big"), BLOCK, LAYERS) == 7
    with pytest.raises(ValueError, match="256 namespaces"):
        arena.register_namespace(OTHER, BLOCK, LAYERS)
    gone.close()  # as when its process ends, however that comes
    rows = [
        arena.register_namespace((1000 + n).to_bytes(16, "big"), BLOCK, LAYERS)
        for n in range(1, 255)
    ]
    assert len(set(rows)) == 254 and not {3, 7} & set(rows), "those without blocks go first"
    assert present(arena, 3, 1, 2) == [1, 2]
    assert arena.register_namespace(OTHER, BLOCK, LAYERS) == 3
    assert present(arena, 3, 1, 2) == []
    assert broken(arena) == []


def test_a_namespace_that_is_only_looked_at_is_not_kept(make: Make) -> None:
    arena, other = make(), make()
    for number in range(256):
        arena.register_namespace(number.to_bytes(16, "big"), BLOCK, LAYERS, keep=False)
    assert other.register_namespace(OTHER, BLOCK, LAYERS) == 0
    assert other.namespace_info(0).digest == OTHER


def test_all_blocks_are_copied_without_the_lock(make: Make) -> None:
    arena, holder = make(), make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 1, 2)
    with holder.section:
        rows, seq = arena.blocks()
    assert len(rows) == 2 and seq == arena.next_seq


def test_the_same_hash_in_two_namespaces_is_two_blocks(make: Make) -> None:
    arena = make()
    one, two = (
        arena.register_namespace(DIGEST, BLOCK, LAYERS),
        arena.register_namespace(OTHER, BLOCK, LAYERS),
    )
    store(arena, one, 1)
    assert not present(arena, two, 1)
    slot = store(arena, two, 1)
    assert slot != arena.lookup(one, hashes(1))


# Events


def test_events_tell_what_was_stored_and_removed_in_order(make: Make) -> None:
    arena = make()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
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
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
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


def test_an_arena_of_another_version_names_the_file_and_what_to_do(
    make: Make, tmp_path: Path
) -> None:
    make().close()
    with (tmp_path / "arena").open("r+b") as file:
        file.seek(8)
        file.write((3).to_bytes(8, "little"))
    with pytest.raises(ArenaFormatError) as raised:
        make()
    text = str(raised.value)
    assert str(tmp_path / "arena") in text and "version 3" in text and "remove the file" in text


def test_a_folder_on_a_disk_is_warned_of(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_in_memory(Path("/dev/shm")) and not is_in_memory(Path("/proc"))
    assert not is_in_memory(Path("/does/not/exist"))
    monkeypatch.setattr(shared_file, "is_in_memory", lambda folder: False)
    make()
    assert any("no tmpfs" in message for message in caplog.messages)
