"""What recomputing rows needs of vLLM is there, as it expects it.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from headrace_engine.vllm.forward_pass import Unsupported, find_decoder
from tests.support.contracts import assert_fields, assert_takes, find

COMPAT = "engine/headrace_engine/vllm/forward_pass.py"
WORKERS = "engine/headrace_engine/vllm/worker.py"
WORKER = "prefill/headrace_prefill/blending/engine/worker.py"
CONNECTOR = "prefill/headrace_prefill/blending/engine/connector.py"
MODELS = ["llama:Llama", "mixtral:Mixtral", "qwen2:Qwen2", "qwen3:Qwen3", "qwen3_moe:Qwen3Moe"]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_parts_and_runs_as_a_whole(name: str) -> None:
    path = f"vllm.model_executor.models.{name}ForCausalLM"
    forward = ("input_ids", "positions", "intermediate_tensors", "inputs_embeds")
    assert_takes(f"{path}.forward", COMPAT, *forward)
    assert_takes(f"{path}.compute_logits", COMPAT, "hidden_states")
    find(f"vllm.model_executor.models.{name}Model.embed_input_ids", COMPAT)


def test_all_ranks_get_the_logits_of_the_whole_vocabulary() -> None:
    platform = find("vllm.platforms:current_platform", COMPAT)
    assert platform.use_all_gather()
    gather = "vllm.model_executor.layers.logits_processor:LogitsProcessor._gather_logits"
    assert "tensor_model_parallel_all_gather" in inspect.getsource(find(gather, COMPAT))


def test_ranks_compare_values_in_host_memory() -> None:
    group = find("vllm.distributed.parallel_state:GroupCoordinator", COMPAT)
    source = inspect.getsource(group.__init__)
    assert "self.cpu_group" in source and "self.world_size" in source, f"mend {WORKERS}"


def test_experts_are_found_by_name_and_not_by_their_number_in_a_forward_pass() -> None:
    """Rows enter a forward context for each layer."""
    assert find("vllm.utils.torch_utils:_USE_LAYERNAME", COMPAT)
    runner = "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._encode_layer_name"
    assert "if _USE_LAYERNAME:\n            return LayerName(self.layer_name)" in inspect.getsource(
        find(runner, COMPAT)
    )


def test_engines_say_whether_steps_count_experts() -> None:
    assert_fields("vllm.config:ParallelConfig", COMPAT, "enable_eplb")
    assert_fields("vllm.config.aux_output:AuxOutputConfig", COMPAT, "enable_return_routed_experts")
    find("vllm.config.aux_output:AuxOutputConfig.enabled", COMPAT)
    assert_fields("vllm.config:VllmConfig", COMPAT, "aux_output_config")


def test_another_model_is_refused_by_name() -> None:
    model = nn.Module()
    model.model = nn.Linear(1, 1)
    with pytest.raises(
        Unsupported, match=r"Module \(Linear\) cannot be recomputed: it has no embed_"
    ):
        find_decoder(model)


def test_attention_writes_keys_first_then_attends_within_the_forward_context() -> None:
    attention = "vllm.model_executor.layers.attention.attention"
    forward = inspect.getsource(find(f"{attention}:Attention.forward", COMPAT))
    assert forward.index("unified_kv_cache_update") < forward.index("unified_attention_with")
    assert_takes(f"{attention}:Attention.forward", COMPAT, "query", "key", "value")
    context = inspect.getsource(find(f"{attention}:get_attention_context", COMPAT))
    for part in ("attn_metadata_raw[layer_name]", "slot_mapping.get(layer_name)"):
        assert part in context, f"mend {COMPAT}"
    assert_takes(
        *("vllm.forward_context:set_forward_context", COMPAT),
        *("attn_metadata", "vllm_config", "num_tokens", "slot_mapping", "skip_compiled"),
    )


def test_metadata_is_built_from_queries_lengths_and_block_tables() -> None:
    assert_fields(
        *("vllm.v1.attention.backend:CommonAttentionMetadata", COMPAT),
        *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound"),
        *("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len"),
        *("block_table_tensor", "slot_mapping"),
    )
    for backend in (
        "cpu_attn:CPUAttentionMetadataBuilder",
        "flash_attn:FlashAttentionMetadataBuilder",
    ):
        builder = f"vllm.v1.attention.backends.{backend}.build"
        assert_takes(builder, COMPAT, "common_prefix_len", "common_attn_metadata", "fast_build")


def test_a_cache_is_heads_by_tokens_by_key_and_value() -> None:
    cpu = inspect.getsource(
        find("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward", COMPAT)
    )
    assert "kv_cache.view((num_blocks, num_kv_heads, block_size * 2, -1))" in cpu
    assert "kv_cache.chunk(2, dim=2)" in cpu
    cuda = inspect.getsource(
        find("vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward", COMPAT)
    )
    assert "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)" in cuda


def test_a_worker_has_the_model_once_the_cache_is_there() -> None:
    worker = "vllm.v1.worker.gpu_worker:Worker"
    assert_takes(f"{worker}.initialize_from_config", WORKER, "kv_cache_config")
    source = inspect.getsource(find(f"{worker}.initialize_from_config", WORKER))
    assert "ensure_kv_transfer_initialized" in source and "initialize_kv_cache" in source
    find(f"{worker}.get_model", WORKER)


def test_a_load_that_ends_after_an_abort_gives_the_blocks_back() -> None:
    scheduler = "vllm.v1.core.sched.scheduler:Scheduler"
    aborted = inspect.getsource(find(f"{scheduler}.finish_requests", CONNECTOR))
    assert "WAITING_FOR_REMOTE_KVS" in aborted and "delay_free_blocks" in aborted
    ended = inspect.getsource(find(f"{scheduler}._update_from_kv_xfer_finished", CONNECTOR))
    assert "self._free_blocks(self.requests[req_id])" in ended
    ready = inspect.getsource(find(f"{scheduler}._update_waiting_for_remote_kv", CONNECTOR))
    assert "failed_recving_kv_req_ids" in ready


def test_a_connector_may_compute_within_the_call_for_what_has_finished() -> None:
    mixin = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin"
    source = inspect.getsource(find(f"{mixin}._get_kv_connector_output", CONNECTOR))
    begun, ended = source.rindex("start_load_kv"), source.index("get_transfer_results")
    assert begun < ended < source.index("get_block_ids_with_load_errors")
    second = find("vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.post_forward", CONNECTOR)
    source = inspect.getsource(second)
    begun, ended = source.index("self._start_load_kv()"), source.index("get_transfer_results")
    assert begun < ended < source.index("get_block_ids_with_load_errors")
    asked = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
    source = inspect.getsource(find(f"{asked}.get_transfer_results", CONNECTOR))
    assert "self.get_finished(finished_req_ids)" in source, f"mend {CONNECTOR}"
