"""The NVMe tier: what it keeps, what it drops, and what never leaves it wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from headrace_kvstore.nvme import block_lookup
from headrace_kvstore.nvme.catalog import use_per_second
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.nvme.nvme_tier import FolderBusy, NvmeTier
from headrace_kvstore.nvme.record import PAGE_BYTES, BlockShape, TierEvent
from headrace_kvstore.nvme.segment import BlockReader, plan_pieces
from tests.support.kvfiles import (
    SEGMENT_BYTES,
    SHAPE,
    SIZE_BYTES,
    Bench,
    files_bytes,
    key,
    reopen,
    sums_at,
)

# Pure decisions


def test_layers_that_follow_each_other_in_memory_are_one_piece() -> None:
    addresses = np.array([[100, 110, 120], [500, 700, 710]])
    blocks, targets, offsets, lengths = plan_pieces(np.array([0, 1000]), addresses, 2, 10)
    assert blocks.tolist() == [0, 1, 1]
    assert targets.tolist() == [100, 500, 700]
    assert offsets.tolist() == [20, 1020, 1030]
    assert lengths.tolist() == [30, 10, 20]


def test_two_blocks_are_two_pieces_though_they_touch_in_memory() -> None:
    blocks, *_ = plan_pieces(np.array([0, 50]), np.array([[0], [10]]), 0, 10)
    assert blocks.tolist() == [0, 1]


def test_no_blocks_are_no_pieces() -> None:
    assert all(len(column) == 0 for column in plan_pieces(np.zeros(0), np.zeros((0, 3)), 0, 1))


def test_without_a_policy_recent_and_used_blocks_are_worth_more() -> None:
    rows = np.zeros(3, [("hits", "u4"), ("used_s", "f8")])
    rows["hits"], rows["used_s"] = [0, 0, 5], [10, 90, 90]
    old, recent, used = use_per_second(b"", rows, 100.0)
    assert old < recent < used


# Storing and loading


def test_what_was_written_is_found_and_read_and_nothing_else(tier: NvmeTier, bench: Bench) -> None:
    assert bench.write(tier, 0, 1, 2) == [True] * 3
    assert bench.has(tier, 0, 1, 2, 3) == [True, True, True, False]
    assert bench.load(tier, 2, 3, 0) == [True, False, True]


def test_only_the_layers_asked_for_are_read_each_to_its_address(
    tier: NvmeTier, bench: Bench
) -> None:
    bench.write(tier, 0, 1)
    places = [tier.locate(SHAPE.digest, key(number)) for number in (0, 1)]
    width = SHAPE.layer_bytes
    bench.memory[:] = 0
    targets = bench.address + np.array([[3, 5], [9, 8]]) * width  # apart, and in reverse
    assert tier.read(places, targets, first_layer=1, verify=sums_at).wait(20).all()
    rows = bench.memory[: 12 * width].reshape(12, width)
    for row, (number, layer) in {3: (0, 1), 5: (0, 2), 9: (1, 1), 8: (1, 2)}.items():
        assert (rows[row] == bench.content(number)[layer]).all()
    assert not rows[[0, 1, 2, 4, 6, 7, 10, 11]].any()


def test_layers_and_addresses_that_no_page_aligns_are_read_all_the_same(
    tier: NvmeTier, file_io: FileIo
) -> None:
    bench = Bench(file_io, BlockShape(b"odd-sized-layers", layers=5, layer_bytes=1237), blocks=4)
    assert bench.write(tier, 0, 1) == [True, True]
    assert bench.load(tier, 0, 1) == [True, True]


def test_a_read_of_layers_that_do_not_exist_is_refused(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, 0)
    place = tier.locate(SHAPE.digest, key(0))
    assert place is not None
    with pytest.raises(ValueError):
        tier.read([place], np.full((1, 2), bench.address), first_layer=3)
    tier = reopen(tier)  # closing waits for reads: the refused one is not counted as one
    tier.close()


def test_a_block_written_twice_is_kept_once(tier: NvmeTier, bench: Bench) -> None:
    save = bench.save(0, 0)
    first, second = tier.write(SHAPE, [save, save])
    assert first is second and first.result(20)
    assert bench.write(tier, 0) == [True]
    assert tier.stats()["writes"] == 1


def test_looking_changes_nothing(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, 0)
    before = tier.rows()
    assert bench.has(tier, 0) == [True]
    tier.locate(SHAPE.digest, key(0))
    assert (tier.rows() == before).all()


def test_the_leading_run_is_located_as_each_block_is(
    tier: NvmeTier, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_lookup, "LOCATED_AT_ONCE", 3)
    bench.write(tier, *range(8), 9)
    names = [key(number) for number in range(10)]
    found = tier.locate_leading(SHAPE.digest, names)
    one_by_one = [tier.locate(SHAPE.digest, name) for name in names[:8]]
    assert len(found) == 8
    for place, single in zip(found, one_by_one, strict=True):
        assert single is not None
        assert (place.path, place.slot, place.hash) == (single.path, single.slot, single.hash)
        assert (place.sums == single.sums).all()
    assert not tier.rows()["hits"].any()
    assert len(tier.locate_leading(SHAPE.digest, names[:5], lease_s=60.0)) == 5
    rows = tier.rows()
    assert rows["hits"].sum() == 5 and (rows["lease_until_s"] > time.monotonic() + 50).sum() == 5
    assert tier.locate_leading(SHAPE.digest, [key(99), *names]) == []
    assert tier.locate_leading(b"another--digest!", names) == []


def test_a_read_counts_as_a_use(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, 0)
    stored_s = tier.rows()["used_s"][0]
    bench.load(tier, 0)
    (row,) = tier.rows()
    assert row["hits"] == 1 and row["used_s"] > stored_s


def test_another_process_reads_what_the_owner_locates(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, 5)
    place = tier.locate(SHAPE.digest, key(5))
    assert place is not None
    reader = BlockReader(bench.file_io)
    layers = bench.address + np.arange(SHAPE.layers)[None, :] * SHAPE.layer_bytes
    bench.memory[:] = 0
    assert reader.read([place], layers, verify=sums_at).wait(20).all()
    os.unlink(place.path)
    reader.close()
    gone: list[str] = []
    missing = reader.read([place], layers, on_bad=lambda _, reason: gone.append(reason))
    assert not missing.wait(20).any() and gone == ["gone"]


# Restart


def test_a_restart_finds_everything_again(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, *range(7))
    before = tier.rows()
    tier = reopen(tier)
    assert tier.scanned.blocks == 7 and tier.scanned.damaged_headers == 0
    assert bench.load(tier, *range(7)) == [True] * 7
    after = tier.rows()
    for name in ("hash", "parent", "depth", "bytes"):
        assert sorted(after[name].tolist()) == sorted(before[name].tolist())
    assert bench.write(tier, 7) == [True]
    assert tier.stats()["segments"] == 2, "the free slot of the second segment was not used"
    tier.close()


def test_a_clock_set_back_makes_no_block_younger_than_now(
    tier: NvmeTier, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(tier, 0)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    tier = reopen(tier)
    assert tier.rows()["stored_s"][0] <= time.monotonic()
    tier.close()


def test_a_smaller_size_is_respected_at_once(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, *range(12))
    tier = reopen(tier, size_bytes=SEGMENT_BYTES)
    assert files_bytes(tier) == SEGMENT_BYTES and sum(bench.has(tier, *range(12))) == 4
    tier.close()


def test_what_was_discarded_stays_away_after_a_restart(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, 0, 1)
    assert tier.discard(SHAPE.digest, key(0)) and not tier.discard(SHAPE.digest, key(0))
    assert bench.has(tier, 0, 1) == [False, True]
    tier = reopen(tier)
    assert bench.has(tier, 0, 1) == [False, True]
    assert bench.write(tier, 0) == [True] and bench.load(tier, 0, 1) == [True, True]
    tier.close()


def test_other_files_in_the_folder_are_left_alone(tier: NvmeTier, bench: Bench) -> None:
    (tier.folder / "notes.txt").write_text("mine")
    tier = reopen(tier)
    assert (tier.folder / "notes.txt").read_text() == "mine"
    tier.close()


def test_a_folder_has_one_owner(tier: NvmeTier, file_io: FileIo) -> None:
    with pytest.raises(FolderBusy):
        NvmeTier.open(tier.folder, SIZE_BYTES, SEGMENT_BYTES, file_io)
    reopen(tier).close()


def test_synced_writes_are_found_again(tmp_path: Path, file_io: FileIo, bench: Bench) -> None:
    tier = NvmeTier.open(tmp_path / "synced", SIZE_BYTES, SEGMENT_BYTES, file_io, sync=True)
    assert bench.write(tier, 0, 1) == [True, True]
    assert bench.load(tier, 0, 1) == [True, True]
    tier.close()


# Space


def test_the_size_is_respected_to_the_byte(tier: NvmeTier, bench: Bench) -> None:
    for number in range(30):
        assert bench.write(tier, number) == [True]
        assert files_bytes(tier) <= SIZE_BYTES
    assert files_bytes(tier) == SIZE_BYTES
    assert bench.load(tier, 28, 29) == [True, True]
    assert tier.stats()["blocks_evicted"] == 20


def test_the_segment_whose_blocks_are_used_stays(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, *range(12))
    for _ in range(3):
        bench.load(tier, 0, 1, 2, 3)
    bench.write(tier, 12)
    assert bench.has(tier, 0, 4, 8) == [True, False, True]


def test_leased_blocks_stay_and_writes_that_find_no_room_are_dropped(
    tier: NvmeTier, bench: Bench
) -> None:
    bench.write(tier, *range(12))
    for number in (0, 4, 8):
        tier.locate(SHAPE.digest, key(number), lease_s=60)
    assert bench.write(tier, 12) == [False]
    assert tier.stats()["writes_dropped_full"] == 1 and tier.state == "on"
    assert bench.has(tier, 0, 4, 8) == [True, True, True]


def test_a_lease_ends_by_itself(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, *range(12))
    for number in (0, 4, 8):
        tier.locate(SHAPE.digest, key(number), lease_s=0.01)
    time.sleep(0.02)
    assert bench.write(tier, 12) == [True]


def test_namespaces_take_segments_from_each_other(
    tier: NvmeTier, bench: Bench, file_io: FileIo
) -> None:
    other = Bench(file_io, BlockShape(b"another--digest!", 2, PAGE_BYTES), blocks=4)
    bench.write(tier, *range(12))
    assert other.write(tier, 0) == [True]
    assert other.load(tier, 0) == [True] and bench.has(tier, 0, 4) == [False, True]
    assert not tier.contains(other.shape.digest, [key(5)]).any(), "another namespace's block"


def test_a_block_larger_than_a_segment_is_dropped(tier: NvmeTier, file_io: FileIo) -> None:
    big = Bench(file_io, BlockShape(SHAPE.digest, 1, SEGMENT_BYTES), blocks=1)
    assert big.write(tier, 0) == [False]
    assert tier.state == "on"


def test_writes_beyond_the_limit_in_flight_are_dropped_and_counted(
    tmp_path: Path, bench: Bench
) -> None:
    limit = 2 * SHAPE.record_bytes
    tier = NvmeTier.open(
        tmp_path, SIZE_BYTES, SEGMENT_BYTES, bench.file_io, writing_limit_bytes=limit
    )
    assert bench.write(tier, 0, 1, 2) == [True, True, False]
    assert tier.stats()["writes_dropped_busy"] == 1 and tier.stats()["writing_bytes"] == 0
    assert bench.write(tier, 2) == [True]
    tier.close()


def test_a_save_that_no_header_can_describe_is_refused_and_the_others_are_written(
    tier: NvmeTier, bench: Bench
) -> None:
    good, bad = bench.save(0, 0), bench.save(1, 1)
    with pytest.raises(ValueError):
        tier.write(SHAPE, [good, type(bad)(bad.hash, bad.address, bad.sums[:-1])])
    tier = reopen(tier)
    assert bench.has(tier, 0, 1) == [True, False]
    tier.close()


def test_memory_that_is_gone_fails_the_write_but_not_the_tier(tier: NvmeTier, bench: Bench) -> None:
    save = bench.save(0, 0)
    nowhere = 4096
    (future,) = tier.write(SHAPE, [type(save)(save.hash, nowhere, save.sums)])
    assert not future.result(20) and tier.state == "on"
    assert bench.write(tier, 0) == [True]


def test_listeners_hear_of_every_block_that_comes_and_goes(tmp_path: Path, bench: Bench) -> None:
    heard: list[TierEvent] = []
    broken = [heard.append, lambda _: 1 / 0]
    tier = NvmeTier.open(tmp_path, SEGMENT_BYTES, SEGMENT_BYTES, bench.file_io, events=broken)
    bench.write(tier, *range(4))
    bench.write(tier, 4)
    tier.discard(SHAPE.digest, key(4))
    bench.write(tier, 5)
    tier.close()
    NvmeTier.open(tmp_path, SEGMENT_BYTES, SEGMENT_BYTES, bench.file_io, events=broken).close()
    names = {key(number): number for number in range(6)}
    told = [(event.reason, event.stored, names[event.hash]) for event in heard]
    assert sorted(told[:4]) == [("written", True, number) for number in range(4)]
    assert told[4:] == [
        *[("evicted", False, number) for number in range(4)],
        ("written", True, 4),
        ("discarded", False, 4),
        ("written", True, 5),
        ("scanned", True, 5),
    ]


def test_nothing_is_found_or_written_after_closing(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, 0)
    tier.close()
    tier.close()
    assert bench.has(tier, 0) == [False] and bench.write(tier, 1) == [False]
