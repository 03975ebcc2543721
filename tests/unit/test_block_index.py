"""Who can use how much of a prompt, decision by decision; the property test has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.router.blocks import block_index as index_module
from headrace.router.blocks.block_index import BlockIndex, warm
from headrace.router.blocks.holder_sets import NODES

A = np.arange(100, 120, dtype=np.uint64)
B = np.concatenate([A[:12], np.arange(200, 205, dtype=np.uint64)])
"""Leaves A after 12 blocks."""
UNKNOWN = 12345
"""Key of a block that no holder has."""


def made(holders: int = 3) -> BlockIndex:
    index = BlockIndex(2**20)
    for _ in range(holders):
        index.open()
    return index


def test_each_holder_can_use_the_blocks_up_to_the_first_it_lacks() -> None:
    index = made()
    index.stored(0, None, A)
    index.stored(1, None, B[:14])
    assert index.match(A).tolist() == [20, 12, 0]
    assert index.match(B).tolist() == [12, 14, 0]
    assert index.match(A[:5]).tolist() == [5, 5, 0]
    assert index.match(A[5:]).tolist() == [0, 0, 0]
    assert index.match(A[:0]).tolist() == [0, 0, 0]


def test_one_block_and_one_holder() -> None:
    index = made(1)
    index.stored(0, None, A[:1])
    assert index.match(A[:1]).tolist() == [1]
    assert index.entries == index.blocks == 1


def test_a_run_that_goes_on_names_the_block_before_it() -> None:
    index = made()
    index.stored(0, None, A[:7])
    index.stored(0, int(A[6]), A[7:])
    assert index.match(A).tolist() == [20, 0, 0]


def test_blocks_behind_a_hole_count_when_it_is_filled() -> None:
    index = made()
    index.stored(1, None, A)
    index.stored(0, None, A[:4])
    index.stored(0, int(A[4]), A[5:])
    assert index.match(A).tolist() == [4, 20, 0]
    assert not index.usable(0, int(A[9]))
    index.stored(0, int(A[3]), A[4:5])
    assert index.match(A).tolist() == [20, 20, 0]
    assert index.usable(0, int(A[9]))


def test_a_block_taken_out_of_the_middle_hides_those_behind_it_from_this_holder_only() -> None:
    index = made()
    for holder in range(3):
        index.stored(holder, None, A)
        index.stored(holder, None, B)
    index.removed(1, A[6:7])
    assert index.match(A).tolist() == [20, 6, 20]
    assert index.match(B).tolist() == [17, 6, 17]
    index.stored(1, int(A[5]), A[6:7])
    assert index.match(A).tolist() == [20, 20, 20]


def test_a_hole_that_nobody_fills_hides_blocks_until_somebody_does() -> None:
    index = made()
    index.stored(0, None, A)
    index.removed(0, A[6:7])
    assert index.match(A).tolist() == [6, 0, 0] and index.blocks == 19
    index.stored(0, int(A[5]), A[6:7])
    assert index.match(A).tolist() == [20, 0, 0]


def test_a_prompt_tells_the_place_of_blocks_that_came_without() -> None:
    index = made()
    for at in (0, *range(19, 0, -1)):
        index.stored(0, int(A[at - 1]) if at else None, A[at : at + 1])
    index.stored(1, UNKNOWN, A)
    index.stored(2, UNKNOWN, A[1:])
    assert index.match(A).tolist() == [20, 20, 0]
    assert index.match(A[1:]).tolist() == [0, 0, 0], "a block has one place"


def test_a_holder_that_is_gone_counts_no_longer_and_leaves_its_number() -> None:
    index = made()
    for holder in range(3):
        index.stored(holder, None, A)
    index.expire(1)
    assert index.match(A).tolist() == [20, 0, 20]
    assert index.open() == 1
    assert index.match(A).tolist() == [20, 0, 20]
    index.stored(1, None, A[:3])
    assert index.match(A).tolist() == [20, 3, 20]
    while index.maintain():
        pass
    assert index.entries == 43


def test_a_holder_that_was_cleared_begins_anew() -> None:
    index = made()
    index.stored(0, None, A)
    index.cleared(0)
    assert index.match(A).tolist() == [0, 0, 0]
    index.stored(0, None, A[:2])
    assert index.match(A).tolist() == [2, 0, 0]
    while index.maintain():
        pass
    assert index.entries == 2 and index.match(A).tolist() == [2, 0, 0]


def test_holders_that_come_and_go_all_the_time_are_swept_out_in_between() -> None:
    index = BlockIndex(2**20, max_holders=2)
    for i in range(50):
        holder = index.open()
        assert holder == 0
        index.stored(holder, None, A[: i % 20 + 1])
        assert index.match(A).tolist() == [i % 20 + 1]
        index.expire(holder)
    assert index.entries <= 4 * 20


def test_events_that_make_a_circle_end_nowhere() -> None:
    index = made()
    index.stored(0, int(A[2]), A[:3])
    index.stored(0, int(A[0]), A[1:2])
    index.stored(0, int(A[1]), A[:1])
    assert index.match(A[:3]).tolist() == [3, 0, 0]
    index.stored(0, int(A[2]), A[:1])
    index.removed(0, A[:1])
    assert index.match(A[:3]).tolist() == [0, 0, 0]


def test_what_is_removed_without_being_held_is_nothing() -> None:
    index = made()
    index.removed(0, A)
    index.stored(0, None, A[:3])
    index.removed(1, A)
    index.removed(0, A[5:])
    assert index.match(A).tolist() == [3, 0, 0]


def test_unknown_holders_are_refused() -> None:
    index = made(1)
    index.expire(0)
    for call in (lambda h: index.stored(h, None, A), lambda h: index.removed(h, A), index.expire):
        for holder in (-1, 0, 1):
            with pytest.raises(KeyError, match="no holder"):
                call(holder)
    assert index.match(A).tolist() == [0]


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_holders"):
        BlockIndex(max_holders=0)
    with pytest.raises(ValueError, match="max_holders"):
        BlockIndex(max_holders=32_769)
    with pytest.raises(ValueError, match="capacity_bytes"):
        BlockIndex(1000)
    index = BlockIndex(2**20, max_holders=1)
    index.open()
    with pytest.raises(OverflowError, match="1 holders"):
        index.open()


def test_when_it_is_full_the_newest_blocks_are_dropped_and_memory_stays_in_bounds() -> None:
    capacity = 2**20
    index = BlockIndex(capacity, max_holders=100)
    for _ in range(100):
        index.open()
    rng = np.random.default_rng(0)
    stored = 0
    first = rng.integers(1, 2**63, 64, np.uint64)
    index.stored(0, None, first)
    while index.dropped < 1000:
        keys = rng.integers(1, 2**63, 64, np.uint64)
        for holder in rng.choice(100, 3, replace=False):
            index.stored(int(holder), None, keys)
        stored += 64
        assert index.bytes <= capacity
    assert index.blocks == index.max_blocks >= capacity // 80
    assert index.match(first)[0] == 64
    index.removed(0, first)
    index.stored(1, None, first[:10])
    assert index.match(first)[1] == 10


def test_a_chain_as_long_as_a_prompt_is_taken_apart_from_either_end() -> None:
    index = made(2)
    keys = np.random.default_rng(0).integers(1, 2**63, 6250, np.uint64)
    for order in (keys, keys[::-1].copy()):
        for holder in range(2):
            index.stored(holder, None, keys)
        assert index.match(keys).tolist() == [6250, 6250]
        for holder in range(2):
            index.removed(holder, order)
        assert index.blocks == index.entries == 0


def test_the_table_grows_while_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "FIRST_SLOTS", 16)
    index = made(1)
    keys = np.random.default_rng(0).integers(1, 2**63, 5000, np.uint64)
    for i in range(0, 5000, 50):
        index.stored(0, None if i == 0 else int(keys[i - 1]), keys[i : i + 50])
        assert index.match(keys).tolist() == [i + 50]
    while index.maintain():
        pass
    assert index.match(keys).tolist() == [5000]
    assert index.tables.state[NODES] == 5002


def test_it_can_be_compiled_beforehand() -> None:
    warm()


def test_counts_are_told() -> None:
    index = made(2)
    index.stored(0, None, A)
    index.stored(1, None, A[:10])
    told = index.stats()
    assert told.pop("bytes") == index.bytes > 0
    assert told == {"holders": 2, "blocks": 20, "entries": 30, "sets": 1, "dropped": 0}


# Windows


def windowed(*needed: int) -> BlockIndex:
    """Holder 0 has windows, holder 1 none; both have all of A."""
    index = BlockIndex(2**20)
    index.open(needed)
    index.open()
    for holder in range(2):
        index.stored(holder, None, A)
    return index


def test_a_hit_ends_where_the_window_before_it_is_there() -> None:
    index = windowed(3)
    assert index.match(A).tolist() == [0, 20]
    index.stored(0, int(A[4]), A[5:12], window=1)
    assert index.match(A).tolist() == [12, 20]
    assert index.match(B).tolist() == [12, 12]
    assert [int(index.match(A[:n])[0]) for n in range(6, 13)] == [0, 0, 8, 9, 10, 11, 12]
    index.removed(0, A[10:11], window=1)
    assert index.match(A).tolist() == [10, 20]
    index.removed(0, A[8:9])
    assert index.match(A).tolist() == [8, 20]


def test_a_window_that_reaches_the_first_block_needs_no_more() -> None:
    index = windowed(3)
    index.stored(0, None, A[:2], window=1)
    assert index.match(A).tolist() == [2, 20]


def test_all_windows_of_a_holder_must_be_there() -> None:
    index = windowed(2, 0)
    index.stored(0, None, A, window=1)
    assert index.match(A).tolist() == [0, 20]
    index.stored(0, int(A[6]), A[7:8], window=2)
    assert index.match(A).tolist() == [8, 20]
    index.removed(0, A[6:7], window=1)
    assert index.match(A).tolist() == [0, 20]
    index.stored(0, int(A[2]), A[3:4], window=2)
    assert index.match(A).tolist() == [4, 20]
    assert index.has_states(0) and not index.has_states(1)


def test_the_windows_of_a_holder_go_with_it() -> None:
    index = windowed(3)
    index.stored(0, None, A, window=1)
    index.cleared(0)
    index.stored(0, None, A)
    assert index.match(A).tolist() == [0, 20]
    index.expire(0)
    assert index.open() == 0
    index.stored(0, None, A)
    assert index.match(A).tolist() == [20, 20]
    with pytest.raises(KeyError, match="holder 0 has no window 1"):
        index.stored(0, None, A, window=1)


def test_a_window_counts_as_a_holder() -> None:
    index = BlockIndex(2**20, max_holders=3)
    index.open([4])
    with pytest.raises(OverflowError):
        index.open([4])
    index.open()
    index.expire(0)
    for _ in range(10):
        index.expire(index.open([4]))
