"""Text whose tokenizer is trivial: a token is a word of three hexadecimal digits and a space.

All routers get their prompts as text, since the Rust ones take no token ids. English has about four
characters for each token. A router that needs tokens reads numbers of 12 bits; Dynamo, which has
its own tokenising, gets a tokenizer of whole words in Hugging Face's form (`write_tokenizer`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOKEN_CHARS = 4
VOCABULARY = 4096
ANSWER = "~"
"""Each token of an answer: a character that nothing else in a response has, so it can be counted
without parsing."""
ANSWER_ID = VOCABULARY
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_VALUES = np.zeros(256, np.uint32)
_VALUES[_DIGITS] = np.arange(16)


def text_of(tokens: NDArray[np.integer]) -> bytes:
    """Return the text of token ids below 4096, [tokens]: four ASCII characters each, no quotes."""
    words = np.full((len(tokens), TOKEN_CHARS), ord(" "), np.uint8)
    for place, shift in enumerate((8, 4, 0)):
        words[:, place] = _DIGITS[(tokens >> shift) & 15]
    return words.tobytes()


def tokens_of(text: str) -> NDArray[np.uint32]:
    """Return the tokens of a text that `text_of` made, [tokens] u32; of any other, some."""
    data = np.frombuffer(text.encode()[: len(text) // TOKEN_CHARS * TOKEN_CHARS], np.uint8)
    digits = _VALUES[data.reshape(-1, TOKEN_CHARS)]
    return (digits[:, 0] << 8 | digits[:, 1] << 4 | digits[:, 2]).astype(np.uint32)


def write_tokenizer(folder: Path, context_tokens: int) -> None:
    """A model's folder without weights: configuration and tokenizer, as Hugging Face has them."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {f"{number:03x}": number for number in range(VOCABULARY)}
    vocabulary |= {ANSWER: ANSWER_ID, "<unk>": VOCABULARY + 1, "</s>": VOCABULARY + 2}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "max_position_embeddings": context_tokens,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "eos_token_id": VOCABULARY + 2,
        "bos_token_id": VOCABULARY + 2,
        "torch_dtype": "bfloat16",
    }
    files = {
        "tokenizer.json": tokenizer,
        "config.json": config,
        "generation_config.json": {"eos_token_id": VOCABULARY + 2},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context_tokens,
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
