"""Two real vLLM engines over one StoreNode, while all that their KV depends on changes.

Every answer is that of a plain engine in the same state, whatever the store holds by then. One
module, one story: an adapter is exchanged under its name, the node is restarted, the disk is full,
an engine comes back with another `max_model_len`, and weights are updated in place.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.disk import small_disk
from tests.support.machine import BLOCK, Machine, assert_same, full_tokens, until
from tests.support.prompts import noise
from tests.support.stored import Stored, StoredEngine
from tests.support.tiny import HEAD_DIM, POSITIONS, make_adapter, make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [noise(length, seed) for seed, length in enumerate([129, 700, 1300])]
FOUND = [full_tokens(prompt) for prompt in PROMPTS]
NONE = [0] * len(PROMPTS)
SHORT = 4096
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * (HEAD_DIM // 2),
    "long_factor": [4.0] * (HEAD_DIM // 2),
    "original_max_position_embeddings": SHORT,
}
"""vLLM takes the long factors for all tokens if `max_model_len` is over 4,096."""
ADAPTERS = {"enable_lora": True, "max_loras": 2}
DISK_BYTES, SEGMENT_BYTES = 96 << 20, 8 << 20


@dataclass
class Story:
    """What there is: a folder with the adapter `sql`, engines, a node, and plain engines."""

    adapter: Path
    machine: Machine
    first: StoredEngine
    second: StoredEngine
    plain: StoredEngine
    short: StoredEngine
    number: int = 1

    def answers(self, engine: StoredEngine, adapter: bool = False) -> list[Stored]:
        """To all prompts; an engine with a store has only the store's KV."""
        lora = (self.number, str(self.adapter)) if adapter else None
        return engine.answers(PROMPTS, anew=True, adapter=lora)

    def found(self, engine: StoredEngine, adapter: bool = False) -> list[Stored]:
        """The same, once all its KV comes from the store. What an engine has computed is saved
        behind its steps, and files of adapters are read beside them."""
        answers: list[Stored] = []

        def all_found() -> bool:
            answers[:] = self.answers(engine, adapter)
            return cached(answers) == FOUND

        until(all_found)
        return answers

    def exchange_adapter(self, seed: int) -> None:
        """Put another one in its place, under its name and path."""
        shutil.rmtree(self.adapter)
        make_adapter(self.adapter, seed)
        self.number += 1


def cached(answers: list[Stored]) -> list[int]:
    return [answer.cached for answer in answers]


def differ(some: list[Stored], others: list[Stored]) -> bool:
    return all(one.tokens != other.tokens for one, other in zip(some, others, strict=True))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """Where a small one of its own is; None if nobody may mount it."""
    where = tmp_path_factory.mktemp("disk")
    with small_disk(where, DISK_BYTES) as is_small:
        yield where if is_small else None


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, disk: Path | None) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("changes")
    kv = (disk or folder) / "kv"
    model = make_tiny_llama(folder / "model", rope_parameters=LONGROPE)
    adapter = make_adapter(folder / "sql", seed=1)
    machine = Machine(model, nvme_folder=kv, nvme_bytes=4 << 30, segment_bytes=SEGMENT_BYTES)
    plain = [
        StoredEngine(str(model), None, False, max_model_len=length, **ADAPTERS)
        for length in (POSITIONS, SHORT)
    ]
    try:
        for engine in plain:
            engine.ready()
        machine.node.start()
        engines = [machine.engine(arguments=ADAPTERS) for _ in range(2)]
        for engine in engines:
            engine.ready()
        yield Story(adapter, machine, *engines, *plain)
    finally:
        for engine in plain:
            engine.kill()
        machine.end()


@pytest.fixture(scope="module")
def truth(story: Story) -> list[Stored]:
    """Without an adapter."""
    return story.plain.answers(PROMPTS)


def on_disk(story: Story) -> None:
    """Wait until all that is in DRAM is below it too."""
    blocks = story.machine.ready_blocks()
    until(lambda: story.machine.node.stats()["tiers"]["nvme"]["blocks"] >= blocks)


def test_what_one_engine_computed_the_other_loads(story: Story, truth: list[Stored]) -> None:
    computed = story.answers(story.first)
    assert cached(computed) == NONE
    on_disk(story)
    loaded = story.answers(story.second)
    assert cached(loaded) == FOUND
    assert_same(computed, truth)
    assert_same(loaded, truth)


@pytest.fixture(scope="module")
def with_adapter(story: Story, truth: list[Stored]) -> list[Stored]:
    """The plain engine's answers with the first adapter."""
    answers = story.answers(story.plain, adapter=True)
    assert differ(answers, truth)
    return answers


def test_an_adapters_kv_is_shared_too(story: Story, with_adapter: list[Stored]) -> None:
    for engine in (story.first, story.second):
        assert_same(story.found(engine, adapter=True), with_adapter)


def test_an_adapter_exchanged_under_its_name_finds_nothing(
    story: Story, truth: list[Stored], with_adapter: list[Stored]
) -> None:
    story.exchange_adapter(seed=2)
    exchanged = story.answers(story.plain, adapter=True)
    assert differ(exchanged, with_adapter) and differ(exchanged, truth)
    for engine in (story.first, story.second) * 2:
        answers = story.answers(engine, adapter=True)
        assert cached(answers) == NONE
        assert_same(answers, exchanged)
        assert_same(story.answers(engine), truth)


def test_after_a_restart_of_the_node_all_is_found(story: Story, truth: list[Stored]) -> None:
    story.machine.node.kill()
    assert_same(story.answers(story.first), truth)
    story.machine.forget_dram()
    assert_same(story.answers(story.second), truth)
    story.machine.node.start()
    for prompt, answer in zip(PROMPTS, truth, strict=True):
        assert_same([story.machine.from_below(story.second, prompt)], [answer])


def test_a_full_disk_changes_no_answer(
    story: Story, truth: list[Stored], disk: Path | None
) -> None:
    if disk is None:
        pytest.skip("may not mount a file system")
    with (disk / "others").open("wb", buffering=0) as others:
        while True:
            try:
                others.write(bytes(1 << 20))
            except OSError:
                break
    assert shutil.disk_usage(disk).free < SEGMENT_BYTES
    fresh = [noise(BLOCK * 16 + 1, seed=100 + n) for n in range(6)]
    expected = story.plain.answers(fresh)
    for engine in (story.first, story.second):
        assert_same(engine.answers(fresh, anew=True), expected)
        assert_same(story.answers(engine), truth)
    for prompt, answer in zip(PROMPTS, truth, strict=True):
        assert_same([story.machine.from_below(story.first, prompt)], [answer])
    (disk / "others").unlink()


def test_another_max_model_len_has_kv_of_its_own(story: Story, truth: list[Stored]) -> None:
    story.first.kill()
    story.first = story.machine.engine(arguments=ADAPTERS | {"max_model_len": SHORT}).ready()
    expected = story.short.answers(PROMPTS)
    assert differ(expected, truth)
    answers = story.answers(story.first)
    assert cached(answers) == NONE
    assert_same(answers, expected)
    assert_same(story.found(story.first), expected)
    assert_same(story.answers(story.second), truth)


def test_an_adapter_that_was_exchanged_is_known_at_the_next_start(story: Story) -> None:
    expected = story.answers(story.short, adapter=True)
    assert_same(story.found(story.first, adapter=True), expected)


def test_weights_updated_in_place_have_kv_of_their_own(story: Story, truth: list[Stored]) -> None:
    story.plain.update_weights()
    updated = story.plain.answers(PROMPTS)
    assert differ(updated, truth)
    before = story.short.answers(PROMPTS)
    story.second.update_weights()
    answers = story.answers(story.second)
    assert cached(answers) == NONE
    assert_same(answers, updated)
    assert_same(story.found(story.second), updated)
    assert_same(story.answers(story.first), before)
