"""Models with sliding windows beside full attention, whose KV goes through the store: each answer
is that of an engine without it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY
from tests.support.cross_layer_models import BLOCK, FusingEngines
from tests.support.families import write_family
from tests.support.machine import until
from tests.support.prompts import noise

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

DRAM_BYTES, ANSWER, STEP_TOKENS = 64 << 20, 8, 256
TOKENS = 40, 300, 700
"""Of the prompts: within the window, and beyond it; the last two take several steps."""
PROMPTS = [[5 + token % 500 for token in noise(n, n)] for n in TOKENS]
HALF = 320
"""Tokens of the longest prompt's first part; its blocks are full."""


class Machine:
    """An arena, and a process that makes engines over it."""

    def __init__(self, folder: Path) -> None:
        self.store = {
            "name": f"headrace-test-{uuid.uuid4().hex[:12]}",
            "folder": str(folder),
            "dram_bytes": DRAM_BYTES,
            "node": False,
        }
        self.engines = FusingEngines()

    def open(self, model: Path, **more: Any) -> None:
        """An engine in place of the one before."""
        options = {"store": self.store, "max_num_batched_tokens": STEP_TOKENS} | more
        self.engines.do("open", model=str(model), **options)

    def ask(self, *prompts: list[int]) -> list[Any]:
        found: list[Any] = self.engines.do("answers", prompts=prompts, max_tokens=ANSWER)
        return found

    def forget(self) -> None:
        """Empty the engine's own cache."""
        until(lambda: self.engines.do("forget"))

    def arena(self) -> Arena:
        return Arena.create_or_attach(
            self.store["name"], DRAM_BYTES, folder=Path(self.store["folder"])
        )

    def stored(self) -> int:
        with self.arena() as arena:
            return int((arena.table["state"] == READY).sum())

    def flip(self, depth: int) -> None:
        """Flip a bit in each layer of the stored blocks of this depth."""
        with self.arena() as arena:
            table = arena.table
            for slot in ((table["state"] == READY) & (table["depth"] == depth)).nonzero()[0]:
                arena.view(int(slot))[1000::4096] ^= 0x10


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("windows"))
    try:
        yield machine
    finally:
        machine.engines.end()


def check(answers: list[Any], truths: list[Any], cached: list[int]) -> None:
    assert [answer["cached"] for answer in answers] == cached
    for answer, truth in zip(answers, truths, strict=True):
        assert answer["tokens"] == truth["tokens"]


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "olmo3"])
def test_answers_are_those_of_an_engine_without_the_store(
    machine: Machine, tmp_path: Path, family: str
) -> None:
    model = write_family(tmp_path, family)
    machine.open(model, store=None)
    truths = machine.ask(*PROMPTS)
    before, blocks = machine.stored(), [tokens // BLOCK for tokens in TOKENS]

    machine.open(model)
    check(machine.ask(*PROMPTS), truths, [0, 0, 0])
    until(lambda: machine.stored() >= before + sum(blocks))

    machine.open(model)
    whole = [n * BLOCK for n in blocks]
    check(machine.ask(*PROMPTS), truths, whole)

    machine.forget()
    machine.ask(PROMPTS[-1][: HALF + 1])  # the engine has these, the store has the others
    check(machine.ask(PROMPTS[-1]), truths[-1:], whole[-1:])

    machine.forget()
    machine.flip(depth=blocks[-1] - 1)
    check(machine.ask(PROMPTS[-1]), truths[-1:], [0])
    until(lambda: machine.stored() >= before + sum(blocks))
    machine.forget()
    check(machine.ask(PROMPTS[-1]), truths[-1:], whole[-1:])

    machine.open(model, disable_hybrid_kv_cache_manager=True)
    check(machine.ask(*PROMPTS), truths, whole)
