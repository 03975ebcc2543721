"""Schedulers that resume a request after the output tokens of another replica.

They also keep answers that attend to only a part of the KV out of the prefix cache. The tokens are
part of the request's output from the start, as after a preemption: penalties, `min_tokens`,
`max_tokens`, stop conditions and the grammar count them as output tokens. The parameters carry them
in `extra_args[RESUME_TOKENS]`.
"""

from __future__ import annotations

from typing import Any

from headrace_decode.grammars.combined_backend import install_combined_backend
from headrace_decode.techniques import COMPRESSION, SPARSE, keep_ratio_in
from headrace_engine.vllm.private_blocks import keep_private
from headrace_engine.vllm.resumed_requests import (
    advance_grammar,
    begin_with_output,
    report_cached_prompt,
    waits_for_grammar,
)
from headrace_engine.vllm.scheduler import AsyncScheduler, Scheduler

RESUME_TOKENS = "headrace_resume_tokens"
"""Key of `SamplingParams.extra_args`: token ids."""


def resume_tokens_of(params: Any) -> list[int]:
    """Return the earlier output tokens of a resumed request; an empty list for a new one."""
    extra = None if params is None else params.extra_args
    return list(extra.get(RESUME_TOKENS, ())) if extra else []


class _ResumeMixin:
    """Mixin for vLLM's schedulers."""

    keeps_answers_private = True
    """Marks schedulers that keep answers of sparse and compressed requests out of the prefix
    cache."""
    has_combined_grammar_backend = True
    """Marks schedulers that compile each grammar with the backend that enforces it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        install_combined_backend(self.structured_output_manager)  # type: ignore[attr-defined]

    def add_request(self, request: Any) -> None:
        """Add a request, with the tokens of its earlier answer as output.

        The prompt's KV is shared, since it is exact regardless of what the answer attends to. For a
        sparse or compressed request, blocks with tokens of the answer are not shared.
        """
        if any(
            keep_ratio_in(request.sampling_params, name) is not None
            for name in (SPARSE, COMPRESSION)
        ):
            keep_private(request)
        tokens = resume_tokens_of(request.sampling_params)
        if tokens and not request.num_output_tokens:
            begin_with_output(request, tokens)
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, and report how much of the prompts of resumed requests was cached."""
        step = super().schedule(*args, **kwargs)  # type: ignore[misc]
        for new in step.scheduled_new_reqs:
            if resume_tokens_of(new.sampling_params):
                request = self.requests[new.req_id]  # type: ignore[attr-defined]
                report_cached_prompt(request, new.num_computed_tokens)
        return step

    def _try_promote_blocked_waiting_request(self, request: Any) -> bool:
        """Promote a request; advance the compiled grammar of a resumed one by its tokens."""
        waited_for_grammar = waits_for_grammar(request)
        promoted: bool = super()._try_promote_blocked_waiting_request(request)  # type: ignore[misc]
        tokens = resume_tokens_of(request.sampling_params)
        if promoted and waited_for_grammar and tokens:
            manager = self.structured_output_manager  # type: ignore[attr-defined]
            advance_grammar(manager, request, tokens)
        return promoted


class ResumeScheduler(_ResumeMixin, Scheduler):  # type: ignore[misc]
    """Scheduler for engines in which a step waits for the one before."""


class AsyncResumeScheduler(_ResumeMixin, AsyncScheduler):  # type: ignore[misc]
    """Scheduler for engines that schedule steps ahead."""
