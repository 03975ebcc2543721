"""Answers of an engine in this process, with log-probabilities, and when two are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

WITHIN = 0.1
"""Nats, of bfloat16."""

Answer = list[tuple[int, float]]
"""Tokens, and the log-probability of each."""


def answers(
    llm: Any,
    prompts: Sequence[list[int]],
    cached: bool | None = None,
    count: int = 16,
    extra: Sequence[dict[str, Any] | None] | None = None,
) -> list[Answer]:
    """Greedy answers.

    Args:
        cached: whether most of each prompt must be found, or none of it; None: either.
        count: tokens of each. extra: extra arguments of each request; None: none have any.
    """
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=0, extra_args=each
        )
        for each in extra or [None] * len(prompts)
    ]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for prompt, one in zip(prompts, llm.generate(given, sampling, use_tqdm=False), strict=True):
        hit = one.num_cached_tokens or 0
        if cached is not None:
            assert hit > len(prompt) // 2 if cached else hit == 0
        [output] = one.outputs
        chosen = zip(output.token_ids, output.logprobs, strict=True)
        found.append([(token, logprobs[token].logprob) for token, logprobs in chosen])
    return found


def assert_alike(some: Sequence[Answer], others: Sequence[Answer]) -> None:
    """The same tokens, but where two are about equally likely: rows that are computed beside
    others, or in other chunks, are rounded otherwise. After such a token answers may differ."""
    for one, other in zip(some, others, strict=True):
        for (token, logprob), (its, likely) in zip(one, other, strict=True):
            assert logprob == pytest.approx(likely, abs=WITHIN)
            if token != its:
                break
