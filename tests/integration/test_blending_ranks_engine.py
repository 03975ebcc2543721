"""KV blending in an engine of two tensor-parallel ranks: both recompute the rows that an engine of
one rank does, so answers are the same, and KV of which one rank's part is damaged is used by none.

Both engines reuse the KV of one store, which the engine of one rank has filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS, EXTENSIBLE_WORKER
from headrace_engine.kv_transfer.handoff import BLENDING_KEY
from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import READY
from tests.support.machine import BLOCK, LOGPROB_TOLERANCE, until
from tests.support.prompts import noise
from tests.support.stored import Stored, StoredEngine
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

DOCUMENT, OTHER = noise(6 * BLOCK, 1), noise(3 * BLOCK, 2)
DRAM_BYTES, ANSWER, RATIO = 64 << 20, 12, 0.2
SALTS = (f"technique:blending-{n}:" for n in count())


def prompt(seed: int) -> tuple[list[int], list[tuple[list[int], int, int, int]]]:
    """A prompt with parts of both documents, and its runs: document, first token, length, place."""
    head, between, last = noise(40, 10 + seed), noise(30, 20 + seed), noise(25, 30 + seed)
    tokens = head + OTHER[17:290] + between + DOCUMENT[100:650] + last
    return tokens, [(OTHER, 17, 273, 40), (DOCUMENT, 100, 550, 40 + 273 + 30)]


def engine(ranks: int, folder: Path) -> StoredEngine:
    store = {"name": "ranks", "folder": str(folder), "dram_bytes": DRAM_BYTES, "node": False}
    return StoredEngine(
        str(tiny_llama()),
        store,
        ranks=ranks,
        blends=True,
        worker_cls=EXTENSIBLE_WORKER,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[True],
        max_num_batched_tokens=512,  # vLLM's default depends on the number of ranks
        max_model_len=2048,
        num_gpu_blocks_override=64,
    )


class Engines:
    """One rank, and two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        made = [engine(ranks, folder) for ranks in (1, 2)]
        self.one, self.two = (each.ready() for each in made)
        self.one.answers([[*document, 50] for document in (DOCUMENT, OTHER)])
        until(lambda: self.ready_blocks() == 9)
        self._digests = {0: self.one.digests(DOCUMENT), 1: self.one.digests(OTHER)}

    def arena(self) -> Arena:
        return Arena.create_or_attach("ranks", DRAM_BYTES, folder=self.folder)

    def ready_blocks(self) -> int:
        with self.arena() as arena:
            return int((arena.table["state"] == READY).sum())

    def blended(self, of: StoredEngine, seeds: list[int]) -> list[Stored]:
        """Answers to prompts that come together and reuse the documents; runs are the same."""
        extra = {"kv_transfer_params": {BLENDING_KEY: self._found(seeds[0])}}
        prompts = [prompt(seed)[0] for seed in seeds]
        salts = [next(SALTS) for _ in prompts]
        return of.answers(prompts, salts, max_tokens=ANSWER, together=True, extra=extra)

    def exact(self, seed: int) -> Stored:
        [answer] = self.one.answers([prompt(seed)[0]], [next(SALTS)], max_tokens=ANSWER)
        return answer

    def _found(self, seed: int) -> dict[str, Any]:
        tokens, runs = prompt(seed)
        found = []
        for document, first, length, new in runs:
            blocks = self._digests[int(document is OTHER)][
                first // BLOCK : -(-(first + length) // BLOCK)
            ]
            joined = [byte for block in blocks for byte in block]
            found.append([new, first, length, first % BLOCK, joined])
        return {"runs": found, "last": len(tokens) - 8, "recompute_ratio": RATIO}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("arena"))
    try:
        yield made
    finally:
        made.two.end()
        made.one.end()


def assert_near(some: list[Stored], others: list[Stored]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.tokens, one.cached) == (other.tokens, other.cached)
        assert one.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)


def test_both_engines_blend(engines: Engines) -> None:
    assert engines.one.unsupported() == engines.two.unsupported() == {}


def test_answers_are_those_of_one_rank(engines: Engines) -> None:
    for seeds in ([0], [1], [2, 3, 4]):
        one, two = (engines.blended(each, seeds) for each in (engines.one, engines.two))
        assert_near(two, one)
        assert [each.cached for each in two] == [len(prompt(0)[0]) - 1] * len(seeds)
    exact, [blended] = engines.exact(0), engines.blended(engines.two, [0])
    errors = [abs(a - b) for a, b in zip(exact.logprobs, blended.logprobs, strict=True)]
    assert exact.cached == 0 and max(errors) > 10 * LOGPROB_TOLERANCE, "KV was approximate"


@pytest.mark.parametrize("head", [0, 1])
def test_a_block_of_which_one_ranks_part_is_damaged_is_used_by_none(
    engines: Engines, head: int
) -> None:
    with engines.arena() as arena:
        ready = (arena.table["state"] == READY).nonzero()[0]
        places = []
        for slot in ready:  # the first or the last byte of a block: the first or second rank's
            view = arena.view(int(slot))
            places.append((view, -1 if head else 0))
        for view, at in places:
            view[at] ^= 1
        [answer] = engines.blended(engines.two, [5])
        for view, at in places:
            view[at] ^= 1
        del view, places
    exact = engines.exact(5)
    assert answer.cached == 0 and answer.tokens == exact.tokens
    assert answer.logprobs == pytest.approx(exact.logprobs, abs=LOGPROB_TOLERANCE)
    one, two = (engines.blended(each, [5]) for each in (engines.one, engines.two))
    assert_near(two, one)
    assert two[0].cached == len(prompt(5)[0]) - 1, "the next request blends again"


def test_a_block_that_left_the_store_is_computed(engines: Engines) -> None:
    """The last test: the store is empty after it."""
    with engines.arena() as arena:
        arena.clear()
    [answer] = engines.blended(engines.two, [6])
    exact = engines.exact(6)
    assert answer.cached == 0 and answer.tokens == exact.tokens
