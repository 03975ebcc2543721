"""Several tiers over one store against a naive model: who may find what, and what a read gives."""

from __future__ import annotations

import string

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_kvstore.circuit_breaker import CircuitBreaker
from headrace_kvstore.nvme.record import BlockShape, WriteRequest
from headrace_kvstore.objects.object_format import ObjectName, object_bytes
from headrace_kvstore.objects.object_tier import ObjectTier
from tests.support.kvnode import SHAPE, key
from tests.support.kvobjects import Blocks, FakeStore, has

EACH = object_bytes(SHAPE)
NUMBERS = range(10)
WRITERS = ("a", "b", "c")
ROOM = {"a": 3 * EACH, "b": 5 * EACH, "c": 100 * EACH}


class Sharing(RuleBasedStateMachine):
    """A tier that starts anew finds just the blocks of the whole objects; whatever it finds, it
    reads right or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.store = FakeStore()
        self.blocks = Blocks()
        self.tiers = {writer: self.made(writer) for writer in WRITERS}
        self.flipped: set[str] = set()

    def made(self, writer: str) -> ObjectTier:
        tier = ObjectTier(self.store, writer, ROOM[writer], timeout_s=20.0)
        tier._reads, tier._writes = CircuitBreaker(10**9), CircuitBreaker(10**9)
        tier.refresh()
        return tier

    def teardown(self) -> None:
        for tier in self.tiers.values():
            tier.close()

    @rule(
        writer=st.sampled_from(WRITERS),
        numbers=st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique=True),
    )
    def write(self, writer: str, numbers: list[int]) -> None:
        missing, wrote = self.write_some(writer, numbers)
        assert wrote == (len(missing) if len(missing) * EACH <= ROOM[writer] else 0)
        assert not wrote or has(self.tiers[writer], *missing) == [True] * len(missing)

    @rule(writer=st.sampled_from(WRITERS), fails=st.sampled_from(["put", "delete"]))
    def write_to_a_store_that_refuses(self, writer: str, fails: str) -> None:
        self.store.fails = {fails: "failed"}
        _, wrote = self.write_some(writer, [0, 1])
        self.store.fails = {}
        assert not (wrote and fails == "put")

    def write_some(self, writer: str, numbers: list[int]) -> tuple[list[int], int]:
        """What was missing, and how many the tier wrote."""
        tier = self.tiers[writer]
        missing = [n for n, here in zip(numbers, has(tier, *numbers), strict=True) if not here]
        before = self.store.puts
        wrote = self.blocks.write(tier, *numbers)
        assert self.store.puts - before == wrote
        if wrote:
            self.flipped -= {
                str(n)
                for n in self.store.names()
                if n.writer == writer and n.hash in {key(m) for m in missing}
            }
        return missing, wrote

    @rule(writer=st.sampled_from(WRITERS))
    def refresh(self, writer: str) -> None:
        assert self.tiers[writer].refresh()

    @rule(writer=st.sampled_from(WRITERS))
    def restart(self, writer: str) -> None:
        self.tiers[writer].close()
        self.tiers[writer] = self.made(writer)
        whole = {
            name.hash for name in self.store.names() if len(self.store.objects[str(name)]) == EACH
        }
        assert has(self.tiers[writer], *NUMBERS) == [key(n) in whole for n in NUMBERS]

    @precondition(lambda self: self.store.objects)
    @rule(data=st.data())
    def remove_an_object(self, data: st.DataObject) -> None:
        del self.store.objects[data.draw(st.sampled_from(sorted(self.store.objects)))]

    @precondition(lambda self: self.store.objects)
    @rule(data=st.data(), at=st.integers(0, 10**9))
    def flip_a_bit(self, data: st.DataObject, at: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.store.objects)))
        if self.store.objects[name]:
            self.store.flip(name, at % len(self.store.objects[name]))
            self.flipped.add(name)

    @precondition(lambda self: self.store.objects)
    @rule(data=st.data(), kept=st.floats(0, 0.999))
    def cut_an_object(self, data: st.DataObject, kept: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.store.objects)))
        whole = self.store.objects[name]
        self.store.objects[name] = whole[: int(kept * len(whole))]

    @rule(
        writer=st.sampled_from(WRITERS),
        numbers=st.lists(st.sampled_from(NUMBERS), min_size=1, unique=True),
    )
    def read(self, writer: str, numbers: list[int]) -> None:
        tier = self.tiers[writer]
        known = has(tier, *numbers)
        whole = not self.missing_objects(tier) and not self.flipped & set(self.store.objects)
        got = self.blocks.load(tier, *numbers)  # fails on a block that is called right and is not
        assert not any(g and not k for g, k in zip(got, known, strict=True))
        assert not whole or got == known

    @invariant()
    def own_objects_stay_within_their_room(self) -> None:
        for writer, tier in self.tiers.items():
            assert tier.stats()["bytes"] <= ROOM[writer]

    def missing_objects(self, tier: ObjectTier) -> bool:
        """Whether something was removed or cut since this tier looked."""
        return any(len(self.store.objects.get(n, b"")) != EACH for n in tier.catalog.objects)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=25, stateful_step_count=25)


@given(st.text() | st.from_regex(r"[0-9a-f]{32}/[0-9a-f]{64}\.[0-9a-f]{74}\.[A-Za-z0-9_-]{1,64}"))
def test_a_name_is_refused_or_says_what_it_is_made_of(text: str) -> None:
    name = ObjectName.parse(text)
    assert name is None or str(name) == text


@given(
    writer=st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64),
    block_hash=st.binary(min_size=1, max_size=32),
    parent=st.binary(max_size=32),
    depth=st.integers(0, 2**32 - 1),
    tenant=st.integers(0, 2**32 - 1),
    compute_s=st.floats(0, 1e9, width=32),
    shape=st.builds(
        BlockShape, st.binary(min_size=16, max_size=16), st.integers(1, 500), st.integers(1, 2**40)
    ),
)
def test_every_block_has_a_name_that_is_read_back(
    writer: str,
    block_hash: bytes,
    parent: bytes,
    depth: int,
    tenant: int,
    compute_s: float,
    shape: BlockShape,
) -> None:
    save = WriteRequest(block_hash, 0, np.zeros(1), parent, depth, tenant, compute_s)
    name = ObjectName.of(shape, writer, save)
    assert ObjectName.parse(str(name)) == name
    assert len(str(name)) < 255 + 33
