"""What KV cache compression takes from vLLM beyond its documented API.

No engine. Where vLLM moves, mend `decode/headrace_decode/compression/engine`.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.utils import allocate_kv_cache

from headrace_decode.attention.offload import block_manager
from headrace_decode.attention.offload.block_manager import CompressionSpec
from headrace_decode.attention.settings import SparseSettings
from headrace_decode.compression.engine import head_pages, incremental_scheduler, scheduler
from headrace_decode.compression.engine.settings import CompressionSettings
from headrace_engine.extensions.scheduler import ExtensibleScheduler
from headrace_engine.vllm import scheduling
from tests.support.contracts import assert_takes
from tests.support.scheduled import BLOCK, BLOCKS, Scheduled

SPEC = CompressionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32)


def request(name: str) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0), None)


def test_each_step_asks_how_many_tokens_of_a_prompt_it_may_have() -> None:
    schedules = inspect.getsource(Scheduler.schedule)
    asks = schedules.index("self.scheduler_config.long_prefill_token_threshold")
    assert asks < schedules.index("self.running["), f"mend {scheduler.__file__}"
    adapts = "long_prefill_token_threshold > 0 and self.adaptive_long_prefill_threshold"
    assert adapts in schedules, f"mend {scheduler.__file__}"


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_a_context_is_read_again_in_small_chunks_beside_answers(
    tmp_path: Path, is_adaptive: bool
) -> None:
    metadata = SparseSettings("off").additional_config() | CompressionSettings().additional_config()
    engine = Scheduled(
        *(tmp_path, BLOCKS, ExtensibleScheduler, SPEC, 512, metadata),
        long_prefill_token_threshold=100,
        long_prefill_token_threshold_adaptive=is_adaptive,
    )
    engine.add("r", 3000, 200, {"compression": 0.25})
    engine.until(lambda: any("r-again-1" in step for step in engine.steps))
    assert engine.steps[0] == {"r": 512}, "it is alone"
    part = engine.scheduler.part(scheduler.CompressionSchedulerPart)
    for _ in range(3):
        rows = part._reread_rate.rows
        engine.step()
        assert engine.steps[-1] == {"r": 1, "r-again-1": rows} and rows < 256
    engine.add("s", 2000, 200)
    engine.step()
    assert engine.steps[-1]["r-again-1"] == (512 // 3 if is_adaptive else 100), "another waits"
    engine.close()


def test_a_request_without_a_hasher_has_the_hashes_that_it_is_given() -> None:
    reader = request("reader")
    assert reader.block_hashes == []
    reader.append_output_token_ids(7)
    assert reader.block_hashes == [], "it is nobody's prefix"
    finds = inspect.getsource(KVCacheManager.get_computed_blocks)
    assert "request.block_hashes" in finds, f"mend {scheduler.__file__}"


def test_a_reader_goes_to_the_front_of_the_queue() -> None:
    queue = FCFSRequestQueue()
    for name in ("first", "reader"):
        queue.add_request(request(name))
    reader = queue[-1]
    queue.remove_request(reader)
    queue.prepend_request(reader)
    assert [each.request_id for each in queue] == ["reader", "first"]


def test_outputs_of_requests_that_no_client_made_are_ignored() -> None:
    processes = inspect.getsource(OutputProcessor.process_outputs)
    assert "self.request_states.get(req_id)" in processes, f"mend {scheduler.__file__}"
    assert "if req_state is None:" in processes, f"mend {scheduler.__file__}"


def test_vllm_takes_what_schedulers_hand_on() -> None:
    base = "vllm.v1.core.sched.scheduler:Scheduler"
    assert_takes(f"{base}.finish_requests", scheduler.__file__, "request_ids", "finished_status")
    assert_takes(f"{base}.add_request", scheduler.__file__, "request")
    made = inspect.getsource(Scheduler.__init__)
    for name in ("requests", "running", "waiting", "num_spec_tokens", "max_model_len"):
        assert f"self.{name}" in made, f"mend {scheduler.__file__}"


def test_a_request_that_waits_may_have_its_first_tokens_already() -> None:
    schedules = inspect.getsource(Scheduler.schedule)
    assert "if request.num_computed_tokens == 0:" in schedules, (
        f"mend {incremental_scheduler.__file__}"
    )
    assert "num_computed_tokens = request.num_computed_tokens" in schedules
    assert "self.max_num_active_reqs" in schedules, f"mend {incremental_scheduler.__file__}"
    assert_takes(
        "vllm.v1.metrics.stats:PrefillStats.set",
        incremental_scheduler.__file__,
        *("num_prompt_tokens", "num_local_cached_tokens", "num_external_cached_tokens"),
    )


def test_requests_that_wait_and_hold_blocks_have_a_queue_of_their_own() -> None:
    mend = f"mend {scheduling.__file__}"
    schedules = inspect.getsource(Scheduler.schedule)
    assert "request_queue = self.kv_holding_waiting" in schedules, mend
    enqueues = inspect.getsource(Scheduler._enqueue_waiting_request)
    assert "if self._holds_kv_blocks(request):" in enqueues, mend
    loading = request("loading")
    assert not Scheduler._holds_kv_blocks(loading), mend
    loading.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    assert Scheduler._holds_kv_blocks(loading), mend


def test_a_block_is_found_by_any_name_that_it_is_given() -> None:
    names = "block_hash_with_group_id", "block", "num_tokens"
    pool = "vllm.v1.core.block_pool:"
    assert_takes(f"{pool}BlockPool._insert_block_hash", scheduling.__file__, *names)
    assert_takes(f"{pool}BlockHashToBlockMap.get_one_block", block_manager.__file__, "key")
    assert_takes(f"{pool}BlockPool.touch", block_manager.__file__, "blocks")


def test_all_layers_lie_in_one_array() -> None:
    allocates = inspect.getsource(allocate_kv_cache)
    assert "must share one backing allocation" in allocates, f"mend {head_pages.__file__}"
