"""What a model folder tells about its KV, checked against published figures."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from headrace.model import ModelError, describe
from headrace.model.facts import count_params, facts_from_config

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}
LLAMA_3_8B = {
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "float16",
}


def test_smollm2_keeps_23_040_bytes_per_token() -> None:
    facts = facts_from_config(SMOLLM2)
    assert (facts.layers, facts.kv_heads, facts.head_dim, facts.dtype_bytes) == (30, 3, 64, 2)
    assert facts.kv_bytes_per_token == 23_040
    assert facts.max_positions == facts.max_model_len == 8192


def test_head_dim_follows_from_the_hidden_size_and_old_dtype_names_count() -> None:
    facts = facts_from_config(LLAMA_3_8B)
    assert facts.head_dim == 128
    assert facts.kv_bytes_per_token == 131_072


def test_without_kv_heads_every_head_has_its_own() -> None:
    config = {k: v for k, v in LLAMA_3_8B.items() if k != "num_key_value_heads"}
    facts = facts_from_config(config)
    assert facts.kv_bytes_per_token == 524_288
    assert facts.kv_bytes_per_token * 32_768 == 16 * 2**30


def test_float32_checkpoints_are_served_in_16_bits() -> None:
    assert facts_from_config({**LLAMA_3_8B, "torch_dtype": "float32"}).dtype_bytes == 2


def test_a_multimodal_models_text_part_counts() -> None:
    config = {"architectures": ["SomethingForConditionalGeneration"], "text_config": SMOLLM2}
    assert facts_from_config(config).kv_bytes_per_token == 23_040


def test_mla_keeps_one_latent_for_k_and_v() -> None:
    deepseek_v3 = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "max_position_embeddings": 163840,
        "torch_dtype": "bfloat16",
    }
    assert facts_from_config(deepseek_v3).kv_bytes_per_token == 61 * 576 * 2


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"type": "linear", "factor": 2.0}, 16384),
        ({"rope_type": "llama3", "factor": 8.0}, 8192),
        (None, 8192),
    ],
)
def test_default_length_follows_the_rope_settings(rope: dict[str, Any] | None, length: int) -> None:
    assert facts_from_config({**LLAMA_3_8B, "rope_scaling": rope}).max_model_len == length


def test_params_are_counted_from_the_safetensors_headers(tmp_path: Path) -> None:
    def tensor(*shape: int) -> dict[str, object]:
        return {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]}

    for index, tensors in enumerate(({"a": tensor(3, 5)}, {"b": tensor(7), "c": tensor()})):
        header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
        file = tmp_path / f"model-{index}.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert count_params(tmp_path) == 15 + 7 + 1


def test_params_are_unknown_without_whole_safetensors(tmp_path: Path) -> None:
    assert count_params(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 12)
    assert count_params(tmp_path) is None


@pytest.mark.parametrize("text", [None, "{", "[]", '{"num_hidden_layers": 30}'])
def test_a_folder_that_is_no_model_is_refused_in_words(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        describe(tmp_path)
