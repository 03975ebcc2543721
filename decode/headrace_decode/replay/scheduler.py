"""Schedulers that take a request up with the tokens that it said elsewhere, and keep answers that
attend to a part of the KV out of the prefix cache.

The tokens are the request's output from the start, as after a preemption: penalties, `min_tokens`,
`max_tokens`, stop conditions and the grammar count them as what they are. The parameters carry
them, `extra_args[SAID]`. `tests/unit/test_contracts_replay.py` pins what is used of vLLM.
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
    """The tokens that a request brings along; none for most."""
    extra = None if params is None else params.extra_args
    return list(extra.get(SAID, ())) if extra else []


class _TakesUp:
    """Mixed into a scheduler of vLLM's."""

    keeps_answers_private = True
    """Whether prompts of sparse requests may be shared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        use_either_backend(self.structured_output_manager)  # type: ignore[attr-defined]

    def add_request(self, request: Request) -> None:
        """Add a request, with the tokens of its earlier answer as output.

        The prompt's KV is exact whatever the answer attends to, and is shared. Blocks with tokens
        of the answer are not.
        """
        if any(share_in(request.sampling_params, name) is not None for name in (SPARSE, BOUNDED)):
            keep_private(request)
        if (said := said_by(request.sampling_params)) and not request.num_output_tokens:
            request.append_output_token_ids(said)
            request.prefill_stats = None  # `schedule` tells them: more may be cached
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
        """As vLLM's. A grammar that is compiled is led through what has been said."""
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
    """Where a step waits for the one before."""


class TakingUpAsync(_TakesUp, AsyncScheduler):  # type: ignore[misc]
    """Where steps are scheduled ahead."""
