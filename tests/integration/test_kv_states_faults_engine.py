"""A model with recurrent layers and a store that loses blocks, states and its node: each answer is
that of an engine without a store.

The model is a Qwen3-Next. vLLM computes GDN on CPUs in bfloat16 only, so answers are equal if both
engines compute a prompt in the same steps: one request at a time, from a block boundary where the
other one's step ended. Requests that are computed together have some first tokens of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.vllm.kv_cache import BlockHasher
from headrace_kvstore.lookup.state_hits import StateHits
from tests.support.families import write_family
from tests.support.machine import Machine, until
from tests.support.prompts import noise
from tests.support.stored import Stored, StoredEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK, STEP_TOKENS, GROUP_LAYERS = 256, 512, 2
BLOCK_BYTES = GROUP_LAYERS * BLOCK * 2 * 2 * 64 * 2
"""Of both layers of a group: K and V, two heads of 64 bfloat16."""
STATES = StateHits((0,))
"""The cache group of the GDN layers, which vLLM puts first."""
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "block_size": BLOCK,
    "max_model_len": 2048,
    "max_num_batched_tokens": STEP_TOKENS,
    "prefix_cache_retention_interval": STEP_TOKENS,
    "prefix_caching_hash_algo": "sha256_cbor",
}
"""vLLM keeps a state after each step, not only after a prompt's last full block. Without a size,
its blocks have 256 tokens on CPUs with AMX, and 128 on others."""


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [5 + token % 500 for token in noise(tokens, 1000 * seed + tokens)]


LENGTHS = [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 700, 1700]
PROMPTS = [prompt(tokens) for tokens in LENGTHS]
LONG = PROMPTS[-1]
TRUTHS: dict[tuple[int, ...], Stored] = {}
LONG_BLOCKS = len(LONG) // BLOCK


def full(tokens: int) -> int:
    return (tokens - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("model"), "qwen3_next")


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[StoredEngine]:
    """An engine without a store."""
    engine = StoredEngine(str(model), None, **ARGUMENTS)
    yield engine.ready()
    engine.end()


@pytest.fixture(scope="module")
def machine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("nvme")
    machine = Machine(
        model,
        block_bytes=BLOCK_BYTES,
        layers=GROUP_LAYERS,
        nvme_folder=folder,
        nvme_bytes=256 << 20,
        segment_bytes=4 << 20,
    )
    machine.node.start()
    yield machine
    machine.end()


@pytest.fixture(scope="module")
def engine(machine: Machine, plain: StoredEngine) -> StoredEngine:
    """An engine that has answered all prompts and forgotten them; the store has them, in DRAM and
    on disk."""
    engine = machine.engine(arguments=ARGUMENTS, priced=False).ready()
    assert engine.block_tokens() == BLOCK
    cold = engine.answers(PROMPTS)
    assert [answer.cached for answer in cold] == [0] * len(PROMPTS)
    assert_same(cold, truths_of(plain, *PROMPTS))
    engine.answers([], anew=True)
    until(lambda: on_disk(machine) == machine.ready_blocks())
    return engine


def truths_of(plain: StoredEngine, *prompts: list[int]) -> list[Stored]:
    """Right answers, each computed alone and from its start, once."""
    for each in prompts:
        if tuple(each) not in TRUTHS:
            TRUTHS[tuple(each)] = plain.answers([each], anew=True)[0]
    return [TRUTHS[tuple(each)] for each in prompts]


def assert_same(answers: list[Stored], truths: list[Stored]) -> None:
    """The answers are equal to the bit."""
    assert [answer.tokens for answer in answers] == [truth.tokens for truth in truths]
    assert [answer.logprobs for answer in answers] == [truth.logprobs for truth in truths]


def assert_most_agree(answers: list[Stored], truths: list[Stored]) -> None:
    """The first tokens of most answers are right. Of 512 tokens, a wrong state gives another."""
    same = [a.tokens[0] == b.tokens[0] for a, b in zip(answers, truths, strict=True)]
    assert sum(same) >= len(same) * 2 / 3, same


def on_disk(machine: Machine) -> int:
    return int(machine.node.stats()["tiers"]["nvme"]["blocks"])


def loaded(engine: StoredEngine, *prompts: list[int], **more: Any) -> list[Stored]:
    """Answers of the engine after it has forgotten its own cache."""
    return engine.answers(prompts, anew=True, **more)


def names(tokens: list[int]) -> list[bytes]:
    return BlockHasher("sha256_cbor", BLOCK)(tokens, "")


def drop(machine: Machine, gone: list[bytes]) -> None:
    """Drop blocks or states from DRAM."""
    with machine.arena() as arena:
        assert arena.discard(0, gone) == len(gone)


def test_prompts_of_all_lengths_are_loaded(plain: StoredEngine, engine: StoredEngine) -> None:
    """Also those that end at a state's boundary, and those that have none."""
    answers = loaded(engine, *PROMPTS)
    assert [answer.cached for answer in answers] == [full(tokens) for tokens in LENGTHS]
    assert_same(answers, truths_of(plain, *PROMPTS))
    assert engine.held_blocks() == 0


def test_prompts_that_part_are_loaded_up_to_a_state_before(
    plain: StoredEngine, engine: StoredEngine
) -> None:
    parts = (BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 4, 3 * BLOCK, 4 * BLOCK + 1)
    others = [LONG[:part] + prompt(90, part) for part in parts]
    # One at a time: KV that another of them left in the engine's own cache was computed in another
    # step, which rounds it otherwise on CPUs without AMX.
    answers = [loaded(engine, other)[0] for other in others]
    assert [answer.cached for answer in answers] == [0, *[2 * BLOCK] * 3, 4 * BLOCK]
    assert_same(answers, truths_of(plain, *others))


def test_requests_with_one_prefix_at_once(plain: StoredEngine, engine: StoredEngine) -> None:
    new = [prompt(1000, 7) + prompt(n, 8) for n in (0, 1, 40, 64)]
    several = [LONG, LONG, LONG[: 4 * BLOCK] + prompt(50, 3), *new, *new]
    truths = truths_of(plain, *several)
    answers = loaded(engine, *several, together=True)
    assert [answer.cached for answer in answers[:3]] == [*[full(len(LONG))] * 2, 4 * BLOCK]
    assert_most_agree(answers, truths)
    again = loaded(engine, *several, together=True)
    assert all(answer.cached >= 2 * BLOCK for answer in again)
    assert_most_agree(again, truths)
    assert engine.held_blocks() == 0


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_aborted_requests_leave_right_states(
    plain: StoredEngine, engine: StoredEngine, steps: int
) -> None:
    """Some are loading, some are computed in several steps."""
    new = [prompt(1100 + steps, 20), prompt(600, 20 + steps)]
    engine.answers([], anew=True)
    engine.abort([LONG, *new], steps)
    assert engine.held_blocks() == 0
    truths = truths_of(plain, LONG, *new)
    assert_same(loaded(engine, LONG), truths[:1])
    assert_most_agree(engine.answers([LONG, *new]), truths)
    assert_most_agree(loaded(engine, LONG, *new), truths)


@pytest.mark.parametrize("gone", ["the last state", "a block of KV", "all states"])
def test_a_hit_ends_where_either_is_missing(
    machine: Machine, plain: StoredEngine, engine: StoredEngine, gone: str
) -> None:
    """In DRAM; without its node, the engine finds nothing else."""
    blocks = names(LONG)
    states = [STATES.name(block, 0) for block in blocks]
    assert loaded(engine, LONG)[0].cached == full(len(LONG))
    kept = [n for n, lacks in enumerate(lacking(machine, states), 1) if not lacks]
    assert kept[-1] == LONG_BLOCKS and len(kept) > 1
    hit = {"the last state": kept[-2], "a block of KV": kept[-2], "all states": 0}[gone]
    dropped = {
        "the last state": states[LONG_BLOCKS - 1 :],
        "a block of KV": [blocks[kept[-2]]],
        "all states": [states[n - 1] for n in kept],
    }
    machine.node.kill()
    drop(machine, dropped[gone])
    [answer] = loaded(engine, LONG)
    assert answer.cached == hit * BLOCK
    assert_same([answer], truths_of(plain, LONG))
    machine.node.start()
    assert_same(loaded(engine, LONG), truths_of(plain, LONG))


def lacking(machine: Machine, asked: list[bytes]) -> list[bool]:
    with machine.arena() as arena:
        return [slot < 0 for slot in arena.lookup(0, asked).tolist()]


def test_all_is_found_on_disk(machine: Machine, plain: StoredEngine, engine: StoredEngine) -> None:
    for tokens in (LONG, PROMPTS[3]):
        answer = from_disk(machine, engine, tokens)
        assert_same([answer], truths_of(plain, tokens))


def from_disk(machine: Machine, engine: StoredEngine, tokens: list[int]) -> Stored:
    """The answer to a prompt all of whose blocks are loaded from disk."""
    answers: list[Stored] = []

    def found() -> bool:
        machine.forget_dram()
        answers[:] = loaded(engine, tokens)
        return answers[0].cached == full(len(tokens))

    until(found)
    return answers[0]


def test_a_node_that_restarts_costs_hits_only(
    machine: Machine, plain: StoredEngine, engine: StoredEngine
) -> None:
    truths = truths_of(plain, LONG)
    machine.node.kill()
    machine.forget_dram()
    [answer] = loaded(engine, LONG)
    assert answer.cached == 0
    assert_same([answer], truths)
    machine.node.start()
    assert_same([from_disk(machine, engine, LONG)], truths)


def test_preempted_requests_answer_as_others(
    machine: Machine, plain: StoredEngine, model: Path
) -> None:
    prompts = [prompt(470 + 5 * n, 40 + n) for n in range(8)]
    arguments = ARGUMENTS | {"num_gpu_blocks_override": 24}
    small = machine.engine(arguments=arguments, priced=False).ready()
    try:
        truths = truths_of(plain, *prompts)
        assert_most_agree(small.answers(prompts, max_tokens=100, together=True), truths)
        assert small.preemptions() > 0
        again = small.answers(prompts, max_tokens=100, together=True, anew=True)
        assert any(answer.cached for answer in again)
        assert_most_agree(again, truths)
        assert small.held_blocks() == 0
    finally:
        small.end()


def test_states_that_are_damaged_on_disk_are_never_used(
    machine: Machine, plain: StoredEngine, engine: StoredEngine
) -> None:
    truths = truths_of(plain, *PROMPTS)
    from_disk(machine, engine, LONG)
    machine.node.kill()
    for file in Path(machine.node.settings["nvme_folder"]).rglob("*"):
        if file.is_file():
            flip(file)
    machine.node.start()
    for tokens, truth in zip(PROMPTS, truths, strict=True):
        machine.forget_dram()
        [answer] = loaded(engine, tokens)
        assert answer.cached == 0
        assert_same([answer], [truth])
    assert engine.held_blocks() == 0


def flip(file: Path) -> None:
    """Flip a bit in each 8 KiB of a file, beyond its first page."""
    content = bytearray(file.read_bytes())
    for at in range(8192 + 777, len(content), 8192):
        content[at] ^= 0x10
    file.write_bytes(content)
