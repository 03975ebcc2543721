"""Blocks that are retained: until when, how many, and beside which others."""

from __future__ import annotations

import pytest

from headrace_kvstore.arena.arena import NO_ROOM, Arena
from headrace_kvstore.arena.pins import MAX_PINNED_SHARE, MAX_RETAINED_SHARE, MAX_TENANT_SHARE
from tests.support.kvarena import (
    BLOCK,
    DIGEST,
    LAYERS,
    OTHER,
    SLOT_BYTES,
    Make,
    hashes,
    machine_clock,
    present,
    store,
)
from tests.support.kvcheck import broken

BLOCKS = 64
ALL, OWN = BLOCKS // 4, BLOCKS // 8
"""Blocks that may be retained: of all tenants, and of one."""


def retain(arena: Arena, row: int, *numbers: int, seconds: float = 60.0, **how: int) -> list[bool]:
    until_s = arena._clock() + seconds
    return [bool(kept) for kept in arena.retain(row, hashes(*numbers), until_s, **how)]


def flood(arena: Arena, row: int, **how: int) -> None:
    """Store so many other blocks that each block that may be evicted is."""
    for number in range(1000, 1000 + 3 * BLOCKS):
        assert (store(arena, row, number, **how) != NO_ROOM).all()


@pytest.fixture
def filled(make: Make) -> tuple[Arena, int]:
    """A full arena of BLOCKS blocks without a tenant, 0 to BLOCKS - 1."""
    arena = make(blocks=BLOCKS, clock=machine_clock())
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, *range(BLOCKS))
    return arena, row


def test_retained_blocks_outlive_any_others_until_their_time(filled: tuple[Arena, int]) -> None:
    arena, row = filled
    assert retain(arena, row, 0, 1, 2) == [True] * 3
    flood(arena, row)
    assert present(arena, row, *range(BLOCKS)) == [0, 1, 2]
    assert arena.stats()["retained"] == 3
    assert arena.stats()["retained_bytes"] == 3 * SLOT_BYTES
    arena._clock.now_s += 60.0  # type: ignore[attr-defined]
    assert arena.stats()["retained"] == arena.stats()["retained_bytes"] == 0
    flood(arena, row)
    assert present(arena, row, 0, 1, 2) == []
    assert broken(arena) == []


def test_a_block_that_is_not_there_is_not_retained(filled: tuple[Arena, int]) -> None:
    arena, row = filled
    arena.reserve(row, hashes(BLOCKS), [0], [0])
    assert retain(arena, row, 1, BLOCKS, BLOCKS + 1, 2) == [True, False, False, True]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_time_that_is_over_retains_nothing(filled: tuple[Arena, int], seconds: float) -> None:
    arena, row = filled
    assert retain(arena, row, 0, seconds=seconds) == [False]
    assert not arena.table["kept_until_s"].any()


@pytest.mark.parametrize("until_s", [float("inf"), float("nan"), float("-inf")])
def test_nobody_but_an_operator_keeps_blocks_for_ever(
    filled: tuple[Arena, int], until_s: float
) -> None:
    arena, row = filled
    with pytest.raises(ValueError, match="until a time"):
        arena.retain(row, hashes(0), until_s)
    with pytest.raises(ValueError, match="no namespace"):
        arena.retain(row + 1, hashes(0), arena._clock() + 1)


def test_a_shorter_time_shortens_no_longer_one(filled: tuple[Arena, int]) -> None:
    arena, row = filled
    for seconds, kept_s in ((60.0, 60.0), (5.0, 60.0), (90.0, 90.0)):
        assert retain(arena, row, 0, seconds=seconds) == [True]
        slot = arena.lookup(row, hashes(0))[0]
        assert arena.table["kept_until_s"][slot] - arena._clock() == pytest.approx(kept_s)


def test_pins_stay_pins(filled: tuple[Arena, int]) -> None:
    arena, row = filled
    arena.pin(row, hashes(0))
    assert retain(arena, row, 0, 1) == [True, True]
    assert arena.stats()["pinned"] == arena.stats()["retained"] == 1
    assert len(arena.pinned()) == 1, "operators see their own pins only"
    arena._clock.now_s += 60.0  # type: ignore[attr-defined]
    flood(arena, row)
    assert present(arena, row, 0, 1) == [0]


def test_an_operator_unpins_no_retained_block(filled: tuple[Arena, int]) -> None:
    arena, row = filled
    retain(arena, row, 0, 1)
    arena.pin(row, hashes(1))
    assert arena.pin(row, hashes(0, 1), pinned=False).all()
    flood(arena, row)
    assert present(arena, row, 0, 1) == [0], "the pin took the place of the second's retention"


def test_one_tenant_takes_half_of_the_room_and_all_together_all(make: Make) -> None:
    arena = make(blocks=BLOCKS, clock=machine_clock())
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    for tenant in range(4):
        store(arena, row, *range(10 * tenant, 10 * tenant + 10), tenant=tenant)
    assert retain(arena, row, *range(10), tenant=0) == [True] * OWN + [False] * (10 - OWN)
    assert retain(arena, row, *range(OWN), tenant=0) == [True] * OWN, "these have their room"
    assert retain(arena, row, OWN, 0, tenant=0) == [False, True]
    assert sum(retain(arena, row, *range(10, 16), tenant=1)) == 6
    assert sum(retain(arena, row, *range(20, 30), tenant=2)) == ALL - OWN - 6
    assert retain(arena, row, *range(30, 40), tenant=3) == [False] * 10
    arena._clock.now_s += 60.0  # type: ignore[attr-defined]
    assert sum(retain(arena, row, *range(30, 40), tenant=3)) == OWN, "the others' time is over"


def test_a_tenant_with_a_quota_can_always_store(make: Make) -> None:
    arena = make(blocks=BLOCKS, clock=machine_clock(), quotas={7: 6 * SLOT_BYTES})
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, *range(6), tenant=7)
    assert retain(arena, row, *range(6), tenant=7) == [True] * 3 + [False] * 3
    flood(arena, row, tenant=7)
    assert int((arena.table["tenant"] == 7).sum()) == 6
    assert present(arena, row, *range(6)) == [0, 1, 2]


def test_with_all_pins_and_retentions_taken_saves_find_room(make: Make) -> None:
    arena = make(blocks=BLOCKS, clock=machine_clock())
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    own = {tenant: range(32 * tenant, 32 * tenant + 32) for tenant in (0, 1)}
    for tenant, numbers in own.items():
        for number in numbers:
            store(arena, row, number, tenant=tenant)
        arena.pin(row, hashes(*numbers[:20]))
        retain(arena, row, *numbers, tenant=tenant)
    assert arena.stats()["pinned"] == MAX_PINNED_SHARE * BLOCKS
    assert arena.stats()["retained"] == MAX_RETAINED_SHARE * BLOCKS
    assert MAX_TENANT_SHARE * 2 == 1
    flood(arena, row)
    assert arena.stats()["pinned"] == 32 and arena.stats()["retained"] == 16
    assert broken(arena) == []


def test_blocks_of_weights_that_nobody_serves_any_more_give_way(make: Make) -> None:
    clock = machine_clock()
    old, arena = make(blocks=BLOCKS, clock=clock), make(blocks=BLOCKS, clock=clock)
    row = old.register_namespace(DIGEST, BLOCK, LAYERS)
    new_row = arena.register_namespace(OTHER, BLOCK, LAYERS)
    store(old, row, *range(10))
    store(arena, new_row, *range(10))
    retain(old, row, *range(10))
    assert not any(retain(arena, new_row, 0)), "the first engine lives"
    old.close()
    assert all(retain(arena, new_row, 0))
    assert arena.stats()["retained"] == 1


def test_retained_blocks_can_be_cleared_and_a_repair_leaves_them(filled: tuple[Arena, int]) -> None:
    arena, row = filled
    retain(arena, row, 0, 1)
    arena.words[0] += 1  # a process died inside a section
    assert broken(arena) == []
    assert arena.stats()["retained"] == 2
    assert arena.discard(row, hashes(0)) == 1
    assert arena.clear() == BLOCKS - 1
    assert not arena.table["kept_until_s"].any()


def test_another_block_in_the_slot_is_not_kept(filled: tuple[Arena, int]) -> None:
    arena, row = filled
    retain(arena, row, *range(OWN))
    arena.clear()
    store(arena, row, *range(100, 100 + BLOCKS))
    assert arena.stats()["retained"] == 0
