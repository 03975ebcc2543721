"""What plans will make counts until it comes, is withdrawn, or is overdue."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headrace.router.blocks.block_index import BlockIndex, Keys
from headrace.router.blocks.pending_blocks import PendingBlocks

A = np.arange(100, 120, dtype=np.uint64)
"""A prompt, and one that leaves it after 12 blocks."""
B = np.concatenate([A[:12], np.arange(200, 205, dtype=np.uint64)])


def made(holders: int = 3, **limits: int) -> tuple[BlockIndex, PendingBlocks]:
    index = BlockIndex(2**20)
    for _ in range(holders):
        index.open()
    return index, PendingBlocks(index, **limits)


def test_a_plan_counts_for_its_holders_as_far_as_a_prompt_shares_its_beginning() -> None:
    _, expected = made()
    assert expected.match(A).tolist() == [0, 0, 0]
    expected.add("a", [0, 2], A, 10.0)
    assert expected.match(A).tolist() == [20, 0, 20]
    assert expected.match(B).tolist() == [12, 0, 12]
    assert expected.match(B[12:]).tolist() == [0, 0, 0]


def test_the_longest_of_several_plans_counts_and_what_one_of_them_shares_outlives_the_other() -> (
    None
):
    _, expected = made()
    expected.add("a", [0], A, 10.0)
    expected.add("b", [0, 1], B, 10.0)
    assert expected.match(A).tolist() == [20, 12, 0]
    assert expected.withdraw("a") and not expected.withdraw("a")
    assert expected.match(A).tolist() == [12, 12, 0]


def test_a_plan_that_is_added_again_is_replaced() -> None:
    _, expected = made()
    expected.add("a", [0], A, 10.0)
    expected.add("a", [1], B, 10.0)
    assert expected.match(A).tolist() == [0, 12, 0]
    assert len(expected) == 1


def test_a_plan_whose_blocks_have_come_to_all_its_holders_counts_no_longer() -> None:
    index, expected = made()
    expected.add("a", [0, 1], A, 10.0)
    index.stored(0, None, A)
    index.stored(1, None, A[:-1])
    expected.expire(1.0)
    assert len(expected) == 1 and expected.arrived == 0
    index.stored(1, int(A[-2]), A[-1:])
    expected.expire(1.0)
    assert len(expected) == 0 and expected.arrived == 1


def test_a_plan_is_withdrawn_when_its_time_is_over() -> None:
    _, expected = made()
    expected.add("a", [0], A, 10.0)
    expected.add("b", [1], A, 20.0)
    expected.expire(9.9)
    assert expected.match(A).tolist() == [20, 20, 0]
    expected.expire(10.0)
    assert expected.match(A).tolist() == [0, 20, 0]
    assert expected.overdue == 1


def test_a_later_time_for_the_same_plan_counts() -> None:
    _, expected = made()
    expected.add("a", [0], A, 10.0)
    expected.add("a", [0], A, 30.0)
    expected.expire(10.0)
    assert len(expected) == 1 and expected.overdue == 0


def test_every_plan_is_looked_at_in_turn() -> None:
    index, expected = made()
    for i in range(10):
        keys = np.arange(1000 * i, 1000 * i + 5, dtype=np.uint64)
        expected.add(str(i), [0], keys, 10.0)
        if i >= 5:
            index.stored(0, None, keys)
    for _ in range(4):
        expected.expire(0.0, most=3)
    assert expected.arrived == 5


def test_a_holder_that_is_gone_leaves_its_number_to_another() -> None:
    index, expected = made()
    expected.add("a", [0, 1], A, 10.0)
    expected.add("b", [0], A, 10.0)
    index.expire(0)
    expected.remove_holder(0)
    assert index.open() == 0
    assert expected.match(A).tolist() == [0, 20, 0]
    assert len(expected) == 1


def test_plans_are_bounded_and_the_first_due_goes_first() -> None:
    _, expected = made(max_plans=2, max_blocks=45)
    expected.add("a", [0], A, 12.0)
    expected.add("b", [1], A, 10.0)
    expected.add("c", [2], B[:5], 11.0)
    assert expected.match(A).tolist() == [20, 0, 5]
    expected.add("d", [2], A, 13.0)
    assert expected.match(A).tolist() == [20, 0, 20]
    assert expected.displaced == 2
    with pytest.raises(ValueError, match="46 blocks, more than 45"):
        expected.add("e", [0], np.arange(46, dtype=np.uint64), 1.0)
    with pytest.raises(ValueError, match="holders"):
        expected.add("e", [0] * 9, A, 1.0)


def test_it_is_the_longest_common_beginning_with_any_plan_and_leaves_nothing_behind() -> None:
    rng = random.Random(0)
    _, expected = made(holders=5)
    plans: dict[str, tuple[list[int], Keys]] = {}

    def prompt() -> Keys:
        path = [1]
        for _ in range(rng.randrange(12)):
            path.append(path[-1] * 3 + rng.randrange(2))
        return np.array(path, np.uint64)

    for step in range(2000):
        if rng.random() < 0.5:
            plan, holders, keys = f"{rng.randrange(60)}", rng.sample(range(5), 2), prompt()
            expected.add(plan, holders, keys, float(step + 100))
            plans[plan] = holders, keys
        elif plans:
            plan = rng.choice(sorted(plans))
            del plans[plan]
            assert expected.withdraw(plan)
        asked, found = prompt(), [0] * 5
        for holders, keys in plans.values():
            both = min(len(asked), len(keys))
            differs = np.flatnonzero(asked[:both] != keys[:both])
            common = int(differs[0]) if len(differs) else both
            for holder in holders:
                found[holder] = max(found[holder], common)
        assert expected.match(asked).tolist() == found
    for plan in plans:
        expected.withdraw(plan)
    assert expected.stats()["blocks"] == 0 and expected._index.blocks == 0
    assert len(expected._times) <= 64 + 1


def test_where_layers_keep_states_a_plan_counts_for_the_whole_of_its_prompt_only() -> None:
    index = BlockIndex(2**20)
    for windows in ((0,), (4,), ()):
        index.open(windows)
    expected = PendingBlocks(index)
    expected.add("a", [0, 1, 2], A, 10.0)
    assert expected.match(A).tolist() == [20, 20, 20]
    assert expected.match(B).tolist() == [0, 12, 12]
    longer = np.concatenate([A, np.arange(900, 905, dtype=np.uint64)])
    assert expected.match(longer).tolist() == [20, 20, 20]
