"""Models with recurrent layers, whose states go through the store: each answer is that of an engine
without it.

Both engines compute a prompt in the same steps: vLLM ends them at block boundaries, and the last
one begins where a hit ends. So the answers are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import write_family
from tests.support.machine import until
from tests.support.prompts import noise
from tests.support.store_machine import StoreMachine

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

STEP_TOKENS, DTYPE = 512, "bfloat16"
"""vLLM computes GDN on CPUs in bfloat16 only."""
TOKENS = 60, 500, 900
"""Of the prompts: less than a block, and several steps."""
PROMPTS = [[5 + token % 500 for token in noise(n, n)] for n in TOKENS]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreMachine]:
    machine = StoreMachine(tmp_path_factory.mktemp("states"), STEP_TOKENS)
    try:
        yield machine
    finally:
        machine.engines.end()


def ask_each(machine: StoreMachine, *prompts: list[int]) -> list[Any]:
    """The answers, one request at a time, so that no step has rows of two."""
    return [machine.ask(prompt)[0] for prompt in prompts]


def check(answers: list[Any], truths: list[Any], cached: list[int]) -> None:
    assert [answer["cached"] for answer in answers] == cached
    for answer, truth in zip(answers, truths, strict=True):
        assert answer["tokens"] == truth["tokens"]
        assert answer["logprobs"] == truth["logprobs"]


def test_answers_are_those_of_an_engine_without_the_store(
    machine: StoreMachine, tmp_path: Path
) -> None:
    model = write_family(tmp_path, "qwen3_next")
    machine.open(model, store=None, dtype=DTYPE)
    truths = ask_each(machine, *PROMPTS)
    block = machine.engines.do("block_tokens")
    blocks = [tokens // block for tokens in TOKENS]
    assert blocks[0] == 0 and blocks[1] >= 2

    machine.open(model, dtype=DTYPE)
    check(ask_each(machine, *PROMPTS), truths, [0, 0, 0])
    until(lambda: machine.stored() > sum(blocks))
    until(lambda: machine.engines.do("forget"))
    stored = machine.stored()

    machine.open(model, dtype=DTYPE)
    whole = [n * block for n in blocks]
    check(ask_each(machine, *PROMPTS), truths, whole)

    machine.forget()
    half = blocks[-1] // 2 * block
    ask_each(machine, PROMPTS[-1][: half + 1])  # the engine has these, the store has the others
    check(ask_each(machine, PROMPTS[-1]), truths[-1:], whole[-1:])

    machine.forget()
    machine.flip(depth=blocks[-1])  # the states after the last block
    check(ask_each(machine, PROMPTS[-1]), truths[-1:], [0])
    until(lambda: machine.stored() >= stored)
    machine.forget()
    check(ask_each(machine, PROMPTS[-1]), truths[-1:], whole[-1:])
