"""What an engine's outputs were, from vLLM's objects, and vLLM's objects from that.

The frontend of vLLM turns token ids into what the serving layer gets: text, log-probabilities,
finish reasons. `feed` leads a new request's state through what was said elsewhere, output by
output, so that the serving layer gets the same objects once more, and the state goes on from there.
`tests/unit/test_contracts_replay.py` pins what is used of vLLM.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from headrace_decode.replay.said import Output, Said
from headrace_decode.replay.scheduler import SAID

MOST_SEEDED = 1024
"""Of tokens that a request with a seed may have said. The first model runner draws anew for each
of them, a third of a millisecond on a CPU, within a step of the engine."""

AT_ONCE = 200
"""Outputs for which an event loop is held: about 5 ms."""

_FINISH = {str(reason): reason for reason in FinishReason}


def output_of(output: RequestOutput, cached_tokens: int = 0) -> Output:
    """What one output of a stream says; it has what it adds only.

    Args:
        cached_tokens: `Said.cached` of the first choice.
    """
    return tuple(
        Said(
            index=choice.index,
            tokens=tuple(choice.token_ids),
            logprobs=_ranked(choice),
            finish=choice.finish_reason,
            stop=choice.stop_reason,
            cached=0 if number else cached_tokens,
        )
        for number, choice in enumerate(output.outputs)
    )


def why_not(prompt: Any, params: SamplingParams) -> str | None:
    """Why a stream cannot be taken up; None if it can."""
    if params.prompt_logprobs is not None:
        return "the log-probabilities of its prompt are with the engine that computed them"
    if isinstance(prompt, dict) and (prompt.get("multi_modal_data") or "prompt_embeds" in prompt):
        return "its prompt is not plain text"
    return None


def with_said(params: SamplingParams, tokens: Sequence[int]) -> SamplingParams:
    """A copy of `params` that has the engine take the request up behind these tokens."""
    told = copy.copy(params)
    told.extra_args = {**(params.extra_args or {}), SAID: list(tokens)}
    return told


async def feed(
    processor: Any, queue: Any, request_id: str, index: int, outputs: list[Output]
) -> tuple[dict[int, RequestOutput], bool]:
    """Lead the state of one choice through what was said. Other requests get turns of the loop.

    The choice ends where the outputs say so, or where the frontend finds one of its stop strings.

    Args:
        processor: vLLM's `OutputProcessor`, which knows the request.
        queue: its collector; it is left empty.
        request_id: the engine's id of the choice.
        index: the choice.
        outputs: of the whole request.

    Returns:
        What the serving layer gets for it, by the number of the output; whether the choice ended.

    Raises:
        ValueError: the outputs end the choice by a stop string that is not there.
    """
    given: dict[int, RequestOutput] = {}
    for number, output in enumerate(outputs):
        if number % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)
        for said in output:
            if said.index != index:
                continue
            processor.process_outputs([_core_output(request_id, said)])
            if (told := queue.get_nowait()) is not None:
                told.finished = False
                given[number] = told
            if request_id not in processor.request_states:
                return given, True
            if said.finish is not None:
                raise ValueError(f"choice {index} does not end with the stop string {said.stop!r}")
    # The engine still has to tell what it computed.
    processor.request_states[request_id].is_prefilling = True
    return given, False


def _core_output(request_id: str, said: Said) -> EngineCoreOutput:
    """As the engine gave it. The frontend finds stop strings by itself."""
    finish = None
    if said.finish is not None and not isinstance(said.stop, str):
        finish = _FINISH.get(said.finish, FinishReason.STOP)
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=list(said.tokens),
        new_logprobs=None if said.logprobs is None else _lists(said.logprobs),
        finish_reason=finish,
        stop_reason=None if finish is None else said.stop,
    )


def _ranked(choice: Any) -> tuple[tuple[tuple[int, float, int], ...], ...] | None:
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


def _lists(logprobs: tuple[tuple[tuple[int, float, int], ...], ...]) -> LogprobsLists:
    """As the engine has them: in each row the sampled token, then the most likely ones by rank, the
    sampled one among them if it is one of those."""
    rows = []
    for sampled, *likely in logprobs:
        most = max((rank for _, _, rank in likely), default=0)
        ranked = {rank: one for one in likely if (rank := one[2])}
        if sampled[2] <= most + 1:
            ranked.setdefault(sampled[2], sampled)
        rows.append([sampled, *(ranked[rank] for rank in sorted(ranked))])
    wide = max((len(row) for row in rows), default=1)
    rows = [row + [(0, -np.inf, 0)] * (wide - len(row)) for row in rows]
    return LogprobsLists(
        np.array([[one[0] for one in row] for row in rows], dtype=np.int32).reshape(-1, wide),
        np.array([[one[1] for one in row] for row in rows], dtype=np.float32).reshape(-1, wide),
        np.array([row[0][2] for row in rows], dtype=np.int32),
    )
