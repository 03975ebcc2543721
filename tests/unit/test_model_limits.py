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
    why_no_store,
)

LLAMA = {"num_hidden_layers": 2, "num_key_value_heads": 2}
GRANITE = {"layer_types": ["mamba", "attention"], "mamba_chunk_size": 256, "mamba_n_heads": 8}
FALCON = {"mamba_chunk_size": 128, "mamba_d_ssm": 256}
NEMOTRON = {"layers_block_type": ["mamba", "moe"], "chunk_size": 128, "mamba_num_heads": 4}
QWEN_NEXT = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 64}
JAMBA = {"mamba_d_state": 16}
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
        ({"state_size": 16, "conv_kernel": 4}, True, []),
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


def test_the_store_is_left_out_for_states_and_for_an_indexer() -> None:
    assert why_no_store("Llama", LLAMA, has_states=False) is None
    assert "keep a state" in str(why_no_store("Jamba", JAMBA, has_states=True))
    assert "indexer" in str(why_no_store("DeepseekV32", DEEPSEEK_V32, has_states=False))


@pytest.mark.parametrize(
    ("fields", "on_cpu", "parts"),
    [
        (LLAMA, True, set()),
        (GRANITE, True, {"store", "prefix_cache"}),
        (GRANITE, False, {"store"}),
        (QWEN_NEXT, True, {"store"}),
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
