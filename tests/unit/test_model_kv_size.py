"""What KV takes: the published numbers, and what the arrangements have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.main import main
from headrace.model.facts import facts_from_config
from headrace.model.kv_size import KvSize, kv_sizes
from headrace.model.registry import ModelError

GIB = 1 << 30
SEVEN_B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "dtype": "float16",
}


def sizes(config: dict[str, Any], memory: int = 64 * GIB, block: int = 16) -> dict[str, KvSize]:
    facts = facts_from_config(config)
    return {size.name: size for size in kv_sizes(facts, memory, facts.max_model_len, block)}


def test_32_layers_of_32_heads_of_128_take_half_a_mebibyte_a_token_and_16_gib_for_32k() -> None:
    mha = sizes(SEVEN_B)["mha"]
    assert mha.bytes_per_token == 512 * 1024
    assert mha.context_bytes == 16 * GIB
    assert (mha.blocks, mha.contexts) == (8192, 4)


@pytest.mark.parametrize(
    ("name", "kib"),
    [
        *(("as it is", 128), ("mha", 512), ("gqa", 128), ("mqa", 16), ("mla", 36)),
        *(("cla", 64), ("yoco", 64), ("lite", 64), ("fused", 64), ("fp8", 64)),
    ],
)
def test_a_model_of_8_kv_heads(name: str, kib: int) -> None:
    assert sizes({**SEVEN_B, "num_key_value_heads": 8})[name].bytes_per_token == kib * 1024


def test_int4_counts_its_scales() -> None:
    found = sizes({**SEVEN_B, "num_key_value_heads": 8}, block=128)
    codes = found["as it is"].bytes_per_block // 4
    assert codes < found["int4"].bytes_per_block < 1.4 * codes


def test_a_model_with_a_latent_keeps_it_and_its_other_rows_have_its_heads() -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
    found = sizes({**SEVEN_B, **latent})
    assert found["as it is"].bytes_per_token == found["mla"].bytes_per_token == 32 * 576 * 2
    assert found["mha"].bytes_per_token == 512 * 1024
    assert "int4" not in found


def test_a_fused_model_is_sized_by_its_storage_layers() -> None:
    fused = {**SEVEN_B, "kv_fusion": {"kind": "fused", "storage_layers": 12}}
    assert sizes(fused)["as it is"].bytes_per_token == 12 * 16 * 1024


def test_a_wrong_kv_fusion_is_an_error_of_the_model() -> None:
    with pytest.raises(ModelError, match="takes 2 to 31"):
        facts_from_config({**SEVEN_B, "kv_fusion": {"kind": "lite", "storage_layers": 32}})


@given(
    layers=st.integers(1, 100),
    heads=st.integers(1, 64),
    memory=st.integers(1, 1 << 42),
    context=st.integers(1, 200_000),
    block=st.sampled_from([16, 32, 128]),
)
def test_contexts_fit_and_one_more_would_not(
    layers: int, heads: int, memory: int, context: int, block: int
) -> None:
    config = {**SEVEN_B, "num_hidden_layers": layers, "num_attention_heads": heads}
    for size in kv_sizes(facts_from_config(config), memory, context, block):
        assert size.contexts * size.context_bytes <= memory
        whole = size.blocks // -(-context // block)
        assert size.contexts == whole
        assert (size.blocks + 1) * size.bytes_per_block > memory
        assert size.context_bytes >= context * size.bytes_per_token


def test_the_command_prints_the_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    for source in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(SystemExit) as ended:
            main(["model", "check-kv", str(source), "--gpu-memory", "40", "--json"])
        assert not ended.value.code
        found = json.loads(capsys.readouterr().out)
        assert found["kv_memory_bytes"] == 36 * GIB and found["context_tokens"] == 32768
        assert found["rows"][1]["name"] == "mha" and found["rows"][1]["contexts"] == 2
    with pytest.raises(SystemExit):
        main(["model", "check-kv", str(tmp_path)])
    assert "512.0 KiB" in capsys.readouterr().out


def test_a_file_that_is_no_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["model", "check-kv", str(tmp_path / "weights.bin")])
    assert ended.value.code and "no config.json" in capsys.readouterr().err
