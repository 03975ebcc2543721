"""Small random models, one for each way in which a model's layers and heads share KV.

`tests.support.cross_layer_models`'s engines serve them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support import cross_layer_models
from tests.support.cross_layer_models import BLOCK, config, write_model

FLOAT32_BYTES = 4
LATENT, ROTATED, MLA_BLOCK = 512, 64, 16
"""vLLM's CPU kernel for MLA knows no other sizes."""
MLA_LAYERS, MLA_HEADS, MLA_HEAD_DIM = 2, 2, 64
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": cross_layer_models.POSITIONS // 2,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""As DeepSeek V2 has it. Without it vLLM 0.29 computes wrong answers on CPUs: not transformers',
and others for a prompt alone than for the same prompt beside others."""
WINDOW = 64


@dataclass(frozen=True)
class Layout:
    """A model of one layout, and what the store is to keep of it.

    Attributes:
        write: writes the model into a folder that is not there yet.
        layers: that keep KV.
        token_bytes: of one token's KV in such a layer.
        block: tokens of a block.
        options: of its engines.
    """

    write: Callable[[Path], Path]
    layers: int
    token_bytes: int
    block: int = BLOCK
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def block_bytes(self) -> int:
        return self.layers * self.token_bytes * self.block


def write_llama(folder: Path, kv_heads: int, **more: Any) -> Path:
    """A plain Llama: grouped heads, or one KV head for all."""
    described = config("vanilla") | {"num_key_value_heads": kv_heads}
    served = {name: value for name, value in described.items() if name != "kv_fusion"}
    served |= {"architectures": ["LlamaForCausalLM"], **more}
    return write_model(folder, described, served=served)


def write_fused(folder: Path, kind: str) -> Path:
    """A model whose upper layers keep no KV."""
    return write_model(folder, config(kind))


def write_mla(folder: Path, seed: int = 0) -> Path:
    """A DeepSeek V2 without experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    described = DeepseekV2Config(
        architectures=["DeepseekV2ForCausalLM"],
        dtype="float32",
        vocab_size=cross_layer_models.VOCABULARY,
        hidden_size=cross_layer_models.HIDDEN,
        intermediate_size=2 * cross_layer_models.HIDDEN,
        num_hidden_layers=MLA_LAYERS,
        first_k_dense_replace=MLA_LAYERS,
        num_attention_heads=MLA_HEADS,
        num_key_value_heads=MLA_HEADS,
        kv_lora_rank=LATENT,
        q_lora_rank=None,
        qk_rope_head_dim=ROTATED,
        qk_nope_head_dim=MLA_HEAD_DIM,
        v_head_dim=MLA_HEAD_DIM,
        max_position_embeddings=cross_layer_models.POSITIONS,
        rope_parameters=YARN,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    model = DeepseekV2ForCausalLM(described)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, 0.0, 2.0 / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return folder


HEAD_BYTES = 2 * cross_layer_models.HEAD_DIM * FLOAT32_BYTES
"""A key and a value."""
GQA_BYTES = cross_layer_models.KV_HEADS * HEAD_BYTES

LAYOUTS = {
    "GQA": Layout(
        partial(write_llama, kv_heads=cross_layer_models.KV_HEADS),
        cross_layer_models.LAYERS,
        GQA_BYTES,
    ),
    "MQA": Layout(partial(write_llama, kv_heads=1), cross_layer_models.LAYERS, HEAD_BYTES),
    "YOCO": Layout(partial(write_fused, kind="yoco"), cross_layer_models.LAYERS // 2, GQA_BYTES),
    "CLA": Layout(partial(write_fused, kind="cla"), cross_layer_models.LAYERS // 2, GQA_BYTES),
    "MLA": Layout(
        write_mla,
        MLA_LAYERS,
        (LATENT + ROTATED) * FLOAT32_BYTES,
        MLA_BLOCK,
        {"attention_config": {"backend": "CPU_MLA"}},
    ),
}
WINDOWS = Layout(
    partial(
        write_llama,
        kv_heads=cross_layer_models.KV_HEADS,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * (cross_layer_models.LAYERS // 2),
    ),
    cross_layer_models.LAYERS,
    GQA_BYTES,
)
"""Every second layer sees the last `WINDOW` tokens alone: two cache groups, unless vLLM is told to
make one."""
