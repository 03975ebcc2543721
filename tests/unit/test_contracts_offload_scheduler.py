"""Offload in vLLM's own scheduler, whose steps are computed by nobody.

Where vLLM moves, mend `decode/headrace_decode/attention/offload/scheduler.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from headrace_decode.attention.lost_requests import LOST, with_lost
from headrace_decode.attention.offload.block_manager import OffloadSpec
from headrace_decode.attention.offload.scheduler import (
    OFFLOAD,
    OffloadMetadata,
    OffloadSchedulerPart,
)
from headrace_decode.attention.settings import SparseSettings
from headrace_engine.extensions.extension import metadata_of
from headrace_engine.extensions.scheduler import ExtensibleScheduler
from headrace_engine.vllm.scheduling import replace_as
from headrace_kvstore.identity.salts import is_isolated
from tests.support.tiny import tiny_llama

SPEC = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32)
ANSWER = 20


def scheduler_of(blocks: int, **more: Any) -> Any:
    """A scheduler of a cache of so many blocks, whose steps take 30 ms.

    `more`: arguments of the engine.
    """
    init_none_hash(sha256)
    config = EngineArgs(
        model=str(tiny_llama()),
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=blocks,
        async_scheduling=False,
        additional_config=SparseSettings(offload_gib=1).additional_config(),
        **more,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    groups = [KVCacheGroupSpec(["layer"], replace_as(SPEC, OffloadSpec))]
    manager = StructuredOutputManager(config)
    cache = KVCacheConfig(blocks, [], groups)
    scheduler: Any = ExtensibleScheduler(config, cache, manager, block_size=128)
    scheduler.part(OffloadSchedulerPart).clock = itertools.count(0.0, 0.03).__next__
    return scheduler


def request(name: str, tokens: int, share: float | None, arrives: bool = False) -> Request:
    """`arrives`: its KV comes from elsewhere, as a whole."""
    extra: dict[str, Any] = {} if share is None else {"sparse": share}
    extra |= {"kv_transfer_params": {"remote": "somewhere"}} if arrives else {}
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, extra_args=extra or None)
    prompt = [(int(name) * 7 + n) % 1000 + 20 for n in range(tokens)]
    hasher = get_request_block_hasher(128, sha256)
    return Request(name, prompt, params, None, block_hasher=hasher)


def run(scheduler: Any, requests: list[Request]) -> tuple[list[str], int]:
    """Serve requests; who was offloaded, and most requests that ran at once."""
    for each in requests:
        scheduler.add_request(each)
    offloaded: list[str] = []
    most = 0
    for _ in itertools.count():
        if not scheduler.has_unfinished_requests():
            break
        offloaded += metadata_of(step(scheduler), OFFLOAD).working_sets
        most = max(most, len(scheduler.running))
    scheduler.schedule()
    return offloaded, most


def step(scheduler: Any, lost: tuple[str, ...] = ()) -> Any:
    """One step; what the scheduler said of it. The worker has lost the KV of some requests."""
    output = scheduler.schedule()
    assert output.total_num_scheduled_tokens > 0, "it is stuck"
    names = list(output.num_scheduled_tokens)
    done = [scheduler.requests[n].num_computed_tokens for n in names]
    wanted = [scheduler.requests[n].num_tokens for n in names]
    sampled = [[30] if a >= b else [] for a, b in zip(done, wanted, strict=True)]
    places = {name: number for number, name in enumerate(names)}
    computed = with_lost(ModelRunnerOutput(names, places, sampled), lost)
    output.came = scheduler.update_from_output(output, computed)
    return output


def at_once(scheduler: Any, share: float | None) -> int:
    """Most of four requests that ran at once."""
    requests = [request(str(n), 2400, share, arrives=True) for n in range(4)]
    return run(scheduler, requests)[1]


def manager_of(scheduler: Any) -> Any:
    return scheduler.part(OffloadSchedulerPart).manager


def all_is_free(scheduler: Any) -> bool:
    manager = manager_of(scheduler)
    pool, ledger = manager.block_pool, manager.ledger
    return (
        pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        and ledger.free_host_blocks == ledger.host_blocks
        and not ledger._planned
    )


def test_a_sparse_request_that_nobody_waits_for_stays_in_the_cache() -> None:
    scheduler = scheduler_of(60)
    assert run(scheduler, [request("1", 2400, 0.05)])[0] == [] and all_is_free(scheduler)


def test_eight_that_do_not_fit_together_run_together() -> None:
    scheduler = scheduler_of(60)
    offloaded, most = run(scheduler, [request(str(n), 2400, 0.05) for n in range(8)])
    assert len(offloaded) >= 4 and most >= 5, "in the cache three would run at once"
    assert all_is_free(scheduler)


def test_contexts_that_arrive_as_a_whole_leave_the_cache_when_others_come() -> None:
    scheduler = scheduler_of(45)
    assert at_once(scheduler, 0.05) == 4 and all_is_free(scheduler)
    assert at_once(scheduler, None) == 2 and all_is_free(scheduler)


def test_what_the_worker_copies_before_a_request_leaves_is_final_and_its_blocks_are_free() -> None:
    scheduler = scheduler_of(30)
    first, second = (request(str(n), 2400, 0.05, arrives=True) for n in (1, 2))
    scheduler.add_request(first)
    while first.num_output_tokens < 3:
        step(scheduler)
    taken = 29 - manager_of(scheduler).block_pool.get_num_free_blocks()
    assert taken == 19, "nobody waits"
    scheduler.add_request(second)
    told = step(scheduler)
    slots = manager_of(scheduler).slots("1")
    assert metadata_of(told, OFFLOAD) == OffloadMetadata({"1": slots}, {"1": 2402})
    table = manager_of(scheduler).req_to_blocks["1"]
    assert [block.is_null for block in table] == [True] * 17 + [False] * 2
    assert "2" in told.num_scheduled_tokens
    while scheduler.has_unfinished_requests():
        step(scheduler)
    scheduler.schedule()
    assert all_is_free(scheduler)


@pytest.mark.parametrize("reason", ["its grammar", "the end of a pause", "memory"])
def test_only_for_a_request_that_waits_for_memory_others_leave_the_cache(reason: str) -> None:
    scheduler = scheduler_of(30)
    first, second = (request(str(n), 2400, 0.05, arrives=True) for n in (1, 2))
    scheduler.add_request(first)
    while first.num_output_tokens < 3:
        step(scheduler)
    if reason == "its grammar":
        second.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    if reason == "the end of a pause":
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
    scheduler.add_request(second)
    left = [*(metadata_of(step(scheduler), OFFLOAD).copy_first for _ in range(3))]
    assert any(left) == (reason == "memory")
    assert second in scheduler.waiting or reason == "memory"


@pytest.mark.parametrize("threshold", [0, 128])
def test_a_request_that_is_alone_has_blocks_for_all_tokens_of_a_step(threshold: int) -> None:
    """vLLM's threshold does not bound it."""
    scheduler = scheduler_of(9, long_prefill_token_threshold=threshold)
    long = request("1", 8000, 0.05)
    scheduler.add_request(long)
    assert step(scheduler).num_scheduled_tokens == {"1": 512}
    while scheduler.has_unfinished_requests():
        step(scheduler)
    scheduler.schedule()
    assert long.num_output_tokens == ANSWER and all_is_free(scheduler)


@pytest.mark.parametrize("share", [None, 0.05, 0.9])
def test_requests_longer_than_the_cache_are_offloaded_whatever_they_ask(
    share: float | None,
) -> None:
    scheduler = scheduler_of(18)
    long = request("1", 8000, share)
    hashes = list(long.block_hashes)
    assert run(scheduler, [long, request("2", 700, None)])[0] == ["1"]
    assert is_isolated(long.cache_salt or "") and long.block_hashes[: len(hashes)] == hashes
    assert all_is_free(scheduler)


def test_a_request_whose_kv_is_lost_ends_with_an_error_and_no_other_does() -> None:
    scheduler = scheduler_of(60)
    first, second = (request(str(n), 900, 0.05) for n in (1, 2))
    for each in (first, second):
        scheduler.add_request(each)
    while second.num_output_tokens < 3:
        step(scheduler)
    tokens = first.num_output_tokens
    told = step(scheduler, lost=("1", "of another time")).came[0].outputs
    assert [(each.request_id, each.finish_reason) for each in told if each.finish_reason] == [
        ("1", FinishReason.ERROR)
    ]
    assert first.num_output_tokens == tokens, "what was computed over lost KV is no answer"
    while scheduler.has_unfinished_requests():
        step(scheduler)
    scheduler.schedule()
    assert second.num_output_tokens == ANSWER and all_is_free(scheduler)


def test_an_output_that_comes_later_tells_of_it_then() -> None:
    class Later(AsyncModelRunnerOutput):  # type: ignore[misc]
        def get_output(self) -> ModelRunnerOutput:
            return EMPTY_MODEL_RUNNER_OUTPUT

    assert with_lost(later := Later(), ()) is later and with_lost(None, {"1"}) is None
    assert getattr(with_lost(later, {"1"}).get_output(), LOST) == {"1"}
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, LOST)


def test_requests_end_under_preemption_and_when_aborted() -> None:
    scheduler = scheduler_of(18)
    requests = [request("1", 8000, 0.05), *(request(str(n), 890, None) for n in (2, 3))]
    for each in requests:
        each.sampling_params.max_tokens = each.max_tokens = 200  # type: ignore[union-attr]
    run(scheduler, requests)
    assert all_is_free(scheduler)
    scheduler.add_request(request("4", 8000, 0.05))
    scheduler.schedule()
    assert manager_of(scheduler).ledger.is_admitted("4")
    scheduler.finish_requests("4", requests[0].status.FINISHED_ABORTED)
    scheduler.schedule()
    assert all_is_free(scheduler)
