"""The eviction policy in the arena: one for all handles, learning in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY, SLOT, hash_word
from headrace_kvstore.policy.base import Policy
from headrace_kvstore.policy.cost_aware import CostAware
from headrace_kvstore.policy.recency import LRU
from headrace_kvstore.policy.registry import affordable, state_bytes
from headrace_kvstore.policy.shared_policy import SharedPolicy
from tests.support.clock import Clock
from tests.support.kvarena import DIGEST, block_hash, hashes, machine_clock, present
from tests.support.kvcheck import broken

BLOCK, LAYERS = 20480, 1
SIZE = 32 << 20
"""The least that the default's state is an eighth of, more or less: 1,500 blocks."""


@pytest.fixture
def clock() -> Clock:
    return machine_clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Any]:
    """Handles on one arena."""
    made: list[Arena] = []

    def open_(policy: str = "cost-aware", **options: Any) -> Arena:
        arena = Arena.create_or_attach(
            "arena",
            *(SIZE,),
            folder=tmp_path,
            block_bytes=BLOCK,
            layers=LAYERS,
            smallest_block_bytes=BLOCK,
            policy=policy,
            clock=clock,
            **options,
        )
        made.append(arena)
        return arena

    yield open_
    for arena in made:
        arena.close()


def ask(arena: Arena, row: int, *numbers: int, compute_s: float = 0.05, **how: Any) -> list[int]:
    """A prompt of these blocks: tell the policy, use what is there, store the rest."""
    assert arena.record_prompt(row, hashes(*numbers))
    arena.release(arena.lease(row, hashes(*numbers), 1.0))
    parents = [0, *(hash_word(block_hash(n)) for n in numbers)][: len(numbers)]
    depths = range(len(numbers))
    slots = arena.reserve(row, hashes(*numbers), parents, depths, compute_s=compute_s, **how)
    given = slots >= 0
    arena.publish(slots[given], np.zeros((int(given.sum()), LAYERS)))
    return [n for n, g in zip(numbers, given, strict=True) if g]


def chain(number: int, blocks: int = 4) -> list[int]:
    return [10_000 * (number + 1) + i for i in range(blocks)]


@pytest.mark.parametrize("name, kind", [("cost-aware", CostAware), ("lru", LRU)])
def test_each_policy_keeps_an_arena_within_its_room(opened: Any, name: str, kind: type) -> None:
    arena = opened(name)
    assert type(arena.policy.policy) is kind and arena.policy.name == name
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    for number in range(60):
        ask(arena, row, *chain(number, 40))
    assert present(arena, row, *chain(59, 40)) == chain(59, 40)
    assert arena.stats()["evicted_total"] > 0
    assert broken(arena) == []


def test_who_comes_later_evicts_by_the_policy_that_is_there(opened: Any) -> None:
    first, second = opened("lru"), opened("cost-aware")
    assert first.policy.name == second.policy.name == "lru"


def test_an_unknown_policy_is_refused(opened: Any) -> None:
    with pytest.raises(ValueError, match=r"'mru' is unknown; give one of lru, cost-aware"):
        opened("mru")


def test_a_store_too_small_for_the_state_is_kept_by_lru() -> None:
    assert affordable("cost-aware", 1 << 20) == "lru"
    assert affordable("cost-aware", 1 << 30) == "cost-aware"
    assert state_bytes("lru", 1 << 40) == 0


def test_state_of_another_version_is_not_touched() -> None:
    state = np.full(1000, 7, np.uint8)
    shared = SharedPolicy("cost-aware", state, 1 << 20, NoLock())
    assert shared.name == "lru" and (state == 7).all()


def test_what_one_handle_learns_another_decides_by(opened: Any, clock: Clock) -> None:
    """Chats that come back are stored beside scans that never do; the scans go first."""
    learner, evictor = opened(), opened()
    row = learner.register_namespace(DIGEST, BLOCK, LAYERS)
    for number in range(80):
        learner.record_prompt(row, hashes(*chain(number, 4)))
        clock.now_s += 1.0
    clock.now_s += 20.0
    for number in range(80):
        learner.record_prompt(row, hashes(*chain(number, 5)))
        clock.now_s += 1.0
    ask(learner, row, *chain(200, 4))
    for number in range(300, 340):
        ask(learner, row, *chain(number, 33))
        clock.now_s += 0.1
    ask(evictor, row, *chain(201, 400), compute_s=5.0)
    assert evictor.stats()["evicted_total"] > 0
    assert present(evictor, row, *chain(200, 4)) == chain(200, 4)


def test_a_tenant_over_its_quota_gives_up_its_own_blocks(opened: Any, clock: Clock) -> None:
    arena = opened(quotas={7: 10 * BLOCK * 2}, default_quota=None)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    for number in range(6):
        clock.now_s += 1
        ask(arena, row, *chain(number), tenant=7)
    held = arena.table["tenant"][arena.table["bytes"] > 0]
    assert 0 < (held == 7).sum() * arena.table["bytes"].max() <= 20 * BLOCK
    assert arena.stats()["evicted_total"] > 0


def test_the_default_quota_is_for_tenants_that_are_not_listed(opened: Any, clock: Clock) -> None:
    arena = opened(quotas={7: SIZE}, default_quota=4 * BLOCK * 2)
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    for tenant in (0, 7, 8):
        for number in range(5):
            clock.now_s += 1
            ask(arena, row, *chain(100 * tenant + number), tenant=tenant)
    counts = {t: int((arena.table["tenant"][arena.table["bytes"] > 0] == t).sum()) for t in (7, 8)}
    assert counts[7] == 20 and counts[8] <= 8


def test_a_policy_that_fails_is_replaced_for_that_choice(opened: Any) -> None:
    class Broken(Policy):
        def choose(self, *_: Any) -> np.ndarray:
            raise ZeroDivisionError

    arena = opened("lru")
    arena.policy.policy = Broken()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    for number in range(60):
        assert ask(arena, row, *chain(number, 40)) == chain(number, 40)
    assert broken(arena) == []


def test_look_ups_and_leases_wait_for_no_choice(opened: Any) -> None:
    arena, other = opened(), opened()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    ask(arena, row, *chain(0))
    with other.policy:
        assert present(arena, row, *chain(0)) == chain(0)
        arena.release(arena.lease(row, hashes(*chain(0)), 1.0))


def test_a_policy_that_others_keep_is_not_waited_for_for_ever(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, other = opened(), opened()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    monkeypatch.setattr("headrace_kvstore.arena.locking.PATIENCE_S", 0.02)
    with other.policy:
        assert not arena.record_prompt(row, hashes(*chain(0)))
    assert arena.record_prompt(row, hashes(*chain(0)))


def test_after_a_death_inside_the_next_begins_anew(opened: Any) -> None:
    arena = opened()
    row = arena.register_namespace(DIGEST, BLOCK, LAYERS)
    for number in range(10):
        ask(arena, row, *chain(number))
    with pytest.raises(KeyboardInterrupt), arena.policy as policy:
        policy._prompts["cell"] = -5
        policy._exposure_s[:] = np.nan
        raise KeyboardInterrupt
    for number in range(60):
        ask(arena, row, *chain(number, 40))
    assert np.isfinite(arena.policy.policy._best_rate).all()
    assert broken(arena) == []


class NoLock:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def small(state: np.ndarray) -> SharedPolicy:
    return SharedPolicy("cost-aware", state, 1 << 20, NoLock())


@given(seed=st.integers(0, 2**32), value=st.sampled_from([None, 0, 1, 127, 128, 255]))
@settings(max_examples=25)
def test_any_bytes_in_the_state_do_no_harm(seed: int, value: int | None) -> None:
    """A process died inside, and this is what it left."""
    noise = np.random.default_rng(seed)
    table = np.zeros(24, SLOT)
    table["state"], table["bytes"], table["compute_s"] = READY, 1e6, 0.1
    for slot in range(24):
        table["hash"][slot] = block_hash(slot)
        table["depth"][slot] = slot % 6
        table["parent"][slot] = hash_word(block_hash(slot - 1)) if slot % 6 else 0
    state = np.zeros(state_bytes("cost-aware", 1 << 20), np.uint8)
    small(state)
    state[:] = noise.integers(0, 256, len(state)) if value is None else value
    state[:8] = 1
    shared = small(state)
    for _ in range(3):
        with shared as policy:
            policy.prompt(np.array([5, 6, 7], np.uint64), 90.0)
            chosen = policy.choose(table, 100.0, 24)
            assert sorted(chosen.tolist()) == list(range(24))


def test_the_lock_is_given_back_when_entering_fails(opened: Any) -> None:
    arena = opened()

    def fail(*_: Any) -> None:
        raise OSError

    arena.policy._inside[0] = 1
    arena.policy.policy.reset_history = fail
    with pytest.raises(OSError), arena.policy:
        pass
    del arena.policy.policy.reset_history
    with arena.policy:
        pass
