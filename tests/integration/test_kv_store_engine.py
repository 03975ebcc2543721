"""Real vLLM engines over one store: what one computed the others load, whatever dies meanwhile.

One module, one story, since an engine takes half a minute to start: the first engine computes the
prompts and saves them, the second finds them in DRAM, then on NVMe, and lives through faults; then
everything is gone but the NVMe files, and a third one, under a node of its own, finds all again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from headrace_kvstore.arena.arena import WRITER_TIMEOUT_S, Arena
from headrace_kvstore.blocks.slot_record import READY, WRITING
from tests.support.kvcheck import broken
from tests.support.machine import (
    BLOCK,
    LOGPROB_TOLERANCE,
    Machine,
    assert_same,
    full_tokens,
    until,
)
from tests.support.prompts import noise
from tests.support.stored import Stored, StoredEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = [127, 128, 129, 1000, 2500, 7000]
PROMPTS = [noise(length, seed) for seed, length in enumerate(LENGTHS)]
FOUND = [full_tokens(prompt) for prompt in PROMPTS]
MIDDLE, LONG = 3, 4
"""The prompts of 1,000 and of 2,500 tokens."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One machine, with a disk."""
    machine = Machine(nvme_folder=tmp_path_factory.mktemp("nvme"), nvme_bytes=4 << 30)
    try:
        yield machine
    finally:
        machine.end()


@pytest.fixture(scope="module")
def engines(story: Machine) -> tuple[StoredEngine, StoredEngine]:
    """Two that live at once; they take from files without asking what computing would cost."""
    first, second = story.engine(priced=False), story.engine(priced=False)
    first.ready()
    second.ready()
    return first, second


@pytest.fixture(scope="module")
def cold(engines: tuple[StoredEngine, StoredEngine], story: Machine) -> list[Stored]:
    """The first engine's answers; it has nothing to load and saves all."""
    prompts = [*PROMPTS, PROMPTS[MIDDLE]]
    answers = engines[0].answers(prompts, [None] * len(PROMPTS) + ["tenant-a"])
    assert [answer.cached for answer in answers] == [0] * len(answers)
    computed = [len(prompt) + len(answers[0].tokens) - 1 for prompt in prompts]
    until(lambda: story.ready_blocks() == sum(tokens // BLOCK for tokens in computed))
    return answers[: len(PROMPTS)]


@pytest.fixture(scope="module")
def flipped(cold: list[Stored], story: Machine) -> Iterator[Arena]:
    """The arena, one bit of the last block of the prompt of 2,500 tokens flipped."""
    with story.arena() as arena:
        ready = (arena.table["state"] == READY).nonzero()[0]
        at = [s for s in ready if arena.table["depth"][s] == FOUND[LONG] // BLOCK - 1]
        chains = [chain(arena, int(slot)) for slot in at]
        [deepest] = [slot for slot, length in zip(at, chains, strict=True) if not length]
        arena.view(int(deepest))[100_000] ^= 1
        yield arena


def chain(arena: Arena, slot: int) -> int:
    """How many blocks stand right behind this one."""
    word = arena.table["hash"][slot].tobytes()[:8]
    return int((arena.table["parent"] == np.frombuffer(word, np.uint64)[0]).sum())


@pytest.fixture(scope="module")
def warm(
    flipped: Arena, engines: tuple[StoredEngine, StoredEngine]
) -> tuple[list[Stored], list[Stored]]:
    """The second engine's answers out of DRAM; those of two tenants."""
    answers = engines[1].answers(PROMPTS)
    return answers, engines[1].answers([PROMPTS[MIDDLE]] * 2, ["tenant-a", "tenant-b"])


class TestDram:
    def test_what_one_engine_computed_another_loads(
        self, warm: tuple[list[Stored], list[Stored]], cold: list[Stored]
    ) -> None:
        assert [answer.cached for answer in warm[0]] == FOUND
        assert_same(warm[0], cold)

    def test_a_flipped_bit_is_found_named_and_its_block_computed(
        self,
        warm: tuple[list[Stored], list[Stored]],
        flipped: Arena,
        engines: tuple[StoredEngine, StoredEngine],
    ) -> None:
        assert flipped.stats()["discarded_total"] == 1
        assert engines[1].events()["lost_corrupt_dram"] == 1

    def test_a_salt_finds_its_own_blocks_and_no_other_does(
        self, warm: tuple[list[Stored], list[Stored]], cold: list[Stored]
    ) -> None:
        own, other = warm[1]
        assert (own.cached, other.cached) == (FOUND[MIDDLE], 0)
        assert own.tokens == other.tokens == cold[MIDDLE].tokens

    def test_loads_ahead_of_their_steps_give_the_same_tokens(
        self,
        warm: tuple[list[Stored], list[Stored]],
        engines: tuple[StoredEngine, StoredEngine],
        cold: list[Stored],
    ) -> None:
        loaded = engines[1].events()["loaded_dram"]
        engines[1].load_ahead(True)
        answers = engines[1].answers(PROMPTS, anew=True, together=True)
        engines[1].load_ahead(False)
        assert_same(answers, cold)
        assert engines[1].events()["loaded_dram"] - loaded == sum(FOUND) // BLOCK


@pytest.fixture(scope="module")
def on_disk(warm: tuple[list[Stored], list[Stored]], story: Machine) -> Machine:
    """A node came, and wrote all that is in DRAM."""
    story.node.start()
    blocks = story.ready_blocks()
    until(lambda: story.node.stats()["tiers"]["nvme"]["blocks"] >= blocks)
    return story


class TestNvme:
    @pytest.mark.parametrize("number", range(1, len(PROMPTS)), ids=map(str, LENGTHS[1:]))
    def test_what_is_on_disk_only_is_loaded_from_there(
        self,
        on_disk: Machine,
        engines: tuple[StoredEngine, StoredEngine],
        cold: list[Stored],
        number: int,
    ) -> None:
        assert_same([on_disk.from_below(engines[1], PROMPTS[number])], [cold[number]])

    def test_it_came_from_there(
        self, on_disk: Machine, engines: tuple[StoredEngine, StoredEngine]
    ) -> None:
        assert engines[1].events()["loaded_nvme"] > 0

    def test_a_salt_finds_its_own_blocks_and_no_other_does(
        self, on_disk: Machine, engines: tuple[StoredEngine, StoredEngine], cold: list[Stored]
    ) -> None:
        own = on_disk.from_below(engines[1], PROMPTS[MIDDLE], "tenant-a")
        on_disk.forget_dram()
        [other] = engines[1].answers([PROMPTS[MIDDLE]], ["tenant-d"], anew=True)
        assert other.cached == 0
        assert own.tokens == other.tokens == cold[MIDDLE].tokens


class TestFaults:
    def test_a_node_killed_under_load_costs_hits_only_and_they_come_back(
        self, on_disk: Machine, engines: tuple[StoredEngine, StoredEngine], cold: list[Stored]
    ) -> None:
        _, engine = engines
        on_disk.forget_dram()
        numbers = [MIDDLE, 0, LONG, 1, 2]
        engine.ask([PROMPTS[n] for n in numbers], together=True, anew=True)
        on_disk.node.kill()
        assert_same(engine.answer(), [cold[n] for n in numbers])
        on_disk.forget_dram()
        [alone] = engine.answers([PROMPTS[MIDDLE]], anew=True)
        assert (alone.cached, alone.tokens) == (0, cold[MIDDLE].tokens)
        on_disk.node.start()
        assert_same([on_disk.from_below(engine, PROMPTS[MIDDLE])], [cold[MIDDLE]])

    def test_an_arena_full_of_leased_blocks_takes_no_more_and_harms_nobody(
        self, on_disk: Machine, engines: tuple[StoredEngine, StoredEngine], cold: list[Stored]
    ) -> None:
        _, engine = engines
        engine.answers([PROMPTS[LONG]], anew=True)
        with on_disk.arena() as arena:
            rows, _ = arena.blocks()
            leased = arena.lease(0, [row["hash"].tobytes() for row in rows], 600.0)
            names = [bytes([255]) + n.to_bytes(31, "big") for n in range(1000)]
            held = arena.reserve(0, names, [0] * len(names), [0] * len(names))
            assert (held < 0).any()
            before = engine.events()
            answers = engine.answers([PROMPTS[MIDDLE]] * 2, ["t-1", "t-2"], together=True)
            assert [answer.tokens for answer in answers] == [cold[MIDDLE].tokens] * 2
            until(lambda: (engine.events() - before)["save_no_room"] >= 2 * FOUND[MIDDLE] // BLOCK)
            arena.abandon(held)
            arena.release(leased)
            [again] = engine.answers([PROMPTS[LONG]], anew=True)
            assert again.cached == FOUND[LONG]

    def test_a_prompt_with_a_hint_outlives_a_flood_of_others(
        self, on_disk: Machine, engines: tuple[StoredEngine, StoredEngine]
    ) -> None:
        _, engine = engines
        fresh = noise(3 * BLOCK, seed=79)
        engine.retain(fresh, 600.0)
        with on_disk.arena() as arena:

            def count() -> int:
                engine.answers([fresh[:1]], max_tokens=1)  # its step learns of copies that ended
                return int(arena.stats()["retained"])

            until(lambda: count() == 3)
            rows, _ = arena.blocks()
            retained = [row["hash"].tobytes() for row in rows if row["kept_until_s"] > 0.0]
            others = len(rows) - len(retained)
            layers, flood = arena.namespaces()[0].layers, list[bytes]()

            def left() -> int:
                """Stores another block, which the node writes: it is evicted only after that."""
                flood.append(bytes([254]) + len(flood).to_bytes(31, "big"))
                slot = arena.reserve(0, flood[-1:], [0], [0])
                arena.publish(slot[slot >= 0], np.zeros((int((slot >= 0).sum()), layers)))
                names = [row["hash"].tobytes() for row in rows]
                return int((arena.lookup(0, names) >= 0).sum())

            assert others > 0
            until(lambda: left() == len(retained))
            assert (arena.lookup(0, retained) >= 0).all()
            arena.discard(0, flood)

    def test_two_engines_that_compute_one_prompt_at_once_store_it_once(
        self, on_disk: Machine, engines: tuple[StoredEngine, StoredEngine]
    ) -> None:
        before = [engine.events() for engine in engines]
        fresh = noise(3 * BLOCK + 1, seed=78)
        for engine in engines:
            engine.ask([fresh], anew=True)
        one, other = [engine.answer() for engine in engines]
        assert_same(one, other)

        def saved() -> int:
            for engine in engines:  # tells of copies that ended after the last step
                engine.answers([fresh[:1]], max_tokens=1)
            pairs = zip(engines, before, strict=True)
            return sum((engine.events() - old)["saved"] for engine, old in pairs)

        until(lambda: saved() >= 3)
        assert saved() == 3

    def test_an_engine_killed_while_it_reads_and_writes_leaves_nothing_behind(
        self, on_disk: Machine, engines: tuple[StoredEngine, StoredEngine], cold: list[Stored]
    ) -> None:
        victim, engine = engines
        fresh = noise(2 * BLOCK + 1, seed=77)
        engine.answers([PROMPTS[MIDDLE]], anew=True)
        with on_disk.arena() as arena:
            others = arena.table["state"] == WRITING  # the node's, that was killed before

            def begun() -> np.ndarray:
                return (arena.table["state"] == WRITING) & ~others

            victim.hold()
            victim.ask([fresh, PROMPTS[MIDDLE]], anew=True)
            until(lambda: int(begun().sum()) == 2)
            until(lambda: bool((arena.table["lease_until_s"] > time.monotonic()).any()))
            engine.ask([PROMPTS[MIDDLE], PROMPTS[LONG]], together=True, anew=True)
            victim.kill()
            assert_same(engine.answer(), [cold[MIDDLE], cold[LONG]])
            arena.table["stored_s"][begun()] -= WRITER_TIMEOUT_S  # so long ago
            until(lambda: engine.answers([fresh], anew=True)[0].cached == 2 * BLOCK)
            assert not begun().any()
            assert broken(arena) == []


@pytest.fixture(scope="module")
def restarted(
    on_disk: Machine, engines: tuple[StoredEngine, StoredEngine], cold: list[Stored]
) -> StoredEngine:
    """Everything was gone but the files; a node and an engine came anew."""
    for engine in engines:
        engine.kill()
    on_disk.node.kill()
    on_disk.remove_dram()
    engine, lossy = on_disk.engine(), on_disk.engine(codec="fp8", node=False)
    on_disk.node.start()
    lossy.ready()
    return engine.ready()


@pytest.fixture(scope="module")
def lossy(restarted: StoredEngine, on_disk: Machine) -> StoredEngine:
    """An engine that stores fp8, over the same arena."""
    return on_disk.engines[-1]


class TestRestart:
    @pytest.mark.parametrize("number", range(len(PROMPTS) - 1, -1, -1), ids=map(str, LENGTHS[::-1]))
    def test_all_is_found_again_on_disk(
        self, on_disk: Machine, restarted: StoredEngine, cold: list[Stored], number: int
    ) -> None:
        assert_same([on_disk.from_below(restarted, PROMPTS[number])], [cold[number]])

    def test_it_came_from_there(self, restarted: StoredEngine) -> None:
        events = restarted.events()
        assert events["loaded_nvme"] > 0
        # A block whose read was late came to DRAM meanwhile, and was loaded from there.
        assert events["loaded_nvme"] + events["loaded_dram"] >= sum(FOUND) // BLOCK

    def test_a_disk_slower_than_computing_is_left_and_found_again_when_it_has_recovered(
        self, on_disk: Machine, restarted: StoredEngine, cold: list[Stored]
    ) -> None:
        # Computing takes a twentieth of a load, or half of one on a machine as busy as seen so far.
        restarted.slow_disk(bytes_per_s=1e5)

        def ask() -> None:
            on_disk.forget_dram()
            answers = restarted.answers([PROMPTS[MIDDLE]], anew=True)
            assert answers[0].tokens == cold[MIDDLE].tokens

        before = restarted.events()
        ask()
        until(lambda: bool(ask() or (restarted.events() - before)["declined_nvme"]))
        assert (restarted.events() - before)["loaded_nvme"] == 0
        restarted.slow_disk(None)
        until(lambda: bool(ask() or (restarted.events() - before)["loaded_nvme"]))
        assert_same([on_disk.from_below(restarted, PROMPTS[MIDDLE])], [cold[MIDDLE]])


class TestCodec:
    def test_a_lossy_codec_shares_nothing_with_the_exact_one_and_tells_its_error(
        self,
        lossy: StoredEngine,
        cold: list[Stored],
        record_property: Callable[[str, object], None],
    ) -> None:
        [first] = lossy.answers([PROMPTS[MIDDLE]])
        assert (first.cached, first.tokens) == (0, cold[MIDDLE].tokens)
        answers: list[Stored] = []

        def found() -> bool:
            answers[:] = lossy.answers([PROMPTS[MIDDLE]], anew=True)
            return answers[0].cached == FOUND[MIDDLE]

        until(found)
        error = abs(answers[0].logprobs[0] - cold[MIDDLE].logprobs[0])
        record_property("fp8_logprob_error_nats", error)
        print(f"fp8: the first token's log-probability is off by {error:.4f} nats")
        assert LOGPROB_TOLERANCE < error < 1.0


class TestResets:
    def test_weights_that_are_updated_in_place_never_meet_kv_of_the_old_ones(
        self, restarted: StoredEngine, cold: list[Stored], on_disk: Machine
    ) -> None:
        """The last of this engine: its KV is its own from now on."""
        assert restarted.answers([PROMPTS[MIDDLE]], anew=True)[0].cached == FOUND[MIDDLE]
        restarted.update_weights()
        [computed] = restarted.answers([PROMPTS[MIDDLE]])
        assert computed.cached == 0 and computed.tokens != cold[MIDDLE].tokens
        found: list[Stored] = []

        def stored() -> bool:
            found[:] = restarted.answers([PROMPTS[MIDDLE]], anew=True)
            return found[0].cached == FOUND[MIDDLE]

        until(stored)
        assert_same(found, [computed])


class TestReplacedArena:
    def test_an_engine_uses_the_arena_that_took_the_name_and_lets_the_old_one_go(
        self, lossy: StoredEngine, on_disk: Machine
    ) -> None:
        """Last, because the module's other engine computes nothing and keeps the old one."""
        on_disk.remove_dram()
        with on_disk.arena() as new:
            answers: list[Stored] = []

            def found() -> bool:
                answers[:] = lossy.answers([PROMPTS[MIDDLE]], anew=True)
                return answers[0].cached == FOUND[MIDDLE] and len(new.blocks()[0]) > 0

            until(found)
            assert not lossy.maps_removed(on_disk.name)
