"""Small random models of the families that users serve, by transformers' configuration classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY, POSITIONS, WINDOW = 512, 2048, 128
CHUNK = 1024
"""Tokens of a chunk of Mamba-2. vLLM's CPU kernel ends the engine at prompts of several chunks."""
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


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**SIZES)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SIZES)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**SIZES, **EXPERTS)


def _mistral() -> Any:
    """All layers have a sliding window, so there is one cache group."""
    from transformers import MistralConfig

    return MistralConfig(**SIZES, sliding_window=WINDOW)


def _mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)


def _phi3() -> Any:
    from transformers import Phi3Config

    return Phi3Config(**SIZES)


def _glm4_moe() -> Any:
    from transformers import Glm4MoeConfig

    return Glm4MoeConfig(
        **SIZES,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
    )


def _ernie4_5() -> Any:
    from transformers import Ernie4_5Config

    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return Ernie4_5Config(**SIZES, rope_parameters=rope)


def _llama4() -> Any:
    """Full attention, and attention within chunks of `WINDOW` tokens."""
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=256,
        num_local_experts=4,
        num_experts_per_tok=1,
        no_rope_layers=[1, 0] * 2,
        attention_chunk_size=WINDOW,
    )


def _deepseek_v3() -> Any:
    """MLA, of the only sizes that vLLM's CPU kernel knows, with the rotary embedding without which
    it computes wrong answers."""
    from transformers import DeepseekV3Config

    sizes = SIZES | {"num_key_value_heads": 4, "num_attention_heads": 4}
    del sizes["head_dim"]
    return DeepseekV3Config(
        **sizes,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",  # as DeepSeek's own config.json; transformers knows no other
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "original_max_position_embeddings": POSITIONS // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


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

    return FalconH1Config(
        **SIZES, mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32, mamba_chunk_size=CHUNK
    )


def _granite() -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_chunk_size=CHUNK,
        layer_types=["mamba", "attention"] * 2,
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "glm4_moe": _glm4_moe,
    "ernie4_5": _ernie4_5,
    "llama4": _llama4,
    "deepseek_v3": _deepseek_v3,
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
