"""What models with fewer KV caches need of vLLM is there, as they expect it.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.contracts import assert_fields, assert_takes, find

COMPAT = "engine/headrace_engine/vllm/attention/cpu.py"
MODEL = "prefill/headrace_prefill/cross_layer/engine/model.py"
ATTENTION = "prefill/headrace_prefill/cross_layer/engine/attention.py"
PLUGIN = "prefill/headrace_prefill/cross_layer/engine/plugin.py"
DEVICE = "engine/headrace_engine/vllm/attention/cuda.py"
TRITON = "vllm.v1.attention.backends.triton_attn"
CPU = "vllm.v1.attention.backends.cpu_attn"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"


def test_a_layer_may_have_a_backend_of_ours_and_share_another_layers_cache() -> None:
    attention = "vllm.model_executor.layers.attention:Attention"
    assert_takes(
        *(f"{attention}.__init__", MODEL, "kv_sharing_target_layer_name", "attn_backend"),
        "extra_impl_args",
    )
    made = inspect.getsource(find(f"{attention}.__init__", MODEL))
    assert "**extra_impl_args," in made, f"mend {MODEL}"
    spec = inspect.getsource(find(f"{RUNNER}.get_kv_cache_spec", MODEL))
    assert "self.shared_kv_cache_layers[layer_name] = kv_tgt_layer" in spec, f"mend {MODEL}"
    forward = inspect.getsource(find(f"{attention}.forward", MODEL))
    assert "if key is not None:" in forward, f"mend {MODEL}: a layer without K and V passes None"


def test_layers_that_share_are_told_which_rows_have_logits() -> None:
    protocol = find(
        "vllm.v1.attention.backends.utils:KVSharingFastPrefillMetadata", COMPAT
    ).__annotations__
    assert {"logits_indices_padded", "num_logits_indices"} <= set(protocol), f"mend {COMPAT}"
    groups = inspect.getsource(find(f"{RUNNER}.initialize_attn_backend", COMPAT))
    assert "create_fast_prefill_custom_backend" in groups, f"mend {COMPAT}"
    wrapped = inspect.getsource(
        find("vllm.v1.attention.backends.utils:create_fast_prefill_custom_backend", COMPAT)
    )
    assert "for _field in fields(metadata.__class__)" in wrapped, f"mend {COMPAT}: loses blocks"
    assert_fields("vllm.config:CacheConfig", MODEL, "kv_sharing_fast_prefill")


def test_the_cpu_kernel_takes_keys_and_values_apart() -> None:
    assert_takes(
        *("vllm._custom_ops:cpu_attention_with_kv_cache", COMPAT),
        *("query", "key_cache", "value_cache", "output", "query_start_loc", "seq_lens", "scale"),
        *("causal", "alibi_slopes", "sliding_window", "block_table", "softcap"),
        *("scheduler_metadata", "s_aux", "dynamic_causal", "k_scale", "v_scale", "kv_cache_dtype"),
    )
    assert_takes(
        *("vllm._custom_ops:cpu_attn_reshape_and_cache", COMPAT),
        *("key", "value", "key_cache", "value_cache", "slot_mapping", "isa"),
    )
    forward = inspect.getsource(find(f"{CPU}:CPUAttentionBackendImpl.forward", COMPAT))
    assert "kv_cache.view((num_blocks, num_kv_heads, block_size * 2, -1))" in forward
    assert "kv_cache.chunk(2, dim=2)" in forward, f"mend {COMPAT}"
    made = inspect.getsource(find(f"{CPU}:CPUAttentionBackendImpl.__init__", COMPAT))
    for name in ("scale", "alibi_slopes", "sliding_window", "logits_soft_cap", "sinks"):
        assert f"self.{name} = " in made, f"mend {COMPAT}"
    assert_fields(
        *(f"{CPU}:CPUAttentionMetadata", COMPAT, "num_actual_tokens", "query_start_loc"),
        *("seq_lens", "block_table", "scheduler_metadata", "causal", "dynamic_causal"),
    )
    builder = inspect.getsource(find(f"{CPU}:CPUAttentionMetadataBuilder", COMPAT))
    assert "layer.isa = self.isa" in builder, f"mend {ATTENTION}"


def test_the_gpus_kernel_takes_keys_and_values_apart() -> None:
    pytest.importorskip("triton")
    assert_takes(
        *("vllm.v1.attention.ops.triton_unified_attention:unified_attention", DEVICE, "q", "k"),
        *("v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k"),
        *("softmax_scale", "causal", "window_size", "block_table", "softcap", "q_descale"),
        *("k_descale", "v_descale", "seq_threshold_3D", "num_par_softmax_segments"),
        *("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"),
    )
    assert_fields(
        *(f"{TRITON}:TritonAttentionMetadata", DEVICE, "num_actual_tokens", "query_start_loc"),
        *("max_query_len", "seq_lens", "max_seq_len", "block_table", "causal"),
        *("seq_threshold_3D", "num_par_softmax_segments", "softmax_segm_output"),
        *("softmax_segm_max", "softmax_segm_expsum"),
    )
    builder = inspect.getsource(find(f"{TRITON}:TritonAttentionMetadataBuilder", DEVICE))
    assert "self.block_size = kv_cache_spec.block_size" in builder, f"mend {DEVICE}"
    for name in ("TritonAttentionBackend", "TritonAttentionImpl"):
        find(f"{TRITON}:{name}", DEVICE)
    assert find("vllm.platforms:current_platform", COMPAT).is_cuda_alike() in (True, False)


@pytest.mark.parametrize("backend", ["triton_attn:Triton", "flash_attn:Flash"])
def test_backends_for_gpus_keep_k_and_v_side_by_side_in_one_order(backend: str) -> None:
    """Storage layers may have another backend than the layers that read their caches."""
    pytest.importorskip("triton")
    path = f"vllm.v1.attention.backends.{backend}AttentionImpl.do_kv_cache_update"
    text = inspect.getsource(find(path, DEVICE))
    split = "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"
    assert f"key_cache, value_cache = {split}" in text, f"mend {DEVICE}"


def test_layers_without_kv_have_attention_on_cpus_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from headrace_prefill.cross_layer.config import CrossLayerConfigError
    from headrace_prefill.cross_layer.engine import attention, model
    from headrace_prefill.cross_layer.engine.device import attention as on_device

    for cpu, gpu, found in ((True, False, attention), (False, True, on_device)):
        monkeypatch.setattr(model, "runs_on_cpu", lambda cpu=cpu: cpu)
        monkeypatch.setattr(model, "runs_on_cuda_or_rocm", lambda gpu=gpu: gpu)
        assert model.backends("lite") == (found.LiteBackend, found.FusedBackend)
    monkeypatch.setattr(model, "runs_on_cuda_or_rocm", lambda: False)
    with pytest.raises(CrossLayerConfigError, match="kind lite has attention for CPUs"):
        model.backends("lite")


def test_a_packed_block_has_each_weight_at_its_channel() -> None:
    """The kernel's own packing, read back: K transposed, V plain, for the ISA of plain vectors."""
    from vllm.platforms import current_platform

    from headrace_engine.vllm.attention.cpu import packed_block

    if not current_platform.is_cpu():
        pytest.skip("no CPU kernels here")
    current_platform.import_kernels()
    heads, tokens, dim = 2, 32, 32
    keys, values = torch.randn(heads, dim), torch.randn(heads, dim)
    block = packed_block(keys, values, torch.empty(1, heads, tokens, 2 * dim), "vec")
    both = block.reshape(heads, 2, tokens * dim)
    found_keys, found_values = both[:, 0].reshape(heads, dim, tokens), both[:, 1]
    assert torch.equal(found_keys, keys[:, :, None].expand(-1, -1, tokens))
    assert torch.equal(found_values.reshape(heads, tokens, dim), values[:, None].expand(-1, 32, -1))


def test_the_models_are_registered_by_an_entry_point() -> None:
    root = Path(__file__).parents[2]
    points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    register = find(points["vllm.general_plugins"]["headrace_cross_layer"], "pyproject.toml")
    register()
    register()
    registry = find("vllm:ModelRegistry", PLUGIN)
    plugin = find("headrace_prefill.cross_layer.engine.plugin:ARCHITECTURES", PLUGIN)
    assert set(plugin) <= set(registry.get_supported_archs())
    for model in plugin.values():
        found = find(model, PLUGIN)
        generates = "vllm.model_executor.models.interfaces_base:is_text_generation_model"
        assert find(generates, MODEL)(found), f"mend {MODEL}"


def test_the_parts_that_the_model_is_made_of_are_there() -> None:
    assert_takes(
        *("vllm.model_executor.models.llama:LlamaMLP.__init__", MODEL, "hidden_size"),
        *("intermediate_size", "hidden_act", "quant_config", "bias", "prefix"),
    )
    assert_fields(
        *("vllm.model_executor.models.utils:WeightsMapper", MODEL),
        *("orig_to_new_regex", "orig_to_new_stacked"),
    )
    assert_takes("vllm.model_executor.layers.rotary_embedding:get_rope", MODEL, "rope_parameters")


def test_an_engine_prices_the_kv_of_storage_layers_alone() -> None:
    from headrace_engine.vllm.engine import kv_token_bytes

    model = SimpleNamespace(
        hf_config=SimpleNamespace(kv_fusion={"kind": "lite", "storage_layers": 15}),
        dtype=torch.bfloat16,
        get_num_layers=lambda parallel: 30,
        get_total_num_kv_heads=lambda: 3,
        get_head_size=lambda: 64,
    )
    cache = SimpleNamespace(cache_dtype="auto")
    config = SimpleNamespace(model_config=model, cache_config=cache, parallel_config=None)
    assert kv_token_bytes(config) == 2 * 15 * 3 * 64 * 2
    del model.hf_config.kv_fusion
    assert kv_token_bytes(config) == 2 * 30 * 3 * 64 * 2
