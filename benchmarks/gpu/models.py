"""Models that the parts run: shapes that users have, with random weights; a tiny one for dry runs.

`HEADRACE_GPU_MODEL` names another one: a folder, or a model on the hub.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

MODEL = "HEADRACE_GPU_MODEL"
POSITIONS = 40960

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""Llama 3 8B, with more positions."""


def make_model(folder: Path, dry: bool) -> Path:
    """Write the parts' model into a folder, which is made; return it.

    Args:
        dry: two layers with weights, and not an 8B shape without.
    """
    if dry:
        from tests.support.tiny import make_tiny_llama

        return make_tiny_llama(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def the_model() -> str:
    """Return its folder, or its name on the hub. Raises KeyError if no run has set it."""
    return os.environ[MODEL]


@cache
def model_config() -> dict[str, Any]:
    """Return its config.json."""
    from transformers import AutoConfig

    found: dict[str, Any] = AutoConfig.from_pretrained(the_model()).to_dict()
    return found


def model_arguments() -> dict[str, Any]:
    """Return vLLM's arguments: for a folder without weights, random ones."""
    folder = Path(the_model())
    given = not folder.is_dir() or any(folder.glob("*.safetensors"))
    return {} if given else {"load_format": "dummy", "skip_tokenizer_init": True}


def prompt(tokens: int, seed: int) -> list[int]:
    """Return random tokens that the model knows: hardly any prefix in common with another seed."""
    from benchmarks.kvstore.engine_node import noise

    size = int(model_config()["vocab_size"])
    return [token % size for token in noise(tokens, seed)]
