"""What the store's connector takes from vLLM's scheduler and connectors is there, as it expects.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect

from headrace_engine.vllm.kv_cache import FILE_FORMATS
from tests.support.contracts import assert_fields, assert_takes, find

SCHEDULER = "engine/headrace_engine/connector/scheduler_connector.py"
RETENTION = "engine/headrace_engine/connector/retention.py"
HINTS = "engine/headrace_engine/vllm/llm.py"
SAVER = "engine/headrace_engine/connector/request_saver.py"
HOLDS = "engine/headrace_engine/connector/step_holds.py"
STATES = "engine/headrace_engine/connector/state_saver.py"
SAVES = "engine/headrace_engine/connector/save_queue.py"
CONNECTOR = "engine/headrace_engine/connector/connector.py"
DIVISION = "engine/headrace_engine/connector/supported_engines.py"
PARTS = "kvstore/headrace_kvstore/blocks/sharding.py"
COMPOSITE = "engine/headrace_engine/connector/composite.py"
COMPAT = "engine/headrace_engine/vllm/kv_cache.py"
ADAPTERS = "engine/headrace_engine/connector/identity/adapters.py"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
VLLM_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def test_the_connectors_calls_are_vllms() -> None:
    for method, *wanted in (
        ("bind_gpu_block_pool", "gpu_block_pool"),
        ("on_new_request", "request"),
        ("get_num_new_matched_tokens", "request", "num_computed_tokens"),
        ("update_state_after_alloc", "request", "blocks", "num_external_tokens"),
        ("build_connector_meta", "scheduler_output"),
        ("request_finished", "request", "block_ids"),
        ("has_pending_block_frees",),
        ("get_transfer_results", "finished_req_ids"),
        ("update_connector_output", "connector_output"),
        ("has_pending_push_work",),
        ("register_kv_caches", "kv_caches"),
        ("start_load_kv", "forward_context"),
        ("wait_for_layer_load", "layer_name"),
        ("get_finished", "finished_req_ids"),
        ("get_block_ids_with_load_errors",),
        ("build_connector_worker_meta",),
        ("bind_connector_metadata", "connector_metadata"),
        ("get_kv_connector_stats",),
        ("reset_cache",),
        ("shutdown",),
    ):
        assert_takes(f"{BASE}.{method}", CONNECTOR, "self", *wanted)


def test_the_connectors_statistics_are_vllms() -> None:
    assert_takes(f"{BASE}.build_kv_connector_stats", CONNECTOR, "data")
    wanted = ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues")
    assert_takes(f"{BASE}.build_prom_metrics", CONNECTOR, *wanted)


def test_requests_carry_kv_hints_to_connectors() -> None:
    hints = "vllm.v1.kv_hints"
    envelope = find(f"{hints}:KvHintsEnvelope", HINTS)
    assert envelope.__struct_fields__ == ("protocol_version", "message_id", "actions")
    fields = find(f"{hints}:KvHintAction", HINTS).__struct_fields__
    assert fields == ("action_id", "action_type", "action_version", "payload")
    assert_takes("vllm.v1.engine.async_llm:AsyncLLM.generate", HINTS, "kv_hints")
    assert "kv_hints" in find("vllm.v1.engine:EngineCoreRequest", HINTS).__struct_fields__
    request = "vllm.v1.request:Request"
    source = inspect.getsource(find(f"{request}.from_engine_core_request", RETENTION))
    assert "kv_hints=request.kv_hints" in source, f"mend {RETENTION}"
    assert "self.kv_hints = kv_hints" in inspect.getsource(find(f"{request}.__init__", RETENTION))


def test_blocks_can_be_held() -> None:
    pool = "vllm.v1.core.block_pool:BlockPool"
    assert_takes(f"{pool}.touch", SAVES, "blocks")
    assert_takes(f"{pool}.free_blocks", SAVES, "ordered_blocks")
    assert_takes(f"{pool}.get_num_free_blocks", SAVES)
    assert "self.blocks" in inspect.getsource(find(pool, SAVES))
    assert_fields("vllm.v1.core.kv_cache_utils:KVCacheBlock", SAVES, "ref_cnt")
    reset = inspect.getsource(find(f"{pool}.reset_prefix_cache", SAVES))
    assert "num_used_blocks != 1" in reset, "a reset needs all blocks free but one"


def test_several_cache_groups_are_handed_over() -> None:
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    finished = f"{base}:SupportsHMA.request_finished_all_groups"
    assert_takes(finished, CONNECTOR, "self", "request", "block_ids")
    assert_fields(f"{base}:KVConnectorTransferResults", CONNECTOR, "failed_recving")
    pool = find("vllm.v1.core.block_pool:BlockPool", SCHEDULER)
    source = inspect.getsource(pool.__init__)
    first = "self.null_block = self.free_block_queue.popleft()"
    assert first in source, f"the null block has another id than 0: mend {SCHEDULER}"
    for name in ("RSWASpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"):
        find(f"vllm.v1.kv_cache_interface:{name}", COMPAT)


def test_blocks_leave_a_window_when_a_step_is_scheduled_and_when_a_request_ends() -> None:
    """By the tokens of steps whose output has come; those that a step fills are still there."""
    allocate = "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots"
    source = inspect.getsource(find(allocate, HOLDS))
    assert "max(0, total_computed_tokens - request.num_in_flight_tokens)" in source, HOLDS
    ended = inspect.getsource(find(f"{VLLM_SCHEDULER}._connector_finished", HOLDS))
    removed = ended.index("remove_skipped_blocks(")
    assert removed < ended.index("request_finished_all_groups("), HOLDS


def test_a_scheduler_offers_the_exact_blocks_of_states() -> None:
    """To connectors only, with the step that computes them."""
    state = "vllm.v1.core.sched.output:KVConnectorBlockState"
    assert_fields(state, STATES, "boundary_state_offloads")
    assert_fields("vllm.v1.core.sched.output:SchedulerOutput", STATES, "kv_connector_block_state")
    source = inspect.getsource(find(f"{VLLM_SCHEDULER}.schedule", STATES))
    offered = source.index("kv_connector_block_state = KVConnectorBlockState(")
    assert offered < source.index("self._build_kv_connector_meta("), f"mend {STATES}"
    taken = "vllm.v1.core.kv_cache_manager:KVCacheManager.take_boundary_state_offloads"
    assert "(group_id, block.block_id, boundary_tokens)" in inspect.getsource(find(taken, STATES))


def test_a_request_computes_its_next_state_in_another_block() -> None:
    source = inspect.getsource(find("vllm.v1.worker.mamba_utils:preprocess_mamba", STATES))
    assert "curr_state_idx = num_blocks - 1 - num_speculative_blocks" in source, f"mend {STATES}"
    assert "prev_state_idx != curr_state_idx" in source, f"mend {STATES}"


def test_a_recurrent_layer_says_what_its_pages_hold() -> None:
    wanted = ("shapes", "dtypes", "page_size_padded", "mamba_type", "mamba_cache_mode")
    assert_fields("vllm.v1.kv_cache_interface:MambaSpec", COMPAT, *wanted)
    assert_takes("vllm.v1.kv_cache_interface:group_kernel_blocks", COMPAT, "cache", "num_blocks")
    assert_fields("vllm.config:VllmConfig", COMPAT, "mamba_config")
    assert_fields("vllm.config:CacheConfig", COMPAT, "mamba_cache_mode")
    layout = "vllm.model_executor.layers.mamba.mamba_utils:get_conv_state_layout"
    assert find(layout, COMPAT)() in ("SD", "DS")


def test_a_request_waits_for_blocks_that_a_connector_will_free() -> None:
    source = inspect.getsource(find(f"{VLLM_SCHEDULER}.schedule", CONNECTOR))
    waits = source.index("self.connector.has_pending_block_frees()")
    assert waits < source.index("self._preempt_request("), f"mend {CONNECTOR}"


def test_a_request_whose_load_failed_is_computed_from_its_start() -> None:
    source = inspect.getsource(find(f"{VLLM_SCHEDULER}._handle_failed_recving", CONNECTOR))
    assert "request.num_computed_tokens = 0" in source, f"mend {CONNECTOR}"
    source = inspect.getsource(find(f"{VLLM_SCHEDULER}._handle_invalid_blocks", CONNECTOR))
    assert "len(self.kv_cache_config.kv_cache_groups) > 1" in source, (
        f"vLLM recovers single blocks of several groups: mend {CONNECTOR}"
    )


def test_connectors_hear_of_a_steps_output_when_its_tokens_are_counted() -> None:
    source = inspect.getsource(find(f"{VLLM_SCHEDULER}.update_from_output", SAVER))
    told = source.index("self._update_from_kv_xfer_finished(")
    assert source.index("num_in_flight_tokens -=") < told, f"mend {SAVER}"
    source = inspect.getsource(find(f"{VLLM_SCHEDULER}._update_from_kv_xfer_finished", SAVER))
    assert "self.connector.update_connector_output(" in source, f"mend {SAVER}"


def test_a_request_tells_what_is_confirmed() -> None:
    source = inspect.getsource(find("vllm.v1.request:Request.__init__", SCHEDULER))
    for field in ("block_hashes", "num_computed_tokens", "num_in_flight_tokens", "cache_salt"):
        assert f"self.{field}" in source, f"Request.{field} is gone: mend {SCHEDULER}"
    assert "self.skip_reading_prefix_cache" in source, f"mend {SCHEDULER}"
    assert "self.num_prompt_tokens" in source, f"mend {COMPOSITE}"


def test_a_steps_tokens_count_as_computed_only_behind_the_connectors_turn() -> None:
    source = inspect.getsource(find(f"{VLLM_SCHEDULER}.schedule", SCHEDULER))
    connector = source.index("self._build_kv_connector_meta(")
    advance = source.index("self._update_after_schedule(")
    assert connector < advance, f"confirmed tokens are counted otherwise: mend {SCHEDULER}"
    source = inspect.getsource(find(f"{VLLM_SCHEDULER}.update_from_output", SCHEDULER))
    assert source.index("_handle_invalid_blocks(") < source.index("num_in_flight_tokens -="), (
        f"a failed load is seen after its step counts as back: mend {SCHEDULER}"
    )


def test_a_step_names_its_requests_and_their_blocks() -> None:
    output = "vllm.v1.core.sched.output"
    assert_fields(
        f"{output}:NewRequestData", SCHEDULER, "req_id", "block_ids", "num_computed_tokens"
    )
    assert_fields(
        f"{output}:CachedRequestData",
        SCHEDULER,
        *("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    )
    assert_fields(
        f"{output}:SchedulerOutput",
        SCHEDULER,
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "preempted_req_ids",
    )


def test_every_step_ends_with_the_transfers_results_before_errors_are_asked_for() -> None:
    mixin = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin"
    source = inspect.getsource(find(f"{mixin}._get_kv_connector_output", CONNECTOR))
    finished = source.index("get_transfer_results(")
    errors = source.index("get_block_ids_with_load_errors(")
    jobs = source.index("build_connector_worker_meta(")
    assert finished < errors < jobs, f"mend {CONNECTOR}"


def test_a_block_that_one_rank_could_not_load_is_lost_to_all() -> None:
    aggregator = "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate"
    source = inspect.getsource(find(aggregator, CONNECTOR))
    assert "invalid_block_ids |= kv_output.invalid_block_ids" in source, f"mend {CONNECTOR}"
    assert "aggregated_kv_connector_worker_meta.aggregate(" in source, f"mend {CONNECTOR}"


def test_ranks_have_the_heads_that_parts_say() -> None:
    linear = "vllm.model_executor.layers.linear:QKVParallelLinear"
    source = inspect.getsource(find(linear, PARTS))
    for line in (
        "self.num_kv_heads = divide(self.total_num_kv_heads, tp_size)",
        "self.num_kv_head_replicas = divide(tp_size, self.total_num_kv_heads)",
        "self.tp_rank // self.num_kv_head_replicas",
    ):
        assert line in source, f"heads are shared out otherwise: mend {PARTS}"


def test_kinds_of_kv_can_be_named() -> None:
    interface = "vllm.v1.kv_cache_interface"
    assert_takes(f"{interface}:get_kv_cache_spec_kind", DIVISION, "kv_cache_spec")
    assert_takes(f"{interface}:iter_layer_specs", DIVISION, "kv_cache_spec")
    assert_fields(f"{interface}:AttentionSpec", DIVISION, "num_kv_heads", "num_head_slots")


def test_the_composite_knows_its_children() -> None:
    multi = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"
    source = inspect.getsource(find(multi, COMPOSITE))
    for state in ("self._connectors", "self._requests_to_connector"):
        assert state in source, f"{state} is gone: mend {COMPOSITE}"


def test_the_namespace_can_be_told() -> None:
    assert_takes("vllm.v1.core.kv_cache_utils:resolve_none_hash_seed", COMPAT, "hash_fn")
    assert_takes("vllm.utils.hashing:get_hash_fn_by_name", COMPAT)
    assert_takes(
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        COMPAT,
        "dtype",
        "block_size",
        "head_size",
        "kv_cache_dtype",
    )
    assert_fields(
        "vllm.v1.kv_cache_interface:KVCacheConfig",
        CONNECTOR,
        "num_blocks",
        "kv_cache_groups",
        "kv_cache_layout",
        "hash_block_size",
    )


def test_resets_reach_the_connectors_after_the_engines_own_cache() -> None:
    reset = inspect.getsource(find(f"{VLLM_SCHEDULER}.reset_prefix_cache", CONNECTOR))
    assert 0 < reset.index("kv_cache_manager.reset_prefix_cache") < reset.index("reset_connector_c")
    multi = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector"
    assert_takes(f"{multi}.reset_cache", CONNECTOR, "self")


def test_identities_cover_the_loaders_and_adapters_that_there_are() -> None:
    loaders = "vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER"
    others = {"dummy", "tensorizer", "modelexpress", "ipc_cache"}
    assert set(find(loaders, COMPAT)) == FILE_FORMATS | others
    request = find("vllm.lora.request:LoRARequest", ADAPTERS)
    assert set(request.__struct_fields__) == {
        *("lora_name", "lora_int_id", "lora_path", "base_model_name"),
        *("load_inplace", "is_3d_lora_weight"),
    }


def test_a_step_tells_whether_a_full_graph_computes_it() -> None:
    context = "vllm.forward_context:ForwardContext"
    assert_fields(context, COMPAT, "attn_metadata", "cudagraph_runtime_mode")
    find("vllm.config:CUDAGraphMode", COMPAT).FULL  # noqa: B018


def test_copies_to_a_gpu_are_queued_in_one_batch() -> None:
    batch = "vllm._custom_ops:swap_blocks_batch"
    assert_takes(batch, COMPAT, "src_ptrs", "dst_ptrs", "sizes")


def test_a_load_ahead_is_asked_for_and_told_as_vllm_does() -> None:
    """A request whose load is under way waits; it is told with the requests that have received."""
    source = inspect.getsource(find(VLLM_SCHEDULER, SCHEDULER))
    for words in ("load_kv_async", "WAITING_FOR_REMOTE_KVS", "finished_recving"):
        assert words in source, f"{words} is gone: mend {CONNECTOR}"
