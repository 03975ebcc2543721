"""Small random models of this year's families, by transformers' configuration classes.

The layers of each have more than one kind of KV or state, so vLLM keeps several cache groups.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY, POSITIONS, WINDOW = 512, 2048, 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=kinds)


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **SIZES,
        **EXPERTS,
        shared_expert_intermediate_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        layer_types=["linear_attention", "full_attention"] * 2,
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def _olmo3() -> Any:
    from transformers import Olmo3Config

    kinds = ["sliding_attention", "full_attention"] * 2
    return Olmo3Config(**SIZES, sliding_window=WINDOW, layer_types=kinds)


def _falcon_h1() -> Any:
    from transformers import FalconH1Config

    return FalconH1Config(**SIZES, mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32)


def _granite() -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        mamba_n_heads=8,
        mamba_d_head=64,
        layer_types=["mamba", "attention"] * 2,
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "olmo3": _olmo3,
    "qwen3_next": _qwen3_next,
    "falcon_h1": _falcon_h1,
    "granite": _granite,
}


def write_family(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a model with random weights; returns its folder."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
    model.save_pretrained(folder / name)
    return folder / name
