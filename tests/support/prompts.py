"""Prompts of chosen lengths, as token ids: text and noise."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

LENGTHS = (
    *(1, 2, 3, 7, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 130, 191, 200),
    *(255, 256, 257, 300, 384, 385, 511, 512, 513, 640, 1000, 1100),
)
"""Around every boundary that the engine knows: a block is 128 tokens, a page of 32 within it; a
step of the tests' app computes 512. The longest take three steps."""
ANSWER_TOKENS = 16
FIRST_TURN, SECOND_TURN = 300, 470
FIRST_TOKEN, LAST_TOKEN = 20, 2048
"""Ordinary tokens of both models that tests use: the ids below are special tokens, and the tiny
Llama has no more."""

TEXT = (
    "The headrace brings the water of the river to the wheel. When the gate is open the water "
    "falls on the buckets, the wheel turns, and the stone in the mill grinds the grain of the "
    "whole valley. In a dry summer the miller waits for the rain; in a wet spring he lets the "
    "water pass over the weir. Numbers: one, two, three, four, five, six, seven, eight, nine, ten. "
)


def noise(tokens: int, seed: int) -> list[int]:
    """Random token ids: hardly any prefix in common with another seed."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]


def turns(text_ids: list[int]) -> list[list[int]]:
    """A conversation's first turn, and its second, which begins with the first."""
    long = (text_ids[5:] + text_ids * 5)[:SECOND_TURN]
    return [long[:FIRST_TURN], long]


def text_ids(model: Path) -> list[int]:
    """`TEXT` in a model's tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return list(tokenizer.encode(TEXT, add_special_tokens=False).ids)


def plain_prompts(model: Path) -> list[list[int]]:
    """All prompts whose answers are compared with a plain engine's."""
    ids = text_ids(model)
    return [*exactness_prompts(ids), *turns(ids)]


def exactness_prompts(text_ids: list[int]) -> list[list[int]]:
    """30 prompts of `LENGTHS` tokens.

    Args:
        text_ids: a text as token ids, repeated as needed; every third prompt is noise instead.
    """
    prompts = []
    for number, length in enumerate(LENGTHS):
        if number % 3 == 2:
            prompts.append(noise(length, seed=number))
        else:
            start = 11 * number % len(text_ids)
            long = text_ids[start:] + text_ids * (length // len(text_ids) + 1)
            prompts.append(long[:length])
    return prompts
