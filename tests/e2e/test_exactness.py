"""Greedy output is the same, token for token, from a plain vLLM engine and by each way.

And the status tells which way it was: bytes that NIXL moved, plans by kind. Prompts of all
`LENGTHS` are compared in `test_keys`, by a model that answers faster.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.model import describe
from tests.support.app import App, until
from tests.support.exact import answer, answer_by
from tests.support.prompts import (
    FIRST_TURN,
    SECOND_TURN,
    exactness_prompts,
    plain_prompts,
    text_ids,
    turns,
)
from tests.support.truth import Truth, plain_truth

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

FLOAT32_BYTES = 4
BLOCK_TOKENS = 128
CHOSEN = (1, 33, 128, 129, 513)


@pytest.fixture(scope="module")
def prompts(model_folder: Path) -> list[list[int]]:
    every = exactness_prompts(text_ids(model_folder))
    return [prompt for prompt in every if len(prompt) in CHOSEN]


@pytest.fixture(scope="module")
def truth(model_folder: Path) -> Truth:
    """What a plain engine answers."""
    return plain_truth(model_folder, plain_prompts(model_folder))


@pytest.fixture(scope="module")
def kv_bytes_per_token(model_folder: Path) -> int:
    facts = describe(model_folder)
    return facts.kv_bytes_per_token // facts.dtype_bytes * FLOAT32_BYTES


@pytest.mark.parametrize("way", ["local", "remote"])
def test_greedy_answers_are_those_of_a_plain_engine(
    way: str,
    truth: Truth,
    app: App,
    prompts: list[list[int]],
    kv_bytes_per_token: int,
) -> None:
    bytes_before, plans_before = app.nixl_bytes(), app.plans()
    asked: list[int] = []
    with app.policy(way):
        answers = [answer_by(app, way, prompt, asked) for prompt in prompts]

    assert not truth.differences(prompts, answers)
    plans = app.plans()
    assert plans[way] - plans_before[way] >= len(prompts)
    if way == "local":
        assert app.nixl_bytes() == bytes_before
    else:
        least = sum(CHOSEN) * kv_bytes_per_token
        until(lambda: app.nixl_bytes() - bytes_before >= least, 60.0, f"{least} bytes over NIXL")
        whole_blocks = sum(-(-length // BLOCK_TOKENS) * BLOCK_TOKENS for length in asked)
        assert app.nixl_bytes() - bytes_before <= whole_blocks * kv_bytes_per_token
        nixl = app.replica("decode")["nixl"]
        assert nixl["failures"] == 0
        # All pulls were proved, and compared byte for byte with what was computed.
        assert nixl["proofs"]["checked"] == nixl["proofs"]["proved"] >= len(prompts)
        assert set(nixl["proofs"]) == {"checked", "proved"}, "a pull was not used"


def test_kv_of_requests_at_once_is_not_mixed_up(
    truth: Truth, app: App, prompts: list[list[int]]
) -> None:
    some = [prompt for prompt in prompts if 16 <= len(prompt) <= 520]
    salt = uuid.uuid4().hex
    with app.policy("remote"), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: answer(app, p, salt)["tokens"], some))
    assert not truth.differences(some, answers)


@pytest.mark.parametrize("first_way", ["local", "remote"])
@pytest.mark.parametrize("second_way", ["local", "remote"])
def test_a_second_turn_uses_what_is_cached_whichever_way_it_came(
    first_way: str,
    second_way: str,
    truth: Truth,
    app: App,
    model_folder: Path,
    kv_bytes_per_token: int,
) -> None:
    salt = uuid.uuid4().hex
    asked = turns(text_ids(model_folder))
    with app.policy(first_way):
        first = answer(app, asked[0], salt)
    app.wait_idle()
    before = app.nixl_bytes()
    with app.policy(second_way):
        second = answer(app, asked[1], salt)

    assert not truth.differences(asked, [first["tokens"], second["tokens"]])
    app.wait_idle()
    moved_tokens = (app.nixl_bytes() - before) / kv_bytes_per_token
    cached = FIRST_TURN // BLOCK_TOKENS * BLOCK_TOKENS
    if second_way == "local":
        assert moved_tokens == 0
    else:
        assert SECOND_TURN - cached <= moved_tokens <= SECOND_TURN - cached + BLOCK_TOKENS
