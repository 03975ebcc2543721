"""A Llama of two layers with random weights, for engines that need no real language.

It takes a second to make and is the same bytes for the same seed. Its KV has the shape that real
models have (grouped heads of 64, blocks of 128 tokens), 8,192 positions. Its answers depend on
every part of the prompt, and the best token leads the second by about a nat, so rounding hardly
ever decides.
"""

from __future__ import annotations

import json
import string
from functools import cache
from itertools import islice, product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support import run

VOCABULARY, SPECIALS = 2048, 20
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 64
HIDDEN, INTERMEDIATE = HEADS * HEAD_DIM, 4096
"""Wide enough that computing a block takes ten times as long as loading it, as for a real model."""
POSITIONS = 8192
RANK = 8
"""Of adapters."""
FLOAT32_BYTES = 4
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * FLOAT32_BYTES
"""In float32."""

END = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|1|>{{ m['role'] }}\n{{ m['content'] }}<|2|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|1|>assistant\n{% endif %}"
)


@cache
def tiny_llama() -> Path:
    """The folder of the run's tiny Llama, made at first use."""
    return make_tiny_llama(run.folder() / "tiny")


def make_tiny_llama(folder: Path, seed: int = 0, **config: object) -> Path:
    """Write the model's files into `folder`, which is made; returns it.

    Args:
        config: fields of its configuration that differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "config.json", _config() | config)
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "model_max_length": POSITIONS,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    save_file(_weights(tokenizer, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter for it into `folder`, which is made; returns it. Its answers are not the
    model's."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        for part, shape in (("A", (RANK, HIDDEN)), ("B", (KV_HEADS * HEAD_DIM, RANK))):
            scale = np.float32(shape[1] ** -0.5)
            weights[f"{name}.lora_{part}.weight"] = rng.standard_normal(shape, np.float32) * scale
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK}
    _write(folder / "adapter_config.json", told | {"target_modules": ["v_proj"], "bias": "none"})
    return folder


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1))


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def make_tokenizer() -> Tokenizer:
    """Ids: special tokens, then each byte, then words that decode but never encode."""
    specials = [END, *(f"<|{n}|>" for n in range(1, SPECIALS))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = islice(product(string.ascii_lowercase, repeat=3), None)
    room = VOCABULARY - SPECIALS - len(alphabet)
    known = [*specials, *alphabet, *("Ġ" + "".join(word) for word in islice(words, room))]
    tokenizer = Tokenizer(models.BPE(vocab={t: n for n, t in enumerate(known)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    return tokenizer


def _weights(tokenizer: Tokenizer, seed: int) -> dict[str, NDArray[np.float32]]:
    """Random matrices. A token sees those far back: attention is peaked (query times key has a
    standard deviation of 2), and what it adds is as large as what it is added to."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        scale = np.float32(gain / columns**0.5)
        return rng.standard_normal((rows, columns), np.float32) * scale

    head = matrix(VOCABULARY, HIDDEN, gain=4.0)
    printable = set(string.printable[:95])
    for token, number in tokenizer.get_vocab().items():
        if number < SPECIALS or (len(token) == 1 and token not in printable):
            head[number] = 0.0  # never the likeliest: answers are plain ASCII and do not end
    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, gain=HIDDEN**0.5),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        for name, rows, columns, gain in (
            ("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN, 2.0),
            ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN, 1.0),
            ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN, 1.0),
            ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM, 2.0),
            ("mlp.gate_proj", INTERMEDIATE, HIDDEN, 1.0),
            ("mlp.up_proj", INTERMEDIATE, HIDDEN, 1.0),
            ("mlp.down_proj", HIDDEN, INTERMEDIATE, 1.0),
        ):
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns, gain)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return weights
