"""Prompts of chosen lengths, as token ids: text and noise."""

from __future__ import annotations

import random

LENGTHS = (
    *(1, 2, 3, 7, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 130, 191, 200),
    *(255, 256, 257, 300, 384, 385, 511, 512, 513, 640, 1000, 3000),
)
"""Around every boundary that the engine knows: a block is 128 tokens, a page of 32 within it."""
ANSWER_TOKENS = 16
FIRST_TOKEN, LAST_TOKEN = 20, 49_000  # the ids below are special tokens, those above unused

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
