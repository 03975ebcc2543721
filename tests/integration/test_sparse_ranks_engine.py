"""Sparse attention in an engine of two tensor-parallel ranks: each KV head chooses its pages as in
an engine of one rank, so the answers are the same; also if KV is offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_decode.attention.page_counts import MIN_TOKENS
from headrace_decode.attention.settings import SparseSettings
from headrace_engine.extensions.extension import EXTENSIBLE_SCHEDULERS, EXTENSIBLE_WORKER
from tests.support.machine import LOGPROB_TOLERANCE
from tests.support.prompts import noise
from tests.support.sparse_engine import calibrate
from tests.support.stored import Stored, StoredEngine
from tests.support.tiny import tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [noise(MIN_TOKENS + 100 + 37 * n, 90 + n) for n in range(3)]
MANY, SPARSE = 12, {"sparse": 0.05}
BLOCKS = 11
LONG = noise(4 * (BLOCKS - 1) * 128, 30)
LONGEST = len(LONG) + 256


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sparse") / "calibration"
    calibrate(tiny_llama(), noise(512, 70), file)
    return file


def engine(ranks: int, settings: SparseSettings, **more: Any) -> StoredEngine:
    return StoredEngine(
        str(tiny_llama()),
        None,
        prefix_caching=False,
        ranks=ranks,
        worker_cls=EXTENSIBLE_WORKER,
        scheduler_cls=EXTENSIBLE_SCHEDULERS[True],
        additional_config=settings.additional_config(),
        **more,
    )


@pytest.fixture(scope="module")
def engines(calibration: Path) -> Iterator[list[StoredEngine]]:
    """One rank; two; and two whose cache holds a quarter of the longest prompt."""
    settings = SparseSettings(calibration=str(calibration))
    offload = replace(settings, offload_gib=1)
    # vLLM's default depends on the number of ranks, and rows are sparse from another step on.
    steps = {"max_num_batched_tokens": 4096}
    small = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": 256}
    made = [
        engine(1, settings, max_model_len=LONGEST, **steps),
        engine(2, settings, max_model_len=LONGEST, **steps),
        engine(2, offload, max_model_len=LONGEST, **small),
    ]
    try:
        yield [each.ready() for each in made]
    finally:
        for each in made:
            each.end()


def assert_near(some: list[Stored], others: list[Stored]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)


def test_answers_are_those_of_one_rank(engines: list[StoredEngine]) -> None:
    one, two = (each.answers(PROMPTS, max_tokens=MANY, extra=SPARSE) for each in engines[:2])
    assert_near(one, two)
    exact = engines[1].answers(PROMPTS, max_tokens=MANY)
    assert_near(exact, engines[0].answers(PROMPTS, max_tokens=MANY))
    errors = [
        abs(a - b)
        for mine, its in zip(one, exact, strict=True)
        for a, b in zip(mine.logprobs, its.logprobs, strict=True)
    ]
    assert max(errors) > 10 * LOGPROB_TOLERANCE, "rows were sparse"
    one, two = (
        each.answers(PROMPTS, max_tokens=MANY, together=True, extra=SPARSE) for each in engines[:2]
    )
    assert_near(one, two)


def test_contexts_longer_than_the_cache_are_those_of_one_rank(engines: list[StoredEngine]) -> None:
    one, _, offloads = engines
    exact = one.answers([LONG], max_tokens=MANY)
    assert_near(offloads.answers([LONG], max_tokens=MANY), exact)
    [sparse] = offloads.answers([LONG], max_tokens=MANY, extra=SPARSE)
    assert sparse.tokens[0] == exact[0].tokens[0] and len(sparse.tokens) == MANY
    together = offloads.answers([LONG, *PROMPTS], max_tokens=MANY, together=True)
    assert_near(together, one.answers([LONG, *PROMPTS], max_tokens=MANY))
