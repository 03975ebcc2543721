"""Converts vLLM's outputs to `EmittedOutput`, and replays such outputs through vLLM's frontend.

vLLM's frontend turns token ids into text, log-probabilities and finish reasons for the serving
layer. `replay_outputs` passes the outputs of a lost replica's engine through a new request's state,
one by one. The serving layer gets the same objects again, and the state continues from there.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

from headrace_decode.resume.emitted import EmittedChoice, EmittedOutput
from headrace_decode.resume.scheduler import RESUME_TOKENS
from headrace_engine.kv_transfer.media import features_of, has_media
from headrace_engine.vllm.engine_outputs import (
    begin_prefill,
    core_output,
    process_earlier_output,
    ranked_tokens,
)

MAX_SEEDED = 1024
"""Maximum number of tokens after which a request with a seed can be resumed. vLLM's first model
runner repeats the random draw of each token within one engine step; a draw takes a third of a
millisecond on a CPU."""

OUTPUTS_PER_SLICE = 200
"""Number of outputs processed before the event loop may run other tasks: about 5 ms."""


def emitted_output(output: Any, cached_tokens: int = 0, media: str = "") -> EmittedOutput:
    """Convert one output of a stream, which holds only the tokens it adds.

    Args:
        cached_tokens, media: of the first choice, as in `EmittedChoice`.
    """
    return tuple(
        EmittedChoice(
            index=choice.index,
            tokens=tuple(choice.token_ids),
            logprobs=ranked_tokens(choice),
            finish=choice.finish_reason,
            stop=choice.stop_reason,
            cached=0 if number else cached_tokens,
            media="" if number else media,
        )
        for number, choice in enumerate(output.outputs)
    )


def why_not_resumable(prompt: Any, params: Any, identifies_media: bool = True) -> str | None:
    """Return why a stream cannot be resumed; None if it can.

    Args:
        identifies_media: whether the engine names media by their content.
    """
    if params.prompt_logprobs is not None:
        return "the log-probabilities of its prompt are with the engine that computed them"
    if isinstance(prompt, dict) and prompt.get("type", "token") not in ("token", "multimodal"):
        return "its prompt is not plain text"
    if has_media(prompt) and not (identifies_media and features_of(prompt)):
        return "its media are not known by their content"
    return None


def with_resume_tokens(params: Any, tokens: Sequence[int]) -> Any:
    """Return a copy of `params` that has the engine resume the request after these tokens."""
    changed = copy.copy(params)
    changed.extra_args = {**(params.extra_args or {}), RESUME_TOKENS: list(tokens)}
    return changed


async def replay_outputs(
    processor: Any, queue: Any, request_id: str, index: int, outputs: list[EmittedOutput]
) -> tuple[dict[int, Any], bool]:
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
    replayed: dict[int, Any] = {}
    for number, output in enumerate(outputs):
        if number % OUTPUTS_PER_SLICE == OUTPUTS_PER_SLICE - 1:
            await asyncio.sleep(0)
        for choice in output:
            if choice.index != index:
                continue
            core = core_output(
                request_id, choice.tokens, choice.logprobs, choice.finish, choice.stop
            )
            process_earlier_output(processor, core)
            if (result := queue.get_nowait()) is not None:
                result.finished = False
                replayed[number] = result
            if request_id not in processor.request_states:
                return replayed, True
            if choice.finish is not None:
                raise ValueError(
                    f"choice {index} does not end with the stop string {choice.stop!r}"
                )
    begin_prefill(processor, request_id)
    return replayed, False
