"""A model in plain torch with its tokenizer, once in each process of a benchmark."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache

import torch

from headrace_lab.models.lm import LM


@lru_cache
def model(folder: str) -> tuple[LM, Callable[[str], list[int]]]:
    """The model, and text to tokens without special ones. Turns gradients off, and takes
    `OMP_NUM_THREADS` threads, one by default."""
    from transformers import AutoTokenizer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return tokens

    return LM(folder), encode
