"""Which prefixes are hits beside recurrent layers, and what is loaded for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.connector.state_groups import StateGroups
from headrace_kvstore.lookup.state_hits import ASKED_AT_ONCE

GROUPS = StateGroups(attention=1, recurrent=(0, 2))
MANY = 2 * ASKED_AT_ONCE + 3


def blocks(n: int) -> list[bytes]:
    return [b"block %d" % number for number in range(n)]


def hit(n: int, stored: set[tuple[int, int]]) -> int:
    """The hit of a prompt of n blocks, with these states stored: blocks before each, and group."""
    names = blocks(n)
    there = {GROUPS.name(names[end - 1], group) for end, group in stored}
    return GROUPS.hit(names, lambda asked: [name not in there for name in asked])


@given(
    st.integers(0, MANY),
    st.sets(st.tuples(st.integers(1, MANY), st.sampled_from(GROUPS.recurrent))),
)
def test_the_longest_prefix_with_all_states_after_it_is_a_hit(
    n: int, stored: set[tuple[int, int]]
) -> None:
    stored = {(end, group) for end, group in stored if end <= n}
    ends = [end for end in range(n + 1) if {(end, 0), (end, 2)} <= stored]
    assert hit(n, stored) == max(ends, default=0)


def test_one_group_of_recurrent_layers_is_enough() -> None:
    groups, names = StateGroups(attention=0, recurrent=(1,)), blocks(3)
    there = groups.name(names[1], 1)
    assert groups.hit(names, lambda asked: [name != there for name in asked]) == 2


def test_names_differ_by_block_and_group_and_from_the_blocks() -> None:
    names = blocks(3)
    made = {GROUPS.name(block, group) for block in names for group in range(3)}
    assert len(made | set(names)) == 12


def test_a_hit_loads_the_kv_of_its_blocks_and_the_states_after_the_last_one() -> None:
    tables = [[0, 0, 0, 7, 9], [1, 2, 3, 4, 5], [0, 0, 0, 8, 10]]
    names = blocks(4)[1:]
    ids, loaded = GROUPS.of_prefix(names, tables, 1)
    assert ids == [2, 3, 4, 7, 8]
    assert loaded == [*names, GROUPS.name(names[-1], 0), GROUPS.name(names[-1], 2)]
