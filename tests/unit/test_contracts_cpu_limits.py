"""The limits of vLLM on CPUs that Headrace works around.

Where one of these fails because vLLM can do more, its entry in `model_limits.py` can go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig

from headrace_engine.serving.model_limits import has_state_layers, text_fields
from headrace_engine.vllm.platforms import cpu_arguments, why_no_prefix_cache
from tests.support.contracts import find
from tests.support.families import FAMILIES
from tests.support.layouts import write_mla

MEND = "engine/headrace_engine/serving/model_limits.py"


def test_the_kernel_for_mamba_2_returns_one_state_a_prompt() -> None:
    """Where it returns one a chunk, `store_prefill_checkpoint` finds that of a block's end."""
    scan = find(
        "vllm.model_executor.layers.mamba.ops.ssd_combined:mamba_chunk_scan_combined_varlen", MEND
    )
    tokens, heads, width, states, chunk = 8, 2, 32, 16, 4
    x = torch.randn(tokens, heads, width)
    found = scan(
        x,
        torch.rand(tokens, heads),
        -torch.rand(heads),
        torch.randn(tokens, 1, states),
        torch.randn(tokens, 1, states),
        chunk_size=chunk,
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        cu_chunk_seqlens=torch.tensor([0, chunk, tokens], dtype=torch.int32),
        last_chunk_indices=torch.tensor([1], dtype=torch.int32),
        seq_idx=torch.zeros(2, dtype=torch.int32),
        out=torch.empty_like(x),
        return_intermediate_states=True,
    )
    assert len(found) == 1, f"vLLM lifted the limit: delete MAMBA2 in {MEND}"


def config(folder: Path, **arguments: Any) -> VllmConfig:
    """The configuration of an engine of a model without weights."""
    made = AsyncEngineArgs(model=str(folder), skip_tokenizer_init=True, **arguments)
    return made.create_engine_config()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_vllm_and_the_models_files_agree_about_states_and_chunks(
    family: str, tmp_path: Path
) -> None:
    written = FAMILIES[family]()
    written.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[written.model_type]]
    written.save_pretrained(tmp_path)
    made = config(tmp_path)
    model = made.model_config
    fields = text_fields(model.hf_config.to_dict())
    assert has_state_layers(fields) == (model.is_hybrid or model.is_attention_free)
    is_mamba2 = family in ("falcon_h1", "granite")
    assert cpu_arguments(made) == ({"enable_prefix_caching": False} if is_mamba2 else {})
    assert model.use_mla or why_no_prefix_cache(made) is None
    if is_mamba2:
        assert made.cache_config.mamba_cache_mode == "align", f"mend {MEND}"
        without = config(tmp_path, enable_prefix_caching=False)
        assert cpu_arguments(without) == {} and without.cache_config.mamba_cache_mode == "none"
        assert "Mamba-2" in str(why_no_prefix_cache(without))


def test_vllm_switches_the_prefix_cache_off_for_mla(tmp_path: Path) -> None:
    """Without AMX. Where it does not any more, delete MLA."""
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("with AMX, MLA has a prefix cache")
    made = config(write_mla(tmp_path / "mla"))
    assert made.model_config.use_mla
    assert not made.cache_config.enable_prefix_caching, f"delete MLA in {MEND}"
    assert "MLA" in str(why_no_prefix_cache(made)) and cpu_arguments(made) == {}
