"""A load that fails in an engine on a GPU: its blocks are computed, and no answer is wrong.

One engine for all of these tests. A bit of a stored block is flipped, so that the kernel on the
device finds another checksum, in a load within a step and in loads beside decodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.engine import make_llm, settle, store_connector
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY
from tests.support.gpu_answers import Answer, answers, assert_alike

pytestmark = pytest.mark.gpu

NAME = f"headrace-gpu-failed-{os.getpid()}"
PROMPT = [100 + i * 11 % 1900 for i in range(1500)]
OTHERS = 7 if torch.cuda.is_available() else 2


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    made = make_llm(store_connector(NAME, "2GiB"), positions=4096, memory=0.3)
    yield made
    del made
    (Path("/dev/shm") / NAME).unlink(missing_ok=True)


def stored(llm: Any, prompts: list[list[int]]) -> list[Answer]:
    """Answers, after which the prompts are in the store only."""
    found = answers(llm, prompts, cached=False)
    settle(llm)
    return found


def damage(which: slice) -> int:
    """Flip a bit in some of the stored blocks, in the order of their slots; how many."""
    with Arena.attach(NAME) as arena:
        slots = np.flatnonzero(arena.table["state"] == READY)[which]
        for slot in slots:
            arena.view(int(slot))[1000] ^= 1
        return len(slots)


def discarded() -> int:
    with Arena.attach(NAME) as arena:
        return int(arena.stats()["discarded_total"])


def test_damaged_blocks_are_computed(llm: Any) -> None:
    cold = stored(llm, [PROMPT])
    before, damaged = discarded(), damage(slice(1, None))
    assert damaged > 1
    assert_alike(answers(llm, [PROMPT]), cold)
    assert discarded() > before


def test_damaged_blocks_beside_decodes_are_computed(llm: Any) -> None:
    prompts = [[token + 1 + n for token in PROMPT] for n in range(1 + OTHERS)]
    cold = stored(llm, prompts)
    before = discarded()
    assert damage(slice(None, None, 3))
    assert_alike(answers(llm, prompts), cold)
    assert discarded() > before


def test_blocks_that_were_computed_again_are_stored_again(llm: Any) -> None:
    prompt = [token + 40 for token in PROMPT]
    cold = stored(llm, [prompt])
    damage(slice(None))
    assert_alike(answers(llm, [prompt]), cold)
    settle(llm)
    assert_alike(answers(llm, [prompt], cached=True), cold)
