"""Every layout of KV in the store, with models that compute: saved by one engine, evicted from DRAM
to disk, loaded by another one.

One process makes all engines, one after the other, in some three seconds each; one node serves all.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_kvstore.arena.arena import Arena
from tests.support.cross_layer_models import VOCABULARY, FusingEngines
from tests.support.layouts import LAYOUTS, WINDOWS, Layout
from tests.support.machine import LOGPROB_TOLERANCE, until
from tests.support.storenode import StoreNodeProcess

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

DRAM_BYTES = 32 << 20
BLOCKS = 3, 6, 20
"""Of the prompts, which have a token more. vLLM's CPU kernel for MLA computes a prompt in one
piece, so that after a hit nothing but that token may be left."""


class Machine:
    """An arena, a node with a disk, and a process that makes engines over them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = {
            "name": f"headrace-test-{uuid.uuid4().hex[:12]}",
            "dram_bytes": DRAM_BYTES,
            "priced": False,
            "node_timeout_s": 10.0,
            "lease_s": 20.0,
        }
        self._node = StoreNodeProcess(
            name=self.store["name"],
            dram_bytes=DRAM_BYTES,
            nvme_folder=folder / "nvme",
            nvme_bytes=1 << 29,
            segment_bytes=16 << 20,  # so that each model's blocks have some of their own
            keep_arena=True,
        ).start()
        self.engines = FusingEngines()

    def open(self, model: Path, layout: Layout, **more: Any) -> None:
        """An engine in place of the one before."""
        options: dict[str, Any] = {"store": self.store, "kv_sharing_fast_prefill": True}
        self.engines.do("open", model=str(model), **options | layout.options | more)

    def ask(self, layout: Layout) -> list[Any]:
        """Answers to the prompts, one after the other."""
        prompts = [prompt_of(blocks * layout.block + 1) for blocks in BLOCKS]
        return [self.engines.do("answers", prompts=[p], max_tokens=8)[0] for p in prompts]

    def on_disk(self) -> int:
        return int(self._node.stats()["tiers"]["nvme"]["blocks"])

    def arena(self) -> Arena:
        return Arena.create_or_attach(str(self.store["name"]), DRAM_BYTES)

    def evict(self) -> None:
        """Leave what is on disk, alone."""
        with self.arena() as arena:
            arena.clear()

    def end(self) -> None:
        self.engines.end()
        self._node.kill()
        (Path("/dev/shm") / str(self.store["name"])).unlink(missing_ok=True)


def prompt_of(tokens: int) -> list[int]:
    return random.Random(tokens).choices(range(1, VOCABULARY), k=tokens)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("layouts"))
    try:
        yield machine
    finally:
        machine.end()


def found(layout: Layout) -> list[int]:
    return [blocks * layout.block for blocks in BLOCKS]


def assert_found(answers: list[Any], cold: list[Any], layout: Layout) -> None:
    """The same tokens, computed from what the store had."""
    assert [answer["cached"] for answer in answers] == found(layout)
    for answer, truth in zip(answers, cold, strict=True):
        assert answer["tokens"] == truth["tokens"]
        assert answer["logprobs"] == pytest.approx(truth["logprobs"], abs=LOGPROB_TOLERANCE)


def assert_kept(machine: Machine, model: Path, layout: Layout) -> list[Any]:
    """One engine saves, another one loads from DRAM, then from the disk. Returns the answers."""
    before = machine.on_disk()
    machine.open(model, layout)
    cold = machine.ask(layout)
    assert [answer["cached"] for answer in cold] == [0] * len(BLOCKS)
    until(lambda: machine.on_disk() >= before + sum(BLOCKS))
    with machine.arena() as arena:
        assert arena.namespaces()[-1].block_bytes == layout.block_bytes

    machine.open(model, layout)
    assert_found(machine.ask(layout), cold, layout)
    answers: list[Any] = []

    def from_disk() -> bool:
        until(lambda: machine.engines.do("forget"))
        machine.evict()
        answers[:] = machine.ask(layout)
        return [answer["cached"] for answer in answers] == found(layout)

    until(from_disk)
    assert_found(answers, cold, layout)
    return cold


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_one_engine_saved_another_loads_from_dram_and_from_disk(
    machine: Machine, name: str
) -> None:
    layout = LAYOUTS[name]
    assert_kept(machine, layout.write(machine.folder / name), layout)


def test_windows_of_attention_are_kept_with_one_cache_group_and_with_two(machine: Machine) -> None:
    """By default vLLM makes two groups, whose engines share blocks with those of one."""
    model = WINDOWS.write(machine.folder / "windows")
    cold = assert_kept(machine, model, WINDOWS)
    machine.open(model, WINDOWS, disable_hybrid_kv_cache_manager=True)
    assert_found(machine.ask(WINDOWS), cold, WINDOWS)
