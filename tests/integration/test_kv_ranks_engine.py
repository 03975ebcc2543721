"""A real vLLM engine of two ranks and one of one rank over one store: either loads the other's KV.

One module, one story. The engine of one rank computes some prompts, that of two ranks others. Each
finds the other's blocks in DRAM, then on NVMe, also behind a node that has started anew; a block of
which one rank's part is damaged is computed by both, and what an engine of two ranks had half
written when it was killed is written again by the other. They also hand KV to each other over NIXL.

What peers and objects hold is read by two ranks in `test_kv_far_tiers_engine.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from headrace_kvstore.arena.arena import WRITER_TIMEOUT_S
from headrace_kvstore.blocks.slot_record import READY, WRITING
from tests.support.kvcheck import broken
from tests.support.machine import BLOCK, Machine, assert_same, full_tokens, until
from tests.support.prompts import noise
from tests.support.stored import Stored, StoredEngine
from tests.support.tiny import KV_HEADS, LAYERS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = 2
BY_ONE = [noise(length, length) for length in (129, 1000, 2600)]
BY_TWO = [noise(length, length) for length in (130, 1001, 2000)]
PLAIN = "computed without the store's help"
"""The salt of prompts that no engine has seen."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(nvme_folder=tmp_path_factory.mktemp("nvme"), nvme_bytes=4 << 30)
    try:
        yield machine
    finally:
        machine.end()


@pytest.fixture(scope="module")
def engines(machine: Machine) -> tuple[StoredEngine, StoredEngine]:
    """Of one rank and of two, which hand KV to each other, too; they take from files without asking
    what computing would cost."""
    one, two = (machine.engine(ranks, hands_over=True, priced=False) for ranks in (1, RANKS))
    one.ready()
    two.ready()
    return one, two


@pytest.fixture(scope="module")
def computed(
    engines: tuple[StoredEngine, StoredEngine], machine: Machine
) -> tuple[list[Stored], list[Stored]]:
    """The answers of an engine of one rank that had nothing to load: to its own prompts, and to
    those that the other engine has computed and stored meanwhile."""
    one, two = engines
    salts: list[str | None] = [PLAIN] * len(BY_TWO)
    truth = one.answers(BY_ONE), one.answers(BY_TWO, salts)
    answers = two.answers(BY_TWO)
    assert [answer.cached for answer in [*truth[0], *truth[1], *answers]] == [0] * 9
    assert_same(answers, truth[1])
    written = [len(prompt) + len(answers[0].tokens) - 1 for prompt in [*BY_ONE, *BY_TWO, *BY_TWO]]
    until(lambda: machine.ready_blocks() == sum(tokens // BLOCK for tokens in written))
    return truth


def found(prompts: list[list[int]]) -> list[int]:
    """Tokens of prompts that a store can supply."""
    return [full_tokens(prompt) for prompt in prompts]


def test_a_block_of_both_ranks_is_one_block_with_a_part_a_head(
    computed: object, machine: Machine
) -> None:
    with machine.arena() as arena:
        [space] = arena.namespaces()
        assert space.layers == LAYERS * KV_HEADS
        assert arena.stats()["writing"] == 0


def test_two_ranks_load_what_one_has_stored(
    engines: tuple[StoredEngine, StoredEngine], computed: tuple[list[Stored], list[Stored]]
) -> None:
    answers = engines[1].answers(BY_ONE)
    assert [answer.cached for answer in answers] == found(BY_ONE)
    assert_same(answers, computed[0])


def test_one_rank_loads_what_two_have_stored(
    engines: tuple[StoredEngine, StoredEngine], computed: tuple[list[Stored], list[Stored]]
) -> None:
    answers = engines[0].answers(BY_TWO)
    assert [answer.cached for answer in answers] == found(BY_TWO)
    assert_same(answers, computed[1])


def test_a_block_of_which_one_rank_s_part_is_damaged_is_computed(
    engines: tuple[StoredEngine, StoredEngine],
    computed: tuple[list[Stored], list[Stored]],
    machine: Machine,
) -> None:
    with machine.arena() as arena:
        deepest = arena.table["depth"] == full_tokens(BY_ONE[-1]) // BLOCK - 1
        [slot] = (deepest & (arena.table["state"] == READY)).nonzero()[0]
        arena.view(int(slot))[-1] ^= 1  # of the last head, which the second rank has
    assert_same(engines[1].answers(BY_ONE[-1:], anew=True), computed[0][-1:])
    assert engines[1].events()["lost_corrupt_dram"] == 1


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 0)], ids=["1 to 2", "2 to 1"])
def test_either_pulls_over_nixl_what_the_other_one_has_prefilled(
    engines: tuple[StoredEngine, StoredEngine],
    computed: tuple[list[Stored], list[Stored]],
    prefill: int,
    decode: int,
) -> None:
    before, prompt, salt = engines[decode].transfers(), BY_ONE[1], f"handed over to {decode}"
    parameters = engines[prefill].prefill(prompt, salt)
    answer = engines[decode].pull(prompt, salt, parameters)
    assert_same([answer], computed[0][1:2])
    assert answer.cached >= len(prompt) - 1
    found = engines[decode].transfers() - before
    assert found == Counter(proved=RANKS), "each pair of ranks; no fingerprints of unlike blocks"


@pytest.fixture(scope="module")
def on_disk(computed: object, machine: Machine) -> Machine:
    """A node came, wrote all that is in DRAM, was killed and came again."""
    machine.node.start()
    blocks = machine.ready_blocks()
    until(lambda: machine.node.stats()["tiers"]["nvme"]["blocks"] >= blocks)
    machine.node.kill()
    machine.node.start()
    return machine


@pytest.mark.parametrize("reader", [0, 1], ids=["one rank", "two ranks"])
def test_either_loads_the_other_s_blocks_from_disk(
    on_disk: Machine,
    engines: tuple[StoredEngine, StoredEngine],
    computed: tuple[list[Stored], list[Stored]],
    reader: int,
) -> None:
    prompts, truth = (BY_TWO, computed[1]) if reader == 0 else (BY_ONE, computed[0])
    assert_same([on_disk.from_below(engines[reader], prompts[1])], [truth[1]])
    assert engines[reader].events()["loaded_nvme"] > 0


def test_an_engine_killed_with_one_rank_s_parts_written_leaves_no_half_block(
    on_disk: Machine,
    engines: tuple[StoredEngine, StoredEngine],
    computed: tuple[list[Stored], list[Stored]],
) -> None:
    engine, victim = engines
    fresh, stored = noise(2 * BLOCK + 1, seed=77), BY_TWO[1]
    engine.answers([stored], anew=True)
    with on_disk.arena() as arena:
        victim.hold()
        victim.ask([fresh, stored], anew=True)
        until(lambda: int((arena.table["state"] == WRITING).sum()) == 2)
        until(lambda: bool((arena.table["lease_until_s"] > time.monotonic()).any()))
        victim.kill()
        assert_same(engine.answers([stored], anew=True), computed[1][1:2])
        left = arena.table["state"] == WRITING
        assert int(left.sum()) == 2, "what one rank has written is not there for anybody"
        arena.table["stored_s"][left] -= WRITER_TIMEOUT_S  # so long ago
        until(lambda: engine.answers([fresh], anew=True)[0].cached == 2 * BLOCK)
        assert int((arena.table["state"] == WRITING).sum()) == 0
        assert broken(arena) == []
