"""What a model's configuration alone decides: which parts an engine of it will run without."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_engine.serving.model_limits import (
    MAMBA2,
    MLA,
    cpu_limits,
    expected_left_out,
    has_state_layers,
    text_fields,
    why_no_drafts,
    why_no_store,
)

LLAMA = {"num_hidden_layers": 2, "num_key_value_heads": 2}
HEADS = {"num_attention_heads": 2}
GRANITE = HEADS | {
    "layer_types": ["mamba", "attention"],
    "mamba_chunk_size": 256,
    "mamba_n_heads": 8,
}
FALCON = HEADS | {"mamba_chunk_size": 128, "mamba_d_ssm": 256}
NEMOTRON = HEADS | {"layers_block_type": ["mamba", "moe"], "chunk_size": 128, "mamba_num_heads": 4}
QWEN_NEXT = HEADS | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 64,
}
JAMBA = HEADS | {"mamba_d_state": 16}
MAMBA = {"state_size": 16, "conv_kernel": 4}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"]}
LLAMA4 = {"layer_types": ["chunked_attention"], "attention_chunk_size": 8192}
DEEPSEEK = {"kv_lora_rank": 512}
DEEPSEEK_V32 = DEEPSEEK | {"index_topk": 2048}


@pytest.mark.parametrize(
    ("fields", "states", "limits"),
    [
        (LLAMA, False, []),
        (GRANITE, True, [MAMBA2]),
        (GRANITE | {"layer_types": ["attention"] * 2}, False, []),
        (FALCON, True, [MAMBA2]),
        (NEMOTRON, True, [MAMBA2]),
        (QWEN_NEXT, True, []),
        (JAMBA, True, []),
        (MAMBA, True, []),
        (GEMMA, False, []),
        (LLAMA4, False, []),
        (DEEPSEEK, False, [MLA]),
    ],
)
def test_layers_with_a_state_and_limits_on_cpus(
    fields: dict[str, Any], states: bool, limits: list[Any]
) -> None:
    assert has_state_layers(fields) == states
    assert cpu_limits(fields) == limits


def test_the_store_is_left_out_for_some_states_and_for_an_indexer() -> None:
    assert why_no_store("Llama", LLAMA, has_states=False) is None
    assert why_no_store("Jamba", JAMBA, has_states=True) is None
    windows = JAMBA | {"sliding_window": 128}
    assert "not sliding windows" in str(why_no_store("Jamba", windows, has_states=True))
    why = why_no_store("Mamba", MAMBA, has_states=True, has_attention=False)
    assert "Mamba has layers that keep a state in place of KV" in str(why)
    assert "beside attention only" in str(why)
    why = why_no_store("Jamba", JAMBA, has_states=True, has_prefix_cache=False)
    assert "with a prefix cache only" in str(why)
    assert why_no_store("Llama", LLAMA, has_states=False, has_prefix_cache=False) is None
    assert "indexer" in str(why_no_store("DeepseekV32", DEEPSEEK_V32, has_states=False))


def test_engines_with_states_do_not_draft_with_headraces_drafter_nor_on_cpus() -> None:
    assert "would end, or answer wrongly" in str(why_no_drafts("Jamba", on_cpu=True, is_own=False))
    assert "would end, or answer wrongly" in str(why_no_drafts("Jamba", on_cpu=True, is_own=True))
    assert "no prefill engine" in str(why_no_drafts("Jamba", on_cpu=False, is_own=True))
    assert why_no_drafts("Jamba", on_cpu=False, is_own=False) is None


@pytest.mark.parametrize(
    ("fields", "on_cpu", "parts"),
    [
        (LLAMA, True, set()),
        (GRANITE, True, {"store", "prefix_cache", "speculation"}),
        (GRANITE, False, {"speculation"}),
        (QWEN_NEXT, True, {"speculation"}),
        (QWEN_NEXT | {"sliding_window": 128}, False, {"store", "speculation"}),
        (MAMBA, False, {"store", "speculation"}),
        (DEEPSEEK, True, {"prefix_cache"}),
        (DEEPSEEK_V32, False, {"store"}),
    ],
)
def test_the_parts_that_an_engine_will_run_without(
    fields: dict[str, Any], on_cpu: bool, parts: set[str]
) -> None:
    assert expected_left_out(fields, on_cpu=on_cpu).keys() == parts
    multimodal = {"architectures": ["X"], "text_config": fields}
    assert expected_left_out(multimodal, on_cpu=on_cpu).keys() == parts


@pytest.mark.parametrize("config", [{}, {"layer_types": "mamba"}, {"text_config": None}])
def test_a_strange_configuration_decides_nothing(config: dict[str, Any]) -> None:
    assert text_fields(config) is config
    assert expected_left_out(config, on_cpu=True) == {}
