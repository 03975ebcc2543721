"""Models with sliding windows beside full attention, whose KV goes through the store: each answer
is that of an engine without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cross_layer_models import BLOCK
from tests.support.families import write_family
from tests.support.machine import until
from tests.support.prompts import noise
from tests.support.store_machine import StoreMachine

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

STEP_TOKENS = 256
TOKENS = 40, 300, 700
"""Of the prompts: within the window, and beyond it; the last two take several steps."""
PROMPTS = [[5 + token % 500 for token in noise(n, n)] for n in TOKENS]
HALF = 320
"""Tokens of the longest prompt's first part; its blocks are full."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreMachine]:
    machine = StoreMachine(tmp_path_factory.mktemp("windows"), STEP_TOKENS)
    try:
        yield machine
    finally:
        machine.engines.end()


def check(answers: list[Any], truths: list[Any], cached: list[int]) -> None:
    assert [answer["cached"] for answer in answers] == cached
    for answer, truth in zip(answers, truths, strict=True):
        assert answer["tokens"] == truth["tokens"]


@pytest.mark.parametrize(
    "family", ["gemma3", "gpt_oss", pytest.param("olmo3", marks=pytest.mark.soak)]
)
def test_answers_are_those_of_an_engine_without_the_store(
    machine: StoreMachine, tmp_path: Path, family: str
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
