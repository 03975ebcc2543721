"""Steps in which a compressed request is read again and scored, and the KV that it keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from headrace_decode.compression.engine.compression_job import (
    EARLIER_TOKENS,
    MIN_FREED_TOKENS,
    MIN_PART,
    CompressionJob,
)
from headrace_decode.compression.engine.context_scorer import RereadRows
from headrace_decode.compression.engine.reread_rate import LEAST, LONGER, RereadRateController
from headrace_decode.compression.engine.scheduler import CompressionSchedulerPart
from headrace_decode.compression.engine.settings import CompressionSettings, settings_of
from headrace_decode.compression.scores import LEAD_TOKENS, PART_TOKENS
from headrace_decode.compression.selection import AlwaysKept
from headrace_decode.techniques import COMPRESSION, keep_ratio_in

LAYERS, BLOCK, LONGEST = 3, 128, 8192


def job(
    prompt: int, share: float = 0.25, longest: int = LONGEST, has_predictor: bool = False
) -> CompressionJob:
    return CompressionJob(
        "x", [n % 1000 for n in range(prompt)], share, BLOCK, longest, LAYERS, has_predictor
    )


@pytest.mark.parametrize("prompt", [1000, 1024, 4000, 7600])
def test_each_token_of_the_context_is_repeated_once_and_the_last_rows_come_anew(
    prompt: int,
) -> None:
    one, repeated = job(prompt), list[int]()
    context = [n % 1000 for n in range(prompt // BLOCK * BLOCK)]
    n = len(context)
    assert one.is_worthwhile and one.kept == -(-n // BLOCK // 4)
    while not one.all_read:
        part, first = one.next_part(), len(repeated)
        rereads, lead = part.rows, part.rows.repeating - n
        assert part.tokens[:n] == context and rereads.tokens == n
        assert 0 <= lead <= LEAD_TOKENS
        assert part.tokens[n : rereads.repeating] == context[first - lead : first]
        repeated += part.tokens[rereads.repeating :]
        assert len(part.tokens) < LONGEST and len(part.tokens) - n <= PART_TOKENS + LEAD_TOKENS
        assert rereads.earlier == (n if first else n - EARLIER_TOKENS)
        assert part.cached % BLOCK == 0 and part.cached <= rereads.earlier
    assert repeated == context
    one.restart()
    assert not one.all_read


def test_with_a_gate_the_last_rows_come_anew_and_none_repeats() -> None:
    one = job(4000, longest=4000, has_predictor=True)
    context = [n % 1000 for n in range(4000 // BLOCK * BLOCK)]
    part, n = one.next_part(), len(context)
    assert part.tokens == context and part.rows == RereadRows("x", n, n - EARLIER_TOKENS, n)
    assert part.cached == n - EARLIER_TOKENS and one.all_read
    assert not job(MIN_FREED_TOKENS, 0.01, has_predictor=True).is_worthwhile


@pytest.mark.parametrize(
    ("prompt", "share", "longest"),
    [
        (MIN_FREED_TOKENS, 0.01, LONGEST),
        (BLOCK * 20, 0.99, LONGEST),
        (BLOCK * 20 + 9, 0.25, BLOCK * 20 + LEAD_TOKENS + MIN_PART),
        (5, 0.25, LONGEST),
    ],
)
def test_what_frees_too_little_or_has_no_positions_left_is_never_read_again(
    prompt: int, share: float, longest: int
) -> None:
    assert not job(prompt, share, longest).is_worthwhile


@pytest.mark.parametrize("block", [16, 32])
def test_small_blocks_must_free_and_keep_as_many_tokens_as_large_ones(block: int) -> None:
    def of(prompt: int, share: float) -> CompressionJob:
        return CompressionJob("x", [0] * prompt, share, block, LONGEST, LAYERS)

    assert of(4 * MIN_FREED_TOKENS // 3 + block, 0.25).is_worthwhile
    assert not of(4 * MIN_FREED_TOKENS // 3 - block, 0.25).is_worthwhile
    always = AlwaysKept()
    assert of(4000, 0.001).kept * block >= always.sinks + always.newest


def test_parts_of_one_course_have_names_of_their_own() -> None:
    one, names = job(4000), []
    while not one.all_read:
        names.append(one.next_part().name)
        assert one.reader == names[-1]
    assert len(set(names)) == len(names) > 1


@pytest.mark.parametrize("rows", [1, 5, 256, 300])
def test_all_layers_are_scored_behind_the_last_part_and_then_fitted_and_no_more(rows: int) -> None:
    one = job(4000)
    assert 1 <= one.score(rows, is_reading=True) <= 2 * LAYERS
    while not one.all_read:
        one.next_part()
    one.score(rows, is_reading=True)
    scored = 0
    while not one.all_scored:
        scored += one.score(rows, is_reading=False)
    assert scored == LAYERS and one.score(rows, is_reading=False) == 0
    layers = 0
    while not one.all_fitted:
        layers += one.fit(rows)
    assert layers == LAYERS and one.fit(rows) == 0
    one.restart()
    assert not one.all_scored and not one.all_fitted


def test_rows_settle_where_a_step_takes_as_much_longer_as_it_may() -> None:
    pace, alone_s, row_s = RereadRateController(), 0.040, 0.003
    seen = []
    for _ in range(100):
        seen.append(pace.rows)
        pace.record_step(alone_s + pace.rows * row_s, alone_s)
    settled = np.mean(seen[50:]) * row_s / alone_s
    assert LONGER - 1.3 < settled < LONGER - 0.9


@pytest.mark.parametrize("least", [1, 9])
def test_some_rows_are_always_read(least: int) -> None:
    pace = RereadRateController(least)
    for _ in range(50):
        pace.record_step(10.0, 0.1)
    assert pace.rows == max(least, LEAST)
    for _ in range(100):
        pace.record_step(0.1, 0.1)
    assert pace.rows == PART_TOKENS


def test_settings_go_there_and_back() -> None:
    settings = CompressionSettings("auto", 0.5)
    assert settings_of(settings.additional_config()) == settings
    assert settings_of({}) is None and settings_of(None) is None


@pytest.mark.parametrize(
    ("told", "share"),
    [
        ({"compression": 0.3}, 0.3),
        ({"compression": 1}, None),
        ({"compression": True}, None),
        ({}, None),
    ],
)
def test_a_request_says_what_it_keeps(told: dict[str, object], share: float | None) -> None:
    class Params:
        extra_args = told

    assert (
        keep_ratio_in(Params(), COMPRESSION) == share and keep_ratio_in(None, COMPRESSION) is None
    )


@pytest.mark.parametrize("media", [[], ["an image"]])
def test_a_context_with_media_is_not_read_again(media: list[str]) -> None:
    """Its tokens are not all that its KV depends on."""
    group = SimpleNamespace(layer_names=["layer"])
    scheduler: Any = SimpleNamespace(
        stays=lambda request: False,
        incremental=None,
        jobs={},
        _manager=SimpleNamespace(
            block_size=128, ledger=SimpleNamespace(planned=lambda request_id: None)
        ),
        _scheduler=SimpleNamespace(
            max_model_len=100_000, kv_cache_config=SimpleNamespace(kv_cache_groups=[group])
        ),
    )
    request = SimpleNamespace(
        request_id="r",
        prompt_token_ids=[1] * 8192,
        mm_features=media,
        sampling_params=SamplingParams(extra_args={"compression": 0.3}),
    )
    CompressionSchedulerPart.after_add(scheduler, request)
    assert bool(scheduler.jobs) == (not media)
