"""`BlockIndex` against a naive one: a set of blocks per holder, and a walk along the prompt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.router.blocks import block_index as index_module
from headrace.router.blocks import prefix_tree
from headrace.router.blocks.block_index import BlockIndex
from headrace.router.blocks.hash_table import find
from headrace.router.blocks.holder_sets import NODES, SETS, SINGLES

NODE_COUNT = 60
UNKNOWN = 12345
"""Key of a block that no holder has."""
PARENTS = [None, *[(7 * i) % i if i % 5 else i - 1 for i in range(1, NODE_COUNT)]]
"""A forest of prefixes with long and short branches; the parent of each block, None for a first."""
PARENTS[11] = PARENTS[30] = None
KEYS = np.array([(i + 1) * 0x9E3779B97F4A7C15 % 2**64 for i in range(NODE_COUNT)], np.uint64)


def path(block: int) -> list[int]:
    found = [block]
    while (parent := PARENTS[found[-1]]) is not None:
        found.append(parent)
    return found[::-1]


def check(index: BlockIndex) -> None:
    """What `prefix_tree` says always holds, and that counts and links are right."""
    t = index.tables
    words = t.bits.shape[1]
    dead = sum(1 << slot for slot in index.swept + index.dead)

    def members(one: int) -> int:
        if one > SINGLES:
            return sum(int(t.bits[one - SINGLES, w]) << (64 * w) for w in range(words))
        return 1 << (one - 1) if one else 0

    live = [n for n in range(2, int(t.state[NODES])) if t.nodes[n]["usable"] | t.nodes[n]["orphan"]]
    assert len(live) == index.blocks
    pairs, blocks_of = 0, dict[int, int]()
    for n in live:
        node = t.nodes[n]
        usable, orphan = members(int(node["usable"])), members(int(node["orphan"]))
        assert not usable & orphan
        pairs += (usable | orphan).bit_count()
        for one in (int(node["usable"]), int(node["orphan"])):
            if one > SINGLES:
                blocks_of[one - SINGLES] = blocks_of.get(one - SINGLES, 0) + 1
        parent = int(node["parent"])
        if parent == 0:
            assert not usable & ~dead
        elif parent != prefix_tree.ROOT:
            assert parent in live and t.nodes[parent]["parent"] != 0
            above = members(int(t.nodes[parent]["usable"]))
            assert usable & ~dead == (usable | orphan) & above & ~dead
        else:
            assert not orphan & ~dead
        if node["next"]:
            assert t.nodes[node["next"]]["before"] == n
            assert t.nodes[node["next"]]["parent"] == parent
        if node["before"]:
            assert t.nodes[node["before"]]["next"] == n
        elif parent:
            assert t.nodes[parent]["child"] == n
        assert find(t, node["key"]) == n
    assert pairs == index.entries
    assert len(blocks_of) == t.state[SETS]
    for row, blocks in blocks_of.items():
        assert t.sets[row]["blocks"] == blocks
        assert t.sets[row]["size"] == members(SINGLES + row).bit_count() > 1
    assert np.count_nonzero(t.set_table) == len(blocks_of)


class Machine(RuleBasedStateMachine):
    """Holders come and go; their events come in runs, with or without their place."""

    exact = True

    def __init__(self) -> None:
        super().__init__()
        self.index = self.made()
        self.held: dict[int, set[int]] = {}

    def made(self) -> BlockIndex:
        return BlockIndex(2**20, max_holders=70)

    holders = st.integers(0, 200)
    blocks = st.integers(0, NODE_COUNT - 1)

    def holder(self, number: int) -> int:
        return sorted(self.held)[number % len(self.held)]

    @precondition(lambda self: len(self.held) < 70)
    @rule()
    def opens(self) -> None:
        holder = self.index.open()
        assert holder not in self.held
        self.held[holder] = set()

    @precondition(lambda self: not self.held)
    @rule(count=st.integers(1, 70))
    def opens_many(self, count: int) -> None:
        for _ in range(count):
            self.opens()

    @precondition(lambda self: self.held)
    @rule(holder=holders, block=blocks, first=st.integers(0, 60), placed=st.booleans())
    def stores(self, holder: int, block: int, first: int, placed: bool) -> None:
        """A run along a prefix that begins anywhere in it."""
        holder, run = self.holder(holder), path(block)
        first %= len(run)
        parent = None if first == 0 else int(KEYS[run[first - 1]])
        self.index.stored(holder, parent if placed else UNKNOWN, KEYS[run[first:]])
        self.held[holder].update(run[first:])

    @precondition(lambda self: self.held)
    @rule(block=blocks)
    def all_store(self, block: int) -> None:
        for holder in self.held:
            self.index.stored(holder, None, KEYS[path(block)])
            self.held[holder].update(path(block))

    @precondition(lambda self: self.held)
    @rule(holder=holders, some=st.lists(blocks, max_size=20))
    def removes(self, holder: int, some: list[int]) -> None:
        holder = self.holder(holder)
        self.index.removed(holder, KEYS[some])
        self.held[holder].difference_update(some)

    @precondition(lambda self: self.held)
    @rule(holder=holders)
    def clears(self, holder: int) -> None:
        holder = self.holder(holder)
        self.index.cleared(holder)
        self.held[holder].clear()

    @precondition(lambda self: self.held)
    @rule(holder=holders)
    def expires(self, holder: int) -> None:
        holder = self.holder(holder)
        self.index.expire(holder)
        del self.held[holder]

    @rule(blocks=st.integers(1, 40))
    def maintains(self, blocks: int) -> None:
        self.index.maintain(blocks)

    @rule(block=blocks)
    def asks(self, block: int) -> None:
        self.ask(block)

    def ask(self, block: int) -> None:
        prompt = path(block)
        found = self.index.match(KEYS[prompt])
        assert len(found) == self.index.holders
        for holder, blocks in enumerate(found):
            held = self.held.get(holder, set())
            known = next((i for i, one in enumerate(prompt) if one not in held), len(prompt))
            assert blocks == known if self.exact else blocks <= known

    @invariant()
    def is_sound(self) -> None:
        check(self.index)

    def teardown(self) -> None:
        for block in range(NODE_COUNT):
            self.ask(block)
        check(self.index)
        for holder in self.held:
            self.index.expire(holder)
        while self.index.maintain():
            pass
        assert self.index.blocks == self.index.entries == self.index.tables.state[SETS] == 0
        assert not np.any(self.index.tables.table)


class Crowded(Machine):
    """Too little room: what is known may be less, never more."""

    exact = False

    def made(self) -> BlockIndex:
        index = BlockIndex(2**20, max_holders=70)
        t = index.tables
        index.tables = t._replace(
            nodes=t.nodes[:30].copy(), sets=t.sets[:4].copy(), bits=t.bits[:4].copy()
        )
        return index


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that they grow, a few entries at a call."""
    monkeypatch.setattr(index_module, "FIRST_SLOTS", 8)
    monkeypatch.setattr(index_module, "DRAINED_SLOTS", 1)
    monkeypatch.setattr(index_module, "SWEPT_BLOCKS", 1)
    yield


TestBlockIndex = Machine.TestCase
TestCrowdedBlockIndex = Crowded.TestCase
TestBlockIndex.settings = TestCrowdedBlockIndex.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
