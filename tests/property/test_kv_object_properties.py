"""Several tiers over one store against a naive model: who may find what, and what a read gives."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_kvstore.breaker import Breaker
from headrace_kvstore.objects.object_tier import ObjectTier
from tests.support.kvnode import SHAPE
from tests.support.kvobjects import Blocks, FakeStore, has

EACH = SHAPE.payload_bytes + SHAPE.header_bytes
NUMBERS = range(10)
WRITERS = ("a", "b", "c")
ROOM = {"a": 3 * EACH, "b": 5 * EACH, "c": 100 * EACH}


class Sharing(RuleBasedStateMachine):
    """The model: `written` tells what each object was made of. A tier that starts anew finds just
    the blocks of the whole objects; whatever it finds, it reads right or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.store = FakeStore()
        self.blocks = Blocks()
        self.tiers = {writer: self.made(writer) for writer in WRITERS}
        self.written: dict[str, list[int]] = {}
        self.flipped: set[str] = set()

    def made(self, writer: str) -> ObjectTier:
        tier = ObjectTier(
            self.store, writer, ROOM[writer], timeout_s=20.0, breaker=lambda: Breaker(10**9)
        )
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
        assert wrote == (bool(missing) and len(missing) * EACH <= ROOM[writer])
        assert not wrote or has(self.tiers[writer], *missing) == [True] * len(missing)

    @rule(writer=st.sampled_from(WRITERS), fails=st.sampled_from(["put", "delete"]))
    def write_to_a_store_that_refuses(self, writer: str, fails: str) -> None:
        self.store.fails = {fails: "failed"}
        _, wrote = self.write_some(writer, [0, 1])
        self.store.fails = {}
        assert not (wrote and fails == "put")

    def write_some(self, writer: str, numbers: list[int]) -> tuple[list[int], bool]:
        """What was missing, and whether the tier wrote it."""
        tier, before = self.tiers[writer], set(self.store.objects)
        missing = [n for n, here in zip(numbers, has(tier, *numbers), strict=True) if not here]
        wrote = self.blocks.write(tier, *numbers)
        new = set(self.store.objects) - before
        assert len(new) == wrote
        self.written.update(dict.fromkeys(new, missing))
        return missing, wrote

    @rule(writer=st.sampled_from(WRITERS))
    def refresh(self, writer: str) -> None:
        assert self.tiers[writer].refresh()

    @rule(writer=st.sampled_from(WRITERS))
    def restart(self, writer: str) -> None:
        self.tiers[writer].close()
        self.tiers[writer] = self.made(writer)
        expected = {n for name in self.store.objects for n in self.good(name)}
        assert has(self.tiers[writer], *NUMBERS) == [n in expected for n in NUMBERS]

    @precondition(lambda self: self.store.objects)
    @rule(data=st.data())
    def remove_an_object(self, data: st.DataObject) -> None:
        del self.store.objects[data.draw(st.sampled_from(sorted(self.store.objects)))]

    @precondition(lambda self: self.store.objects)
    @rule(data=st.data(), at=st.integers(0, 10**9))
    def flip_a_bit(self, data: st.DataObject, at: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.store.objects)))
        payloads = len(self.store.objects[name]) - self.count(name) * SHAPE.header_bytes
        if payloads > 0:
            self.store.flip(name, at % payloads)
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
        known = tier._catalog.bundles.values()
        sizes = {str(bundle.name): bundle.name.size_bytes for bundle in known}
        return any(len(self.store.objects.get(n, b"")) != size for n, size in sizes.items())

    def count(self, name: str) -> int:
        return len(self.written[name])

    def good(self, name: str) -> list[int]:
        """Blocks that a new tier finds in an object: all if it has its whole length."""
        whole = len(self.store.objects[name]) == self.count(name) * EACH
        return self.written[name] if whole else []


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
