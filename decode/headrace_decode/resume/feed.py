"""Converts vLLM's outputs to `said.Output`, and feeds such outputs to vLLM's frontend again.

vLLM's frontend turns token ids into text, log-probabilities and finish reasons for the serving
layer. `feed` passes the outputs of a lost replica's engine through a new request's state, one by
one. The serving layer gets the same objects again, and the state continues from there.
`tests/unit/test_contracts_replay.py` checks the parts of vLLM that this module uses.
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

from headrace_decode.resume.said import Output, Said
from headrace_decode.resume.scheduler import SAID

MAX_SEEDED = 1024
"""Maximum number of tokens after which a request with a seed can be resumed. vLLM's first model
runner repeats the random draw of each token within one engine step; a draw takes a third of a
millisecond on a CPU."""

AT_ONCE = 200
"""Number of outputs processed before the event loop may run other tasks: about 5 ms."""

_FINISH = {str(reason): reason for reason in FinishReason}


def output_of(output: RequestOutput, cached_tokens: int = 0) -> Output:
    """Convert one output of a stream, which holds only the tokens it adds.

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
    """Return why a stream cannot be resumed; None if it can."""
    if params.prompt_logprobs is not None:
        return "the log-probabilities of its prompt are with the engine that computed them"
    if isinstance(prompt, dict) and (prompt.get("multi_modal_data") or "prompt_embeds" in prompt):
        return "its prompt is not plain text"
    return None


def with_said(params: SamplingParams, tokens: Sequence[int]) -> SamplingParams:
    """Return a copy of `params` that has the engine resume the request after these tokens."""
    told = copy.copy(params)
    told.extra_args = {**(params.extra_args or {}), SAID: list(tokens)}
    return told


async def feed(
    processor: Any, queue: Any, request_id: str, index: int, outputs: list[Output]
) -> tuple[dict[int, RequestOutput], bool]:
    """Pass the earlier outputs through the state of one choice; yield to the event loop regularly.

    The choice ends where the outputs say so, or where the frontend finds one of its stop strings.

    Args:
        processor: vLLM's `OutputProcessor`, to which the request was added.
        queue: the request's output collector; it is empty afterwards.
        request_id: the engine's id of the choice.
        index: index of the choice.
        outputs: all earlier outputs of the request.

    Returns:
        The outputs for the serving layer, by position in `outputs`; whether the choice ended.

    Raises:
        ValueError: the outputs end the choice with a stop string that its text does not contain.
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
    # The engine has yet to report how much of the prompt it computed.
    processor.request_states[request_id].is_prefilling = True
    return given, False


def _core_output(request_id: str, said: Said) -> EngineCoreOutput:
    """Return the output in the engine's form. The frontend itself finds stop strings."""
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
    """Return log-probabilities in the engine's form, one row for each token.

    A row has the sampled token, then the most likely ones by rank, with the sampled one again if it
    is one of them.
    """
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
