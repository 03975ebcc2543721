"""Sparse attention and bounded contexts through the `openai` client: for who asks, and exact at a
share of 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from headrace_decode.attention.page_counts import MIN_TOKENS
from tests.support.prompts import noise
from tests.support.served import MODEL, ServedApp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = noise(MIN_TOKENS + 252, 40)
MANY = 40
"""Tokens of an answer. Its first ones may be dense, while summaries are made."""
LONG = 1000
"""Tokens of an answer that is longer than reading its context again takes: at least
`reread_rate.LEAST` rows are read in each of its steps, however slow the machine is."""
Found = tuple[str, list[str], list[float]]
"""The header that tells of techniques, tokens, and their log-probabilities."""


@pytest.fixture(scope="module")
def client(served: ServedApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=300) as client:
        yield client


def ask(client: openai.OpenAI, tokens: int = MANY, **xargs: Any) -> Found:
    raw = client.completions.with_raw_response.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=tokens,
        temperature=0,
        logprobs=1,
        extra_body={"vllm_xargs": xargs, "ignore_eos": True},
    )
    said = raw.parse().choices[0].logprobs
    assert said is not None and said.tokens is not None and said.token_logprobs is not None
    values = [value for value in said.token_logprobs if value is not None]
    return raw.headers["x-headrace-techniques"], said.tokens, values


@pytest.fixture(scope="module")
def exact(client: openai.OpenAI) -> Found:
    return ask(client)


def test_who_does_not_ask_is_answered_exactly(exact: Found) -> None:
    assert exact[0] == "exact"


def test_a_share_of_one_is_the_exact_answer(client: openai.OpenAI, exact: Found) -> None:
    header, tokens, values = ask(client, sparse=1)
    assert header == "sparse"
    assert tokens == exact[1]
    assert values == pytest.approx(exact[2], abs=1e-3)


def test_a_small_share_is_another_answer_behind_its_first_token(
    client: openai.OpenAI, exact: Found
) -> None:
    header, tokens, values = ask(client, sparse=0.05)
    assert header == "sparse"
    assert tokens[0] == exact[1][0]
    assert values[0] == pytest.approx(exact[2][0], abs=1e-3)
    assert values != pytest.approx(exact[2], abs=1e-3)


def test_a_bounded_answer_is_exact_until_its_context_is_dropped(client: openai.OpenAI) -> None:
    exact, bounded, whole = (ask(client, LONG, compression=share) for share in ("off", 0.2, 1))
    assert [found[0] for found in (exact, bounded, whole)] == [
        "exact",
        "compression",
        "compression",
    ]
    assert bounded[1][:MANY] == exact[1][:MANY]
    assert bounded[2][:MANY] == pytest.approx(exact[2][:MANY], abs=1e-3)
    assert bounded[2] != pytest.approx(exact[2], abs=1e-3)
    assert whole[2] == pytest.approx(exact[2], abs=1e-3)
