"""The arena against a plain dict, under any sequence of calls through two handles."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from itertools import pairwise

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.geometry import SECTION
from headrace_kvstore.blocks.slot_record import FREE, STORED
from tests.support.kvcheck import broken

SIZES = ((4000, 3), (9000, 1), (2000, 2))  # block bytes, layers of three namespaces
LAST_HASH = 23
ROWS = st.integers(0, len(SIZES) - 1)
NUMBERS = st.lists(st.integers(0, LAST_HASH), min_size=1, max_size=6)
SIDES = st.integers(0, 1)
Key = tuple[int, int]


def to_hashes(numbers: list[int]) -> list[bytes]:
    # alike in their first 24 bytes, as no real hashes are
    return [bytes(24) + number.to_bytes(8, "little") for number in numbers]


def pattern(row: int, number: int) -> int:
    return 1 + row * (LAST_HASH + 1) + number


class ArenaMachine(RuleBasedStateMachine):
    """`ready` and `writing` are what the arena should hold; only eviction is left to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = time.monotonic()
        self.folder = tempfile.mkdtemp()
        self.handles: list[Arena] = []
        self.ready: dict[Key, int] = {}
        self.writing: dict[Key, int] = {}
        self.leased_until_s: dict[Key, float] = {}
        self.pinned: set[Key] = set()
        self.retained_until_s: dict[Key, float] = {}
        self.told: set[Key] = set()
        self.since = 0

    @initialize(blocks=st.integers(1, 30))
    def start(self, blocks: int) -> None:
        self.size_bytes = 60_000 + blocks * 4096
        self.handles = [self.attach(), self.attach()]

    def attach(self) -> Arena:
        arena = Arena.create_or_attach(
            "arena",
            self.size_bytes,
            folder=self.folder,
            block_bytes=4000,
            layers=3,
            smallest_block_bytes=2000,
            clock=lambda: self.now_s,
        )
        for row, (block_bytes, layers) in enumerate(SIZES):  # which it then uses
            try:
                assert arena.register_namespace(bytes([row] * 16), block_bytes, layers) == row
            except ValueError:
                assert block_bytes == 9000  # larger than a segment of the smallest arenas
                assert arena.register_namespace(bytes([row] * 16), 100, layers) == row
        return arena

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()
        shutil.rmtree(self.folder)

    def evictable(self, row: int) -> int:
        return sum(
            key[0] == row
            and key not in self.pinned
            and self.retained_until_s.get(key, 0.0) <= self.now_s
            and self.leased_until_s.get(key, 0.0) <= self.now_s
            for key in self.ready
        )

    def note_evictions(self) -> None:
        """Take what is gone out of the model; only what could go may be."""
        for row in range(len(SIZES)):
            found = self.handles[0].lookup(row, to_hashes(list(range(LAST_HASH + 1))))
            for number, slot in enumerate(found):
                key = (row, number)
                if key in self.ready and slot < 0:
                    assert key not in self.pinned
                    assert self.retained_until_s.get(key, 0.0) <= self.now_s
                    assert self.leased_until_s.get(key, 0.0) <= self.now_s
                    self.forget(key)

    def forget(self, key: Key) -> None:
        del self.ready[key]
        self.pinned.discard(key)
        self.retained_until_s.pop(key, None)
        self.leased_until_s.pop(key, None)

    @rule(side=SIDES, row=ROWS, numbers=NUMBERS)
    def reserve(self, side: int, row: int, numbers: list[int]) -> None:
        evictable = self.evictable(row)
        absent = {n for n in numbers if (row, n) not in self.ready | self.writing}
        count = len(numbers)
        slots = self.handles[side].reserve(row, to_hashes(numbers), [0] * count, [0] * count)
        self.note_evictions()
        placed = {n: int(s) for n, s in zip(numbers, slots, strict=True) if s >= 0}
        assert placed.keys() <= absent
        assert len(placed) >= min(len(absent), evictable)
        taken = set(self.ready.values()) | set(self.writing.values())
        assert not taken & set(placed.values())
        assert len(set(placed.values())) == len(placed) == int((slots >= 0).sum())
        for number, slot in placed.items():
            self.writing[(row, number)] = slot
            self.handles[side].view(slot)[:] = pattern(row, number)

    @rule(side=SIDES, row=ROWS, drop=st.booleans(), some=st.integers(1, 6))
    def finish(self, side: int, row: int, drop: bool, some: int) -> None:
        keys = [key for key in self.writing if key[0] == row][:some]
        if not keys:
            return
        slots = np.array([self.writing.pop(key) for key in keys])
        if drop:
            self.handles[side].abandon(slots)
            return
        layers = self.handles[side].stats()["namespaces"][row]["layers"]
        sums = np.array([[pattern(*key) * 10 + layer for layer in range(layers)] for key in keys])
        assert self.handles[side].publish(slots, sums).all()
        self.ready |= dict(zip(keys, slots.tolist(), strict=True))

    @rule(side=SIDES, row=ROWS, numbers=NUMBERS, lease_s=st.integers(1, 3), early=st.booleans())
    def lease(self, side: int, row: int, numbers: list[int], lease_s: int, early: bool) -> None:
        numbers = list(dict.fromkeys(numbers))
        slots = self.handles[side].lease(row, to_hashes(numbers), float(lease_s))
        assert slots.tolist() == [self.ready.get((row, n), -1) for n in numbers]
        keys = [(row, n) for n in numbers if (row, n) in self.ready]
        if early and not any(self.leased_until_s.get(key, 0.0) > self.now_s for key in keys):
            self.handles[side].release(slots)
            return
        for key in keys:
            until_s = self.now_s + lease_s
            self.leased_until_s[key] = max(until_s, self.leased_until_s.get(key, 0.0))

    @rule(side=SIDES, row=ROWS, numbers=NUMBERS, pinned=st.booleans())
    def pin(self, side: int, row: int, numbers: list[int], pinned: bool) -> None:
        there = self.handles[side].pin(row, to_hashes(numbers), pinned)
        assert there.tolist() == [(row, n) in self.ready for n in numbers]
        for number in numbers:
            key = row, number
            if pinned and key in self.ready:
                self.pinned.add(key)
                self.retained_until_s.pop(key, None)  # the pin replaces it
            else:
                self.pinned.discard(key)

    @rule(side=SIDES, row=ROWS, numbers=NUMBERS, seconds=st.integers(-1, 4))
    def retain(self, side: int, row: int, numbers: list[int], seconds: int) -> None:
        arena, until_s = self.handles[side], self.now_s + seconds
        numbers, limit = list(dict.fromkeys(numbers)), self.retention_limit(arena)
        kept = arena.retain(row, to_hashes(numbers), until_s).tolist()
        if seconds <= 0:
            assert not any(kept)
            return
        room, expected = limit - self.retained_bytes(arena), []
        for number in numbers:
            key = row, number
            size = 0.0
            if key in self.ready and key not in self.pinned:
                old_s = self.retained_until_s.get(key, 0.0)
                size = 0.0 if old_s > self.now_s else float(arena.table["bytes"][self.ready[key]])
            expected.append(key in self.ready and size <= room)
            if expected[-1]:
                room -= size
                if key not in self.pinned:
                    before_s = self.retained_until_s.get(key, 0.0)
                    self.retained_until_s[key] = max(before_s, until_s)
        assert kept == expected
        assert self.retained_bytes(arena) <= limit

    @staticmethod
    def retention_limit(arena: Arena) -> float:
        """All blocks are of the tenant 0, which may take an eighth."""
        return float(arena.tables.segments["bytes"].sum()) / 8

    def retained_bytes(self, arena: Arena) -> float:
        return sum(
            float(arena.table["bytes"][self.ready[key]])
            for key, until_s in self.retained_until_s.items()
            if until_s > self.now_s
        )

    @rule(side=SIDES, row=ROWS, numbers=NUMBERS)
    def discard(self, side: int, row: int, numbers: list[int]) -> None:
        gone = {(row, n) for n in numbers} & self.ready.keys()
        assert self.handles[side].discard(row, to_hashes(numbers)) == len(gone)
        for key in gone:
            self.forget(key)

    @rule(side=SIDES, row=st.none() | ROWS)
    def clear(self, side: int, row: int | None) -> None:
        gone = [key for key in self.ready if row is None or key[0] == row]
        assert self.handles[side].clear(row) == len(gone)
        for key in gone:
            self.forget(key)

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(side=SIDES)
    def attach_again(self, side: int) -> None:
        self.handles[side].close()
        self.handles[side] = self.attach()

    @rule(side=SIDES, noise=st.integers(0, 1 << 32))
    def die_in_a_section(self, side: int, noise: int) -> None:
        t = self.handles[side].tables
        draw = np.random.default_rng(noise)
        for derived in (t.buckets, t.free, t.segments["used"], t.segments["namespace"]):
            lost = draw.random(derived.shape) < 0.3
            derived[lost] = draw.integers(0, 8, int(lost.sum()))
        self.handles[side].words[SECTION] += 1
        broken(self.handles[1 - side])

    @invariant()
    def holds_what_it_should(self) -> None:
        if not self.handles:
            return
        arena = self.handles[1]
        assert broken(arena) == []
        spans = []
        for key, slot in (self.ready | self.writing).items():
            assert (arena.view(slot) == pattern(*key)).all()
            start = int(arena.offsets(np.array([slot]))[0])
            spans.append((start, start + int(arena.table["bytes"][slot])))
        for key, slot in self.ready.items():
            sums = arena.sums(np.array([slot]))[0]
            assert sums.tolist() == [pattern(*key) * 10 + layer for layer in range(len(sums))]
            until_s = math.inf if key in self.pinned else self.retained_until_s.get(key, 0.0)
            assert arena.table["kept_until_s"][slot] == until_s
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert not spans or spans[-1][1] <= self.size_bytes
        assert int((arena.table["state"] != FREE).sum()) == len(spans)

    @invariant()
    def events_lead_to_the_same(self) -> None:
        if not self.handles:
            return
        events, self.since, lost = self.handles[0].events(self.since)
        if lost:
            events, self.since = self.handles[0].blocks()
            self.told = set()
        for event in events:
            key = int(event["namespace"]), int.from_bytes(event["hash"].tobytes()[24:], "little")
            if lost or event["kind"] == STORED:
                assert key not in self.told
                self.told.add(key)
            else:
                self.told.remove(key)
        assert self.told == self.ready.keys()


ArenaMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestArena = ArenaMachine.TestCase
