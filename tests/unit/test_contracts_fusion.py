"""What models with fewer KV caches need of vLLM is there, as they expect it.

Each test names the file to mend when an upgrade moves what it pins. Slow to import, not to run.
"""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest
import torch

from tests.support.contracts import assert_fields, assert_takes, find

COMPAT = "prefill/headrace_prefill/fusion/engine/_vllm_compat.py"
MODEL = "prefill/headrace_prefill/fusion/engine/model.py"
ATTENTION = "prefill/headrace_prefill/fusion/engine/attention.py"
PLUGIN = "prefill/headrace_prefill/fusion/engine/plugin.py"
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
    assert "logits_indices_padded" in protocol, f"mend {COMPAT}"
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


def test_a_packed_block_has_each_weight_at_its_channel() -> None:
    """The kernel's own packing, read back: K transposed, V plain, for the ISA of plain vectors."""
    from vllm.platforms import current_platform

    from headrace_prefill.fusion.engine._vllm_compat import packed

    if not current_platform.is_cpu():
        pytest.skip("no CPU kernels here")
    current_platform.import_kernels()
    heads, tokens, dim = 2, 32, 32
    keys, values = torch.randn(heads, dim), torch.randn(heads, dim)
    block = packed(keys, values, torch.empty(1, heads, tokens, 2 * dim), "vec")
    both = block.reshape(heads, 2, tokens * dim)
    found_keys, found_values = both[:, 0].reshape(heads, dim, tokens), both[:, 1]
    assert torch.equal(found_keys, keys[:, :, None].expand(-1, -1, tokens))
    assert torch.equal(found_values.reshape(heads, tokens, dim), values[:, None].expand(-1, 32, -1))


def test_the_models_are_registered_by_an_entry_point() -> None:
    root = Path(__file__).parents[2]
    points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    register = find(points["vllm.general_plugins"]["headrace_fusion"], "pyproject.toml")
    register()
    register()
    registry = find("vllm:ModelRegistry", PLUGIN)
    plugin = find("headrace_prefill.fusion.engine.plugin:ARCHITECTURES", PLUGIN)
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
