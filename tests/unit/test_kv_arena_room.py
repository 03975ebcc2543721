"""Who makes room in the arena: evictions, quotas, memory that moves between namespaces."""

from __future__ import annotations

import numpy as np

from headrace_kvstore.arena.arena import NO_ROOM
from headrace_kvstore.policy.base import Mask, Policy, Slots, Table
from tests.support.kvarena import (
    BIG_BLOCK,
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


def test_the_least_recently_used_block_makes_room_and_a_leaf_before_its_parent(make: Make) -> None:
    clock = machine_clock()
    arena = make(blocks=4, clock=clock)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
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
    assert broken(arena) == []


def test_leased_pinned_and_unfinished_blocks_stay_whatever_the_policy_says(make: Make) -> None:
    class Everything(Policy):
        def choose(self, table: Table, now_s: float, need: int, among: Mask | None = None) -> Slots:
            return np.arange(len(table))

    clock = machine_clock()
    arena = make(blocks=4, clock=clock)
    arena.policy.policy = Everything()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 0, 1, 2)
    arena.reserve(row, hashes(3), [0], [0])
    arena.lease(row, hashes(0), 5.0)
    assert arena.pin(row, hashes(1, 9)).tolist() == [True, False]
    store(arena, row, 4)
    assert present(arena, row, *range(5)) == [0, 1, 4]
    arena.lease(row, hashes(4), 5.0)
    assert store(arena, row, 5) == [NO_ROOM]
    clock.now_s += 5.0
    assert (store(arena, row, 5) >= 0).all()
    arena.pin(row, hashes(1), pinned=False)
    store(arena, row, 6, 7)
    assert 1 not in present(arena, row, *range(8))
    assert broken(arena) == []


def test_a_tenant_over_its_quota_gives_up_its_own_blocks(make: Make) -> None:
    clock = machine_clock()
    arena = make(blocks=8, clock=clock, quotas={7: 2 * SLOT_BYTES})
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    store(arena, row, 0, 1)
    for number in range(10, 15):
        clock.now_s += 1
        store(arena, row, number, tenant=7)
    assert present(arena, row, 0, 1, *range(10, 15)) == [0, 1, 13, 14]
    store(arena, row, 13, 14, tenant=7)
    assert present(arena, row, 13, 14) == [13, 14]


def test_memory_moves_to_the_namespace_that_stores_from_the_one_that_idles(make: Make) -> None:
    clock = machine_clock()
    arena = make(blocks=32, clock=clock)
    idle, busy = (
        arena.register_namespace(DIGEST, BLOCK, LAYERS),
        arena.register_namespace(OTHER, BIG_BLOCK, 1),
    )
    for number in range(40):
        clock.now_s += 1
        store(arena, idle, number)
    assert arena.stats()["segments_free"] == 0
    for number in range(40):
        clock.now_s += 1
        assert (store(arena, busy, number) >= 0).all()
        assert broken(arena) == []
    counts = [space["blocks"] for space in arena.stats()["namespaces"]]
    assert counts[0] <= 2 and counts[1] >= 9  # a rest of two small blocks holds no big one


def test_memory_stays_with_a_namespace_whose_blocks_are_newer(make: Make) -> None:
    clock = machine_clock()
    arena = make(blocks=32, clock=clock)
    one, two = (
        arena.register_namespace(DIGEST, BLOCK, LAYERS),
        arena.register_namespace(OTHER, BIG_BLOCK, 1),
    )
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
