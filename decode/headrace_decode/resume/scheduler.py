"""Resumes a request after the output tokens of another replica, in the scheduler.

The tokens are part of the request's output from the start, as after a preemption: penalties,
`min_tokens`, `max_tokens`, stop conditions and the grammar count them as output tokens. The
parameters carry them in `extra_args[RESUME_TOKENS]`.
"""

from __future__ import annotations

from typing import Any

from headrace_engine.extensions.extension import SchedulerPart
from headrace_engine.vllm.resumed_requests import (
    advance_grammar,
    begin_with_output,
    report_cached_prompt,
)

RESUME_TOKENS = "headrace_resume_tokens"
"""Key of `SamplingParams.extra_args`: token ids."""


def resume_tokens_of(params: Any) -> list[int]:
    """Return the earlier output tokens of a resumed request; an empty list for a new one."""
    extra = None if params is None else params.extra_args
    return list(extra.get(RESUME_TOKENS, ())) if extra else []


class ResumeSchedulerPart(SchedulerPart):
    """Resumed requests of a scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def before_add(self, request: Any) -> None:
        """Give a resumed request the tokens of its earlier answer as output."""
        tokens = resume_tokens_of(request.sampling_params)
        if tokens and not request.num_output_tokens:
            begin_with_output(request, tokens)

    def after_schedule(self, step: Any, metadata: dict[str, Any]) -> None:
        """Report how much of the prompts of resumed requests was cached."""
        for new in step.scheduled_new_reqs:
            if resume_tokens_of(new.sampling_params):
                report_cached_prompt(self._scheduler.requests[new.req_id], new.num_computed_tokens)

    def on_grammar_compiled(self, request: Any) -> None:
        """Advance the grammar of a resumed request by its tokens."""
        tokens = resume_tokens_of(request.sampling_params)
        if tokens:
            advance_grammar(self._scheduler.structured_output_manager, request, tokens)
