"""Requests that begin with output tokens, in vLLM's scheduler and in its first model runner.

`tests/unit/test_contracts_resume.py` pins what is used here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.sampling_params import SamplingType
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import RequestStatus
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from headrace_engine.vllm.sampling import repeat_draws


def begin_with_output(request: Any, tokens: list[int]) -> None:
    """Give a request that the scheduler does not have yet these output tokens."""
    request.append_output_token_ids(tokens)
    request.prefill_stats = None  # set when it is scheduled: more may be cached by then


def report_cached_prompt(request: Any, cached_tokens: int) -> None:
    """Report how much of a request's prompt was cached."""
    tokens = request.num_prompt_tokens
    request.prefill_stats = PrefillStats()
    request.prefill_stats.set(tokens, min(cached_tokens, tokens), 0)


class GrammarWatch:
    """Mixin that precedes a scheduler of vLLM among the bases."""

    def on_grammar_compiled(self, request: Any) -> None:
        """Prepare a request that waited for its grammar, before its first step."""

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        waited = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        is_ready: bool = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        if is_ready and waited:
            self.on_grammar_compiled(request)
        return is_ready


def advance_grammar(manager: Any, request: Any, tokens: list[int]) -> None:
    """Advance a request's compiled grammar by its output tokens, without those of its reasoning.

    Args:
        manager: vLLM's `StructuredOutputManager`. tokens: the last ones of the request.
    """
    manager.accept_tokens(request, tokens)


def add_to_runner(runner: Any, step: Any, tokens: Mapping[str, list[int]]) -> Any:
    """Add new requests with output tokens to the first model runner's states.

    That runner expects no output tokens of a new request, but those of a preempted one.

    Args:
        tokens: the output tokens of such requests of the step, by the request's id.

    Returns:
        The step with these requests as preempted ones.
    """
    resumed = [new for new in step.scheduled_new_reqs if new.req_id in tokens]
    for new in resumed:
        runner.requests[new.req_id] = _runner_state(runner, new, tokens[new.req_id])
    changed = copy.copy(step)
    changed.scheduled_new_reqs = [
        new for new in step.scheduled_new_reqs if new.req_id not in tokens
    ]
    cached = step.scheduled_cached_reqs
    no_new_tokens: list[list[int]] = [[] for _ in resumed] if cached.new_token_ids else []
    all_tokens = {new.req_id: [*new.prompt_token_ids, *tokens[new.req_id]] for new in resumed}
    changed.scheduled_cached_reqs = replace(
        cached,
        req_ids=[*cached.req_ids, *(new.req_id for new in resumed)],
        resumed_req_ids={*cached.resumed_req_ids, *tokens},
        new_token_ids=[*cached.new_token_ids, *no_new_tokens],
        all_token_ids={**cached.all_token_ids, **all_tokens},
        new_block_ids=[*cached.new_block_ids, *(new.block_ids for new in resumed)],
        num_computed_tokens=[
            *cached.num_computed_tokens,
            *(new.num_computed_tokens for new in resumed),
        ],
        num_output_tokens=[
            *cached.num_output_tokens,
            *(len(tokens[new.req_id]) for new in resumed),
        ],
    )
    return changed


def _runner_state(runner: Any, new: Any, tokens: list[int]) -> CachedRequestState:
    """Return a request's state as if the runner had sampled the output tokens itself."""
    params = new.sampling_params
    generator = None
    if params.sampling_type == SamplingType.RANDOM_SEED:
        generator = torch.Generator(device=runner.device)
        generator.manual_seed(params.seed)
        repeat_draws(runner, generator, len(tokens))
    state = CachedRequestState(
        req_id=new.req_id,
        prompt_token_ids=new.prompt_token_ids,
        prompt_embeds=new.prompt_embeds,
        prompt_is_token_ids=new.prompt_is_token_ids,
        mm_features=new.mm_features,
        sampling_params=params,
        pooling_params=None,
        generator=generator,
        block_ids=new.block_ids,
        num_computed_tokens=new.num_computed_tokens,
        output_token_ids=list(tokens),
        lora_request=new.lora_request,
    )
    if runner.uses_mrope:
        runner._init_mrope_positions(state)
    return state
