"""Schedulers that resume a request after the output tokens of another replica.

They also keep answers that attend to only a part of the KV out of the prefix cache. The tokens are
part of the request's output from the start, as after a preemption: penalties, `min_tokens`,
`max_tokens`, stop conditions and the grammar count them as output tokens. The parameters carry them
in `extra_args[SAID]`. `tests/unit/test_contracts_replay.py` checks the parts of vLLM that this
module uses.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request, RequestStatus

from headrace_decode.grammars.backends import use_either_backend
from headrace_decode.techniques import BOUNDED, SPARSE, share_in
from headrace_engine.private_kv import keep_private

SAID = "headrace_said"
"""Key of `SamplingParams.extra_args`: token ids."""


def said_by(params: Any) -> list[int]:
    """Return the earlier output tokens of a resumed request; an empty list for a new one."""
    extra = None if params is None else params.extra_args
    return list(extra.get(SAID, ())) if extra else []


class _TakesUp:
    """Mixin for vLLM's schedulers."""

    keeps_answers_private = True
    """Marks schedulers that keep answers of sparse and bounded requests out of the prefix cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_either_backend(self.structured_output_manager)  # type: ignore[attr-defined]

    def add_request(self, request: Request) -> None:
        """Add a request, with the tokens of its earlier answer as output.

        The prompt's KV is shared, since it is exact regardless of what the answer attends to. For a
        sparse or bounded request, blocks with tokens of the answer are not shared.
        """
        if any(share_in(request.sampling_params, name) is not None for name in (SPARSE, BOUNDED)):
            keep_private(request)
        if (said := said_by(request.sampling_params)) and not request.num_output_tokens:
            request.append_output_token_ids(said)
            request.prefill_stats = None  # `schedule` sets them: more may be cached by then
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, and report how much of the prompts of resumed requests was cached."""
        step = super().schedule(*args, **kwargs)  # type: ignore[misc]
        for new in step.scheduled_new_reqs:
            if said_by(new.sampling_params):
                request = self.requests[new.req_id]  # type: ignore[attr-defined]
                tokens = request.num_prompt_tokens
                request.prefill_stats = PrefillStats()
                request.prefill_stats.set(tokens, min(new.num_computed_tokens, tokens), 0)
        return step

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:
        """Promote a request as vLLM does; feed a resumed one's tokens to its compiled grammar."""
        grammar_came = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        promoted: bool = super()._try_promote_blocked_waiting_request(request)  # type: ignore[misc]
        if promoted and grammar_came and (said := said_by(request.sampling_params)):
            manager: Any = self.structured_output_manager  # type: ignore[attr-defined]
            if manager.should_advance(request, new_token_ids=said):
                rest = manager.trim_reasoning_for_advance(request, said)
                wanted = request.structured_output_request
                if rest and wanted is not None and wanted.grammar is not None:
                    wanted.grammar.accept_tokens(request.request_id, rest)
        return promoted


class TakingUp(_TakesUp, Scheduler):  # type: ignore[misc]
    """Scheduler for engines in which a step waits for the one before."""


class TakingUpAsync(_TakesUp, AsyncScheduler):  # type: ignore[misc]
    """Scheduler for engines that schedule steps ahead."""
