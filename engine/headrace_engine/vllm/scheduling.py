"""Readers of the messages between vLLM's scheduler and its workers: requests, KV and outputs.

`tests/unit/test_contracts_sparse.py` pins what is used here.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

__all__ = ["AsyncModelRunnerOutput", "Request", "RequestStatus"]


def requests_moved(step: Any) -> set[str]:
    """Return the requests of a scheduler's step whose blocks are new or were taken away."""
    new = {each.req_id for each in step.scheduled_new_reqs}
    preempted = set(step.preempted_req_ids or ())
    resumed = set(step.scheduled_cached_reqs.resumed_req_ids)
    return new | preempted | resumed | set(step.finished_req_ids)


def requests_gone(step: Any) -> set[str]:
    """Return the requests whose blocks a scheduler's step takes away."""
    return set(step.preempted_req_ids or ()) | set(step.finished_req_ids)


def final_tokens(step: Any) -> dict[str, tuple[int, int]]:
    """Return, for each request of a step, the numbers of tokens whose KV is final before and after
    the step, without drafts."""
    cached = step.scheduled_cached_reqs
    before = {each.req_id: each.num_computed_tokens for each in step.scheduled_new_reqs}
    before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    drafts = step.scheduled_spec_decode_tokens
    return {
        name: (before[name], before[name] + count - len(drafts.get(name, ())))
        for name, count in step.num_scheduled_tokens.items()
    }
