"""Prompts of several documents, some of which were seen elsewhere before.

Documents are passages of the sources and texts of installed packages. A package is either for
tuning or for measuring, so no text is used for both.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

SUFFIXES = (".py", ".md", ".rst", ".txt", ".pyi")
MIN_BYTES, MAX_BYTES = 3_000, 60_000
SYSTEM = (
    "You are a careful assistant. You get several documents and a question about them. Answer from "
    "the documents alone, and quote them where you can."
)
QUESTIONS = (
    'Quote the lines of document {n} that follow "{line}".',
    "What is document {n} about? Answer in two sentences, and name what it defines.",
    'Which document has the line "{line}"? Name its number, and quote the next lines.',
)
STAND_IN = "Summarise the documents above. What do they define, and what are the main points?"
"""Generic question, used instead of an unknown one."""
ALONE, AFTER_SYSTEM, INSIDE = "alone", "after system", "inside"
PLACES = (ALONE, AFTER_SYSTEM, INSIDE)
"""Places where a document was seen before: as a prompt of its own, after the system prompt, or
after another document in another prompt."""

CHATML = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
)
"""Text before and after a user's message in the prompts of many models."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        name: number, place and share of the prompt.
        tokens: all tokens of the prompt.
        chunks: (first position, length) of each document that was seen before.
        before: for each chunk, the tokens before it at the place where it was seen.
        question: first position of the question.
        place: one of `PLACES`.
        share: share of the documents' tokens that were seen before.
        stand_in: tokens of `STAND_IN`, to replace those from the question's first position on.
        answer: the answer, if it is known (`benchmarks.quality.tasks`).
    """

    name: str
    tokens: list[int]
    chunks: list[tuple[int, int]]
    before: list[list[int]]
    question: int
    place: str
    share: float
    stand_in: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


@cache
def documents(held_out: bool) -> list[Path]:
    """Return the files of one side of the split, in an order that is the same on all machines."""
    found = []
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"].lower()
        if (_hash(name) % 2 == 0) != held_out:
            continue
        for file in package.files or ():
            if file.suffix in SUFFIXES and "test" not in str(file):
                found.append((_hash(f"{name}/{file}"), Path(str(file.locate()))))
    return [
        file
        for _, file in sorted(found)
        if file.is_file() and MIN_BYTES <= file.stat().st_size <= MAX_BYTES
    ]


def prompts(
    encode: Encode,
    count: int,
    *,
    files: Sequence[Path],
    tokens: tuple[int, int],
    frame: tuple[str, str] = CHATML,
    seed: int = 0,
) -> Iterator[Prompt]:
    """Yield prompts that differ in place, share and length.

    Args:
        encode: the model's tokenizer, which adds no special tokens.
        count: number of prompts.
        files: texts, used in turn and repeatedly.
        tokens: minimum and maximum length, approximate.
        frame: text that the model's template puts before and after a user's message.
        seed: another seed gives other prompts of the same texts.
    """
    left = itertools.cycle(files)
    for number in range(count):
        rng = np.random.default_rng([number, seed])
        place = PLACES[number % len(PLACES)]
        share = (0.5, 0.8, 0.95)[number // len(PLACES) % 3]
        length = int(rng.integers(*tokens))
        yield _prompt(f"{number} {place} {share}", encode, left, rng, place, share, length, frame)


def _prompt(
    name: str,
    encode: Encode,
    files: Iterator[Path],
    rng: np.random.Generator,
    place: str,
    share: float,
    length: int,
    frame: tuple[str, str],
) -> Prompt:
    system = encode(frame[0])
    pieces = int(rng.integers(3, 6))
    room = length - len(system) - 60
    seen_tokens, fresh_tokens = int(room * share), int(room * (1 - share))
    texts = [passage(files, rng) for _ in range(pieces + 1)]
    sizes = [seen_tokens // pieces] * pieces + [fresh_tokens]
    order = rng.permutation(pieces + 1)
    all_tokens, chunks, before = list(system), [], []
    shown: list[list[str]] = []
    for at, which in enumerate(order):
        all_tokens += encode(f"Document {at + 1}:\n")
        part = encode(texts[which])[: max(16, sizes[which])]
        shown.append(texts[which][: 3 * len(part)].splitlines())
        if which < pieces:
            chunks.append((len(all_tokens), len(part)))
            before.append(seen_behind(place, encode, system, files, rng))
        all_tokens += part + encode("\n\n")
    asked = int(rng.integers(len(shown)))
    lines = [line.strip() for line in shown[asked] if len(line.strip()) > 20] or ["the first line"]
    words = QUESTIONS[int(rng.integers(len(QUESTIONS)))]
    question = words.format(n=asked + 1, line=lines[len(lines) // 2][:80])
    start = len(all_tokens)
    all_tokens += encode(f"{question}{frame[1]}")
    stand_in = tuple(encode(f"{STAND_IN}{frame[1]}"))
    return Prompt(name, all_tokens, chunks, before, start, place, share, stand_in)


def seen_behind(
    place: str, encode: Encode, system: list[int], files: Iterator[Path], rng: np.random.Generator
) -> list[int]:
    """Return the tokens before a document at the place where it was seen."""
    if place == ALONE:
        return []
    if place == AFTER_SYSTEM:
        return list(system)
    return list(system) + encode(passage(files, rng))[: int(rng.integers(200, 700))]


def passage(files: Iterator[Path], rng: np.random.Generator) -> str:
    """Return the next file's text, from a line in its first third on."""
    text = next(files).read_text("utf-8", errors="replace")
    start = int(rng.integers(0, max(1, len(text) // 3)))
    return text[text.find("\n", start) + 1 :]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
