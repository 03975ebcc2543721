"""Long texts that sparse attention is measured on, of texts that installed packages bring.

    source, prose   files of one kind, one after another
    dialogue        turns that ask for what follows a line, and answers that quote it
    copy            passages; the end repeats one of them from its middle on
    needle          prose with facts at several depths; the end asks for them one by one

The last `TAIL_TOKENS` positions are measured. In the last two kinds some of their tokens are
answers: only what stands far before tells them. A package is for tuning or for measuring, as in
`headrace_lab.texts.prompts`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.quality.tasks import FIRST, WORDS
from headrace_lab.texts.prompts import Encode, documents, passage

KINDS = ("source", "prose", "dialogue", "copy", "needle")
TAIL_TOKENS = 64
FEWEST_TOKENS, MAX_TOKENS = 4500, 8192
PIECE_TOKENS = 1200
COPY_TOKENS, COPY_BEGUN_TOKENS = 160, 40
FACTS = 12
SOURCE = (".py", ".pyi")
Rng = np.random.Generator


@dataclass(frozen=True)
class Text:
    """One text.

    Attributes:
        name: number and kind.
        tokens: all of it.
        answers: positions of tokens that only an earlier part tells, in the tail.
    """

    name: str
    kind: str
    tokens: list[int]
    answers: list[int]


def text(number: int, encode: Encode, *, held_out: bool) -> Text:
    """Text `number`; every number has other files of its side of the split."""
    kind = KINDS[number % len(KINDS)]
    rng = np.random.default_rng([number, held_out, 11])
    length = int(rng.integers(FEWEST_TOKENS, MAX_TOKENS + 1))
    tokens, answers = MAKERS[kind](encode, files_of(kind, number, held_out), rng, length)
    return Text(f"{number} {kind}", kind, tokens, answers)


def files_of(kind: str, number: int, held_out: bool) -> Iterator[Path]:
    """Files for text `number` of a kind, over and over: sources for "source", all for "copy", else
    prose."""
    every = documents(held_out)
    source = [file for file in every if file.suffix in SOURCE]
    prose = [file for file in every if file.suffix not in SOURCE]
    files = {"source": source, "copy": every}.get(kind, prose)
    # A text takes at most a dozen files.
    return itertools.cycle(files[number * 12 % len(files) :] + files)


def facts(rng: Rng) -> list[tuple[str, str]]:
    """`FACTS` of them: what asks, and its answer."""
    names = rng.choice(FIRST, FACTS, replace=False)
    codes = rng.choice(np.arange(100, 1000), FACTS, replace=False)
    towns = rng.choice(WORDS, FACTS, replace=False)
    return [
        (f"The code of {name} is", f" {code}")
        if n % 2
        else (f"The street of {name} is named after the", f" {town}")
        for n, (name, code, town) in enumerate(zip(names, codes, towns, strict=True))
    ]


Made = tuple[list[int], list[int]]


def _pieces(encode: Encode, files: Iterator[Path], rng: Rng, length: int) -> list[list[int]]:
    """Pieces of files, so many tokens in all."""
    pieces: list[list[int]] = []
    while (left := length - sum(map(len, pieces))) > 0:
        pieces.append(encode(passage(files, rng))[: min(PIECE_TOKENS, left)])
    return pieces


def _plain(encode: Encode, files: Iterator[Path], rng: Rng, length: int) -> Made:
    return [token for piece in _pieces(encode, files, rng, length) for token in piece], []


def _dialogue(encode: Encode, files: Iterator[Path], rng: Rng, length: int) -> Made:
    tokens: list[int] = []
    shown: list[list[str]] = []
    while len(tokens) < length:
        lines = [line for line in passage(files, rng)[:3000].splitlines() if len(line) > 20]
        if len(lines) < 8:
            continue
        shown.append(lines)
        turn = "Here is a text.\n" + "\n".join(lines)
        for _ in range(3):
            asked = shown[int(rng.integers(len(shown)))]
            at = int(rng.integers(len(asked) - 4))
            turn += f'\nWhat follows "{asked[at].strip()}"?<|im_end|>\n<|im_start|>assistant\n'
            turn += "\n".join(asked[at + 1 : at + 4]) + "<|im_end|>\n<|im_start|>user\n"
        tokens += encode(f"<|im_start|>user\n{turn}" if not tokens else turn)
    return tokens[:length], []


def _copy(encode: Encode, files: Iterator[Path], rng: Rng, length: int) -> Made:
    pieces = _pieces(encode, files, rng, length - COPY_TOKENS)
    piece = pieces[int(rng.integers(len(pieces) - 1))]
    at = int(rng.integers(max(1, len(piece) - COPY_TOKENS)))
    again = piece[at : at + COPY_TOKENS]
    tokens = [token for one in pieces for token in one] + again
    # What stands before the tail's rows begins the copy.
    return tokens, list(range(len(tokens) - TAIL_TOKENS + 1, len(tokens)))


def _needle(encode: Encode, files: Iterator[Path], rng: Rng, length: int) -> Made:
    said = facts(rng)
    order = rng.permutation(FACTS)
    end: list[int] = []
    right: list[bool] = []
    for n in order:
        question, answer = (encode(part) for part in said[n])
        end += [*question, *answer, *encode(".\n")]
        right += [False] * len(question) + [True] * len(answer) + [False] * len(encode(".\n"))
    end, right = end[: TAIL_TOKENS + 24], right[: TAIL_TOKENS + 24]
    tokens: list[int] = []
    pieces = _pieces(encode, files, rng, length - len(end) - 16 * FACTS)
    body = [token for one in pieces for token in one]
    cuts = np.sort(rng.integers(200, len(body) - 200, FACTS)).tolist()
    for n, (first, last) in enumerate(itertools.pairwise([0, *cuts, len(body)])):
        tokens += body[first:last]
        if n < FACTS:
            tokens += encode("\n" + "".join(said[n]) + ".\n")
    begin = len(tokens) + len(encode("\n"))
    tokens += encode("\n") + end
    first = len(tokens) - TAIL_TOKENS
    return tokens, [begin + n for n, one in enumerate(right) if one and begin + n > first]


MAKERS: dict[str, Callable[[Encode, Iterator[Path], Rng, int], Made]] = {
    "source": _plain,
    "prose": _plain,
    "dialogue": _dialogue,
    "copy": _copy,
    "needle": _needle,
}
