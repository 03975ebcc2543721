"""Outputs of vLLM's engine core, made from the values that its frontend gave away.

`tests/unit/test_contracts_resume.py` pins what is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

RankedTokens = tuple[tuple[int, float, int], ...]
"""The sampled token first, then the most likely ones: token id, log-probability, rank."""

_FINISH_REASONS = {str(reason): reason for reason in FinishReason}


def ranked_tokens(choice: Any) -> tuple[RankedTokens, ...] | None:
    """Return the log-probabilities of each token of a choice (vLLM's `CompletionOutput`)."""
    if choice.logprobs is None:
        return None
    found = []
    for token, ranked in zip(choice.token_ids, choice.logprobs, strict=True):
        own = ranked[token]
        likely = [
            (other, one.logprob, one.rank or 0) for other, one in ranked.items() if other != token
        ]
        found.append(((token, own.logprob, own.rank or 0), *likely))
    return tuple(found)


def core_output(
    request_id: str,
    tokens: Sequence[int],
    logprobs: Sequence[RankedTokens] | None,
    finish: str | None,
    stop: int | str | None,
) -> EngineCoreOutput:
    """Return the output with which the engine core gave these tokens of one request.

    A choice that ended with a stop string has no end here: vLLM's frontend finds stop strings.
    """
    reason = None
    if finish is not None and not isinstance(stop, str):
        reason = _FINISH_REASONS.get(finish, FinishReason.STOP)
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=list(tokens),
        new_logprobs=None if logprobs is None else logprobs_lists(logprobs),
        finish_reason=reason,
        stop_reason=None if reason is None else stop,
    )


def process_earlier_output(processor: Any, output: EngineCoreOutput) -> None:
    """Pass an output that another engine gave through the frontend's `OutputProcessor`.

    No span is made of a request that it ends: a span needs the times of this engine's steps.
    """
    traced, processor.tracing_enabled = processor.tracing_enabled, False
    try:
        processor.process_outputs([output])
    finally:
        processor.tracing_enabled = traced


def logprobs_lists(logprobs: Sequence[RankedTokens]) -> LogprobsLists:
    """Return log-probabilities in the engine core's form, one row for each token.

    A row has the sampled token, then the most likely ones by rank, with the sampled one again if it
    is one of them.
    """
    rows = []
    for sampled, *likely in logprobs:
        max_rank = max((rank for _, _, rank in likely), default=0)
        ranked = {rank: one for one in likely if (rank := one[2])}
        if sampled[2] <= max_rank + 1:
            ranked.setdefault(sampled[2], sampled)
        rows.append([sampled, *(ranked[rank] for rank in sorted(ranked))])
    width = max((len(row) for row in rows), default=1)
    rows = [row + [(0, -np.inf, 0)] * (width - len(row)) for row in rows]
    return LogprobsLists(
        np.array([[one[0] for one in row] for row in rows], dtype=np.int32).reshape(-1, width),
        np.array([[one[1] for one in row] for row in rows], dtype=np.float32).reshape(-1, width),
        np.array([row[0][2] for row in rows], dtype=np.int32),
    )


def begin_prefill(processor: Any, request_id: str) -> None:
    """Have the frontend expect the engine's report of how much of a prompt it computed.

    Args:
        processor: vLLM's `OutputProcessor`.
    """
    processor.request_states[request_id].is_prefilling = True
