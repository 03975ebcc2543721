"""vLLM's schedulers: their classes, their KV blocks, their waiting requests, and the messages to
and from their workers.

`tests/unit/test_contracts_sparse.py` and `test_contracts_compression.py` pin what is used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

__all__ = [
    "AsyncModelRunnerOutput",
    "AsyncScheduler",
    "BlockHash",
    "FullAttentionManager",
    "FullAttentionSpec",
    "Request",
    "RequestStatus",
    "Scheduler",
    "make_block_hash_with_group_id",
    "register_kv_cache_spec",
    "replace_as",
]

_READY = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


def admissible(scheduler: Any) -> Iterator[Any]:
    """Yield the requests that wait for nothing but to be admitted, in the scheduler's order.

    Requests that wait for their grammar or for KV from elsewhere are left out. While the scheduler
    is paused, it admits none.
    """
    if scheduler.pause_state == PauseState.UNPAUSED:
        yield from (each for each in scheduler.waiting if each.status in _READY)


def await_kv(scheduler: Any, request: Any) -> None:
    """Have a waiting request, which was given blocks, wait until a connector has filled them.

    The scheduler considers waiting requests that hold blocks before all others, also while it is
    paused for new ones.
    """
    scheduler.waiting.remove_request(request)
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    scheduler._enqueue_waiting_request(request)


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


def name_block(pool: Any, name: Any, block: Any, tokens: int) -> None:
    """Make a block of vLLM's pool findable under a name.

    Args:
        name: from `make_block_hash_with_group_id`. tokens: number of tokens that it holds.
    """
    pool._insert_block_hash(name, block, num_tokens=tokens)
