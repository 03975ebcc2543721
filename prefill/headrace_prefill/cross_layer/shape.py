"""The sizes of a Llama- or Qwen3-shaped decoder, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_prefill.cross_layer.config import CrossLayerConfig, CrossLayerConfigError


@dataclass(frozen=True)
class DecoderShape:
    """A decoder's sizes, as config.json gives them."""

    cross_layer: CrossLayerConfig
    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    tied: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> DecoderShape:
        """Read a parsed config.json; `qk_norm` is true for the model type qwen3.

        Raises:
            CrossLayerConfigError: its `kv_fusion` is not valid, or a layer has no full attention.
        """
        windows = set(config.get("layer_types") or ()) - {"full_attention"}
        if windows:
            raise CrossLayerConfigError(
                f"layer_types has {sorted(windows)}: known is full_attention"
            )
        heads = config["num_attention_heads"]
        return DecoderShape(
            cross_layer=CrossLayerConfig.of(config),
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            eps=config.get("rms_norm_eps", 1e-6),
            qk_norm=config.get("model_type") == "qwen3",
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            tied=config.get("tie_word_embeddings", False),
        )
