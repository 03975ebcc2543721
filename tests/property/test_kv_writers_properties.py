"""Slots that several processes fill together, against a plain dict: no half block is ever there."""

from __future__ import annotations

import shutil
import tempfile
import time

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace_kvstore.arena.arena import EXISTS, WRITER_TIMEOUT_S, Arena
from headrace_kvstore.arena.geometry import SECTION
from headrace_kvstore.arena.writer_group import Writer
from tests.support.kvcheck import broken

BLOCK, LAYERS, LAST = 4000, 6, 11
ENGINES = {"two": (-5, 2), "three": (-6, 3), "alone": (0, 1)}
"""By name: the group's number, and its writers. Each fills as many layers."""
MEMBERS = [(name, n) for name, (_, count) in ENGINES.items() for n in range(count)]
NUMBERS = st.lists(st.integers(0, LAST), min_size=1, max_size=6, unique=True)
Member = tuple[str, int]


def to_hashes(numbers: list[int]) -> list[bytes]:
    return [bytes(24) + (number + 1).to_bytes(8, "little") for number in numbers]


def writer(member: Member) -> Writer | None:
    group, count = ENGINES[member[0]]
    return Writer(group, member[1], count) if count > 1 else None


def layers(member: Member) -> np.ndarray:
    width = LAYERS // ENGINES[member[0]][1]
    return np.arange(member[1] * width, (member[1] + 1) * width)


class Filled:
    """A block that an engine fills: who is done, since when, where."""

    def __init__(self, engine: str, slot: int, since_s: float) -> None:
        self.engine, self.slot, self.since_s = engine, slot, since_s
        self.done: set[Member] = set()


class WritersMachine(RuleBasedStateMachine):
    """There is room for all blocks, so nothing is evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = time.monotonic()
        self.folder = tempfile.mkdtemp()
        self.ready: dict[int, int] = {}
        self.filled: dict[int, Filled] = {}
        self.copying: dict[Member, set[int]] = {member: set() for member in MEMBERS}
        self.handles: list[Arena] = []

    @initialize()
    def start(self) -> None:
        self.handles = [
            Arena.create_or_attach(
                "arena",
                60_000 + 2 * (LAST + 1) * 4096,
                folder=self.folder,
                block_bytes=BLOCK,
                layers=LAYERS,
                clock=lambda: self.now_s,
            )
            for _ in range(2)
        ]
        assert self.handles[0].register_namespace(b"n" * 16, BLOCK, LAYERS) == 0

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()
        shutil.rmtree(self.folder)

    def arena(self, member: Member) -> Arena:
        return self.handles[member[1] % 2]

    @rule(member=st.sampled_from(MEMBERS), numbers=NUMBERS)
    def reserve(self, member: Member, numbers: list[int]) -> None:
        stale = [n for n, f in self.filled.items() if f.since_s < self.now_s - WRITER_TIMEOUT_S]
        if any(number in stale for number in numbers):  # then all such slots are reclaimed
            for number in stale:
                self.forget(number)
        none = [0] * len(numbers)
        slots = self.arena(member).reserve(0, to_hashes(numbers), none, none, writer=writer(member))
        for number, slot in zip(numbers, slots.tolist(), strict=True):
            begun = self.filled.get(number)
            if number not in self.ready and begun is None:
                assert slot >= 0
                self.filled[number] = Filled(member[0], slot, self.now_s)
                self.copying[member].add(number)
            elif begun is not None and self.may_join(begun, member):
                assert slot == begun.slot, "the slot that another writer has begun"
                self.copying[member].add(number)
            else:
                assert slot == EXISTS

    def may_join(self, begun: Filled, member: Member) -> bool:
        together = ENGINES[member[0]][1] > 1
        return together and begun.engine == member[0] and member not in begun.done

    def forget(self, number: int) -> None:
        del self.filled[number]
        for numbers in self.copying.values():
            numbers.discard(number)

    @rule(member=st.sampled_from(MEMBERS), most=st.integers(1, 6))
    def publish(self, member: Member, most: int) -> None:
        numbers = sorted(self.copying[member])[:most]
        if not numbers:
            return
        slots = np.array([self.filled[number].slot for number in numbers])
        mine = layers(member)
        sums = np.array([[number * 100 + layer for layer in mine] for number in numbers])
        assert self.arena(member).publish(slots, sums, writer(member), mine).all()
        for number in numbers:
            self.copying[member].remove(number)
            begun = self.filled[number]
            begun.done.add(member)
            if len(begun.done) == ENGINES[member[0]][1]:
                del self.filled[number]
                self.ready[number] = begun.slot

    @rule(member=st.sampled_from(MEMBERS))
    def publish_what_is_others(self, member: Member) -> None:
        slots = [f.slot for f in self.filled.values() if f.engine != member[0]]
        slots += list(self.ready.values())
        sums = np.full((len(slots), len(layers(member))), 7)
        done = self.arena(member).publish(np.array(slots), sums, writer(member), layers(member))
        assert not done.any()

    @rule(member=st.sampled_from(MEMBERS))
    def die(self, member: Member) -> None:
        """What it was filling stays begun."""
        self.copying[member].clear()

    @rule(engine=st.sampled_from(["two", "three"]))
    def give_up(self, engine: str) -> None:
        """When all of an engine's writers have ended, what they left is free again."""
        busy = set().union(*(n for member, n in self.copying.items() if member[0] == engine))
        numbers = [n for n in range(LAST + 1) if n not in busy]
        left = [n for n in numbers if n in self.filled and self.filled[n].engine == engine]
        assert self.handles[0].give_up(0, to_hashes(numbers), ENGINES[engine][0]) == len(left)
        for number in left:
            self.forget(number)

    @rule()
    def abandon(self) -> None:
        numbers, self.copying["alone", 0] = self.copying["alone", 0], set()
        self.handles[0].abandon(np.array([self.filled[n].slot for n in numbers], np.int64))
        for number in numbers:
            del self.filled[number]

    @rule(numbers=NUMBERS)
    def discard(self, numbers: list[int]) -> None:
        gone = [number for number in numbers if number in self.ready]
        assert self.handles[1].discard(0, to_hashes(numbers)) == len(gone)
        for number in gone:
            del self.ready[number]

    @rule(seconds=st.sampled_from([1.0, WRITER_TIMEOUT_S + 1.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(noise=st.integers(0, 1 << 32))
    def die_in_a_section(self, noise: int) -> None:
        t = self.handles[0].tables
        draw = np.random.default_rng(noise)
        for derived in (t.buckets, t.free, t.segments["used"], t.segments["namespace"]):
            lost = draw.random(derived.shape) < 0.3
            derived[lost] = draw.integers(0, 8, int(lost.sum()))
        self.handles[0].words[SECTION] += 1
        broken(self.handles[1])

    @invariant()
    def whole_blocks_are_there_and_no_others(self) -> None:
        if not self.handles:
            return
        every = list(range(LAST + 1))
        found = self.handles[1].lookup(0, to_hashes(every)).tolist()
        assert found == [self.ready.get(number, -1) for number in every]
        for number, slot in self.ready.items():
            sums = self.handles[1].sums(np.array([slot]))[0]
            assert sums.tolist() == [number * 100 + layer for layer in range(LAYERS)]
        stats = self.handles[1].stats()
        assert (stats["blocks"], stats["writing"]) == (len(self.ready), len(self.filled))
        assert broken(self.handles[1]) == []


WritersMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestWriters = WritersMachine.TestCase
