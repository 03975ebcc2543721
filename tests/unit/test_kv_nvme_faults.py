"""The NVMe tier's faults: damaged, removed and copied files, and disks that fail or hang."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from headrace_kvstore.nvme.catalog import use_per_second
from headrace_kvstore.nvme.nvme_tier import FAILED_READS, NvmeTier
from headrace_kvstore.nvme.record import PAGE_BYTES
from headrace_kvstore.nvme.segment import BlockReader, Location
from tests.support.kvfiles import (
    SEGMENT_BYTES,
    SHAPE,
    SIZE_BYTES,
    Bench,
    files_bytes,
    key,
    no_descriptors_left,
    reopen,
    sums_at,
)
from tests.support.kvnode import until

# Damage


def flip(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("layer", range(SHAPE.layers))
def test_a_flipped_payload_bit_is_a_miss_and_the_block_is_dropped(
    tier: NvmeTier, bench: Bench, layer: int
) -> None:
    bench.write(tier, 0, 1, 2)
    place = tier.locate(SHAPE.digest, key(1))
    assert place is not None
    flip(place.path, place.payload_offset + layer * SHAPE.layer_bytes + 77)
    assert bench.load(tier, 0, 1, 2) == [True, False, True]
    assert bench.has(tier, 0, 1, 2) == [True, False, True]
    assert tier.stats()["reads_corrupt"] == 1
    assert bench.write(tier, 1) == [True] and bench.load(tier, 1) == [True]


def test_a_flipped_header_bit_is_found_by_the_scan(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, 0, 1, 2)
    place = tier.locate(SHAPE.digest, key(1))
    assert place is not None
    tier.close()
    flip(place.path, SHAPE.header_offset(place.slot) + 60)
    tier = NvmeTier.open(tier.folder, SIZE_BYTES, SEGMENT_BYTES, tier.file_io)
    assert tier.scanned.damaged_headers == 1
    assert bench.load(tier, 0, 1, 2) == [True, False, True]
    tier.close()


def test_a_segment_with_a_damaged_header_is_removed(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, *range(5))
    place = tier.locate(SHAPE.digest, key(0))
    assert place is not None
    tier.close()
    flip(place.path, 20)
    tier = NvmeTier.open(tier.folder, SIZE_BYTES, SEGMENT_BYTES, tier.file_io)
    assert tier.scanned.segments_removed == 1 and not os.path.exists(place.path)
    assert bench.load(tier, *range(5)) == [False] * 4 + [True]
    assert bench.write(tier, 0) == [True]
    tier.close()


@pytest.mark.parametrize("kept", [0, 100, PAGE_BYTES, PAGE_BYTES + SHAPE.record_bytes + 5000])
def test_a_truncated_segment_keeps_its_whole_records(
    tier: NvmeTier, bench: Bench, kept: int
) -> None:
    bench.write(tier, *range(4))
    place = tier.locate(SHAPE.digest, key(0))
    assert place is not None
    tier.close()
    os.truncate(place.path, kept)
    tier = NvmeTier.open(tier.folder, SIZE_BYTES, SEGMENT_BYTES, tier.file_io)
    whole = max(0, kept - PAGE_BYTES) // SHAPE.record_bytes
    assert bench.load(tier, *range(4)) == [True] * whole + [False] * (4 - whole)
    assert bench.write(tier, 9) == [True] and bench.load(tier, 9) == [True]
    assert files_bytes(tier) <= SIZE_BYTES
    tier.close()


def test_a_segment_truncated_under_a_running_tier_is_a_miss(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, 0, 1)
    place = tier.locate(SHAPE.digest, key(1))
    assert place is not None
    os.truncate(place.path, place.payload_offset + SHAPE.layer_bytes)
    assert bench.load(tier, 0, 1) == [True, False]
    assert tier.stats()["reads_unreadable"] == 1


def test_a_segment_replaced_between_locating_and_reading_is_a_miss(
    tier: NvmeTier, bench: Bench
) -> None:
    bench.write(tier, *range(12))

    def overwrite() -> None:
        for number in range(12, 24):
            assert tier.write(SHAPE, [bench.save(number, 0)])[0].result(20)

    assert bench.load(tier, 0, 1, between=overwrite) == [False, False]


def test_reads_that_keep_failing_turn_the_tier_off(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, *range(12))
    for path in tier.folder.glob("segment-*"):
        os.truncate(path, PAGE_BYTES)
    assert bench.load(tier, *range(FAILED_READS)) == [False] * FAILED_READS
    assert tier.state == "off" and "reads failed" in tier.stats()["reason"]
    assert bench.has(tier, 11) == [False]


def test_a_file_that_was_removed_is_gone_and_no_read_failure(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, *range(12))
    for path in tier.folder.glob("segment-*"):
        path.unlink()
    assert bench.load(tier, *range(12)) == [False] * 12
    assert tier.state == "on" and tier.stats()["reads_gone"] == 12
    assert bench.has(tier, *range(12)) == [False] * 12
    until(lambda: bench.write(tier, 12) == [True])
    assert bench.load(tier, 12) == [True]


def test_a_lack_of_descriptors_costs_no_block_and_not_the_tier(
    tier: NvmeTier, bench: Bench
) -> None:
    bench.write(tier, *range(12))
    tier._files.close()
    with no_descriptors_left(tier.folder):
        assert bench.load(tier, *range(FAILED_READS)) == [False] * FAILED_READS
        assert bench.write(tier, 12) == [False]
    assert tier.state == "on" and tier.stats()["reads_unopened"] == FAILED_READS
    left = [number for number in range(12) if bench.has(tier, number) == [True]]
    assert len(left) >= 8 and bench.load(tier, *left) == [True] * len(left)


# Readers and removed files


def places_of(tier: NvmeTier, *numbers: int) -> list[Location]:
    found = [tier.locate(SHAPE.digest, key(number)) for number in numbers]
    return [place for place in found if place is not None]


def read_all(reader: BlockReader, bench: Bench, places: list[Location]) -> list[bool]:
    layers = np.arange(SHAPE.layers) * SHAPE.layer_bytes
    at = bench.address + np.arange(len(places))[:, None] * SHAPE.payload_bytes + layers
    return [bool(good) for good in reader.read(places, at, verify=sums_at).wait(20)]


def removed_files(folder: Path) -> list[int]:
    """Bytes on disk of each file that this process has open and that has no name any more."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(str(folder)) and target.endswith("(deleted)"):
                found.append(512 * os.stat(f"/proc/self/fd/{fd}").st_blocks)
    return found


def test_a_reader_that_keeps_files_open_keeps_no_room_on_the_disk(
    tier: NvmeTier, bench: Bench
) -> None:
    reader = BlockReader(bench.file_io)
    for first in range(0, 36, 4):
        numbers = range(first, first + 4)
        assert bench.write(tier, *numbers) == [True] * 4
        assert read_all(reader, bench, places_of(tier, *numbers)) == [True] * 4
    assert files_bytes(tier) <= SIZE_BYTES and sum(removed_files(tier.folder)) == 0
    reader.close()


def test_a_reader_lets_removed_files_go(tier: NvmeTier, bench: Bench) -> None:
    reader = BlockReader(bench.file_io)
    bench.write(tier, *range(4))
    old = places_of(tier, 0)
    assert read_all(reader, bench, old) == [True]
    for number in range(4, 20):
        bench.write(tier, number)
    assert read_all(reader, bench, old) == [False], "the file is gone"
    assert read_all(reader, bench, places_of(tier, 19)) == [True]
    assert removed_files(tier.folder) == []
    reader.close()


def test_a_name_is_not_used_twice_though_the_newest_segment_went(
    tier: NvmeTier, bench: Bench
) -> None:
    bench.write(tier, *range(12))
    [last] = places_of(tier, 11)
    reader = BlockReader(bench.file_io)
    assert read_all(reader, bench, [last]) == [True]
    for number in (0, 4):
        tier.locate(SHAPE.digest, key(number), lease_s=60)
    assert tier._reclaim() and bench.has(tier, 11) == [False]
    tier = reopen(tier)
    assert bench.write(tier, 100, 101, 102, 103) == [True] * 4
    new = places_of(tier, 100, 101, 102, 103)
    assert last.path not in {place.path for place in new}
    assert read_all(reader, bench, new) == [True] * 4
    reader.close()
    tier.close()


def test_segments_of_names_without_a_random_part_are_found(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, *range(8))
    tier.close()
    for path in sorted(tier.folder.glob("segment-*")):
        path.rename(path.with_name(f"{path.name[:18]}.kv"))
    tier = NvmeTier.open(tier.folder, SIZE_BYTES, SEGMENT_BYTES, tier.file_io)
    assert bench.load(tier, *range(8)) == [True] * 8
    tier.close()


def test_a_copied_segment_costs_nothing(tier: NvmeTier, bench: Bench) -> None:
    bench.write(tier, *range(8))
    tier.close()
    [first, _] = sorted(tier.folder.glob("segment-*"))
    copy = first.with_name(f"{first.name[:18]}-00000000.kv")
    copy.write_bytes(first.read_bytes())
    tier = NvmeTier.open(tier.folder, SIZE_BYTES, SEGMENT_BYTES, tier.file_io)
    assert bench.load(tier, *range(8)) == [True] * 8
    for number in range(8, 20):
        assert bench.write(tier, number) == [True]
        assert files_bytes(tier) <= SIZE_BYTES
    tier.close()


def test_a_file_that_cannot_be_removed_counts_until_it_is(
    tier: NvmeTier, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(tier, *range(12))

    def refuse(path: str, *_: object) -> None:
        raise OSError(errno.EPERM, "may not", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        patched.setattr(os, "truncate", refuse)
        assert bench.write(tier, 12) == [False]
        assert tier.state == "read-only" and tier.stats()["bytes"] == SIZE_BYTES
    tier.heal()
    assert bench.write(tier, 12) == [True]
    assert files_bytes(tier) == tier.stats()["bytes"] == SIZE_BYTES


def test_a_disk_that_hangs_in_unlink_keeps_nobody_from_looking(
    tier: NvmeTier, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.write(tier, *range(12)) == [True] * 12
    hangs, go = threading.Event(), threading.Event()
    unlink = os.unlink

    def slowly(path: str) -> None:
        hangs.set()
        assert go.wait(20)
        unlink(path)

    monkeypatch.setattr("headrace_kvstore.nvme.nvme_tier.os.unlink", slowly)
    writer = threading.Thread(target=lambda: bench.write(tier, 12), daemon=True)
    writer.start()
    assert hangs.wait(20)
    answered = threading.Event()
    look = threading.Thread(target=lambda: (bench.has(tier, 11), answered.set()), daemon=True)
    look.start()
    assert answered.wait(20), "a look-up waits for the disk"
    go.set()
    writer.join(20)
    assert bench.has(tier, 11, 12) == [True, True]


def test_a_disk_that_hangs_in_a_wipe_keeps_nobody_from_looking(
    tier: NvmeTier, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.write(tier, 0, 1) == [True] * 2
    hangs, go = threading.Event(), threading.Event()

    def slowly(*_: object) -> int:
        hangs.set()
        assert go.wait(20)
        return 0

    monkeypatch.setattr("headrace_kvstore.nvme.nvme_tier.os.pwrite", slowly)
    assert tier.discard(SHAPE.digest, key(0))
    assert hangs.wait(20)
    assert bench.has(tier, 0, 1) == [False, True]
    go.set()


def test_a_segment_that_is_read_while_it_is_chosen_stays(
    tier: NvmeTier, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.write(tier, *range(12)) == [True] * 12

    def value(digest: bytes, rows: np.ndarray, now_s: float) -> np.ndarray:
        tier.locate(SHAPE.digest, key(0), lease_s=30.0)  # while the choice is made
        return use_per_second(digest, rows, now_s)

    monkeypatch.setattr(tier, "value", value)
    assert bench.write(tier, 12) == [True]
    assert bench.has(tier, 0, 4) == [True, False]
