"""Two real vLLM engines, one after the other, over one store: what one computed the other loads."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.model import resolve
from headrace_kvstore.arena import Arena
from headrace_kvstore.table import READY
from tests.support.prompts import noise
from tests.support.stored import Stored, stored_answers

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 128
LENGTHS = [127, 128, 129, 1000, 2500]
LOGPROB_TOLERANCE = 1e-4
"""Nats. The cold run computes a prompt in one step, the warm one its last block only: float32 sums
in another order."""

PROMPTS = [noise(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    name = f"headrace-test-{uuid.uuid4().hex[:12]}"
    yield {"name": name, "dram_bytes": "512MiB"}
    (Path("/dev/shm") / name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def cold(store: dict[str, str]) -> list[Stored]:
    """The first engine's answers; it has nothing to load and saves all."""
    answers = stored_answers(
        str(resolve("smollm2-135m-instruct")),
        [*PROMPTS, PROMPTS[3]],
        store,
        salts=[None] * len(PROMPTS) + ["tenant-a"],
    )
    assert [answer.cached for answer in answers] == [0] * len(answers)
    return answers


@pytest.fixture(scope="module")
def flipped(cold: list[Stored], store: dict[str, str]) -> Iterator[Arena]:
    """The store, one bit of the longest prompt's last block flipped."""
    with Arena.create_or_attach(store["name"], 2**29) as arena:
        ready = (arena.table["state"] == READY).nonzero()[0]
        deepest = max(ready, key=lambda slot: arena.table["depth"][slot])
        assert arena.table["depth"][deepest] == (LENGTHS[4] - 1) // BLOCK - 1
        arena.view(int(deepest))[100_000] ^= 1
        yield arena


@pytest.fixture(scope="module")
def warm(flipped: Arena, store: dict[str, str]) -> list[Stored]:
    """Another engine's answers to the same, in another process."""
    return stored_answers(
        str(resolve("smollm2-135m-instruct")),
        [*PROMPTS, PROMPTS[3], PROMPTS[3]],
        store,
        salts=[None] * len(PROMPTS) + ["tenant-a", "tenant-b"],
    )


def test_what_one_engine_computed_the_next_one_loads(warm: list[Stored]) -> None:
    found = [answer.cached for answer in warm[: len(PROMPTS)]]
    assert found == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]


def test_a_flipped_bit_is_found_and_its_block_dropped(warm: list[Stored], flipped: Arena) -> None:
    """vLLM computes it instead; that the answer is right is tested below."""
    assert flipped.stats()["discarded_total"] == 1


@pytest.mark.parametrize("number", range(len(PROMPTS)), ids=[str(n) for n in LENGTHS])
def test_the_answer_is_the_cold_one(cold: list[Stored], warm: list[Stored], number: int) -> None:
    assert warm[number].tokens == cold[number].tokens
    assert warm[number].logprobs == pytest.approx(cold[number].logprobs, abs=LOGPROB_TOLERANCE)


def test_a_salt_finds_its_own_blocks_and_no_other_does(
    cold: list[Stored], warm: list[Stored]
) -> None:
    own, other = warm[-2], warm[-1]
    assert own.cached == (LENGTHS[3] - 1) // BLOCK * BLOCK
    assert other.cached == 0
    assert own.tokens == other.tokens == cold[3].tokens
