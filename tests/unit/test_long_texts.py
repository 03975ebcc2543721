"""A text that cannot fit is refused after a part of it, and a long one holds up no short one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.hostile.attacks import MEGABYTE, TROUBLE
from headrace_decode.rendering.long_texts import (
    GROWTH,
    LONG_CHARS,
    LongTextTokenizer,
    find_too_long_prefix,
)
from tests.support.tiny import tiny_llama

LIMIT = 8192


class Counting:
    """A tokenizer with tokens of so many characters; it counts what it is given."""

    def __init__(self, chars_per_token: int) -> None:
        self.chars, self.per_token = 0, chars_per_token

    def __call__(self, text: str) -> Sequence[int]:
        self.chars += len(text)
        return range(-(-len(text) // self.per_token))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(tiny_llama()))


def test_a_text_that_cannot_fit_is_read_no_further_than_that_shows() -> None:
    encode = Counting(1)
    shown = find_too_long_prefix("a" * 8_000_000, LIMIT, encode)
    assert shown is not None and len(shown) > LIMIT
    assert encode.chars <= 4 * LIMIT


@pytest.mark.parametrize("per_token", [1, 3, 10, 80])
def test_reading_pieces_of_a_text_costs_at_most_a_third_of_the_text(per_token: int) -> None:
    encode = Counting(per_token)
    text = "a" * (LIMIT * per_token)
    assert find_too_long_prefix(text, LIMIT, encode) is None
    assert encode.chars <= len(text) / (GROWTH - 1)


def test_a_beginning_with_hardly_too_many_tokens_shows_nothing() -> None:
    """The tokens at its end may be others than those of the whole text."""
    assert find_too_long_prefix("a" * 2 * LIMIT * GROWTH, LIMIT, Counting(2)) is None
    assert find_too_long_prefix("a" * 2 * LIMIT * GROWTH, LIMIT, lambda text: range(9000)) is None


@pytest.mark.parametrize("kind", TROUBLE)
def test_whatever_is_refused_after_a_part_is_too_long_as_a_whole(kind: str, tokenizer: Any) -> None:
    text = TROUBLE[kind] * (MEGABYTE // 4 // len(TROUBLE[kind]))

    def encode(part: str) -> Sequence[int]:
        ids: list[int] = tokenizer(part)["input_ids"]
        return ids

    whole = len(encode(text))
    for most in (64, 512, LIMIT):
        if find_too_long_prefix(text, most, encode) is not None:
            assert whole > most
    assert find_too_long_prefix(text, whole, encode) is None


async def test_a_long_text_does_not_hold_the_event_loop() -> None:
    texts, begun, go_on = LongTextTokenizer(), threading.Event(), threading.Event()

    def encode(text: str) -> Sequence[int]:
        begun.set()
        assert go_on.wait(10)
        return [1, 2]

    running = asyncio.create_task(texts.token_ids("a" * LONG_CHARS, None, encode))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    assert not running.done()
    go_on.set()
    assert await running == [1, 2]
    texts.close()
