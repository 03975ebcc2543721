"""Prompts whose right answer is known, since it is in one of their documents.

    copying     the question begins a passage of a document; the answer is its continuation
    recall      a document lists codes of names; after a few, the answer is one of them
    arguments   a document lists where people live; after a few calls of a tool, the answer is an
                argument of the next one

Documents stand among passages of real texts, and each was seen elsewhere before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace_lab.texts.prompts import (
    CHATML,
    PLACES,
    Encode,
    Prompt,
    documents,
    passage,
    seen_behind,
)

TASKS = ("copying", "recall", "arguments")
LINES, SHOTS = 12, 4
FILLER_TOKENS = 500, 1000
FIRST = (
    *("Anna", "Peter", "Maria", "John", "Laura", "David", "Emma", "Paul", "Lisa", "Mark", "Sarah"),
    *("Tom", "Julia", "Robert", "Alice", "James", "Kate", "Henry", "Nina", "George"),
)
WORDS = (
    *("river", "lamp", "copper", "winter", "garden", "signal", "paper", "engine", "harbour"),
    *("window", "yellow", "market", "forest", "bridge", "silver", "morning", "letter", "island"),
)


def tasks(encode: Encode, count: int, *, held_out: bool) -> Iterator[tuple[str, Prompt]]:
    """So many prompts of each task, with its name."""
    files = iter(documents(held_out))
    for number in range(count):
        for which, name in enumerate(TASKS):
            rng = np.random.default_rng([number, which, held_out])
            place = PLACES[(number + which) % len(PLACES)]
            yield name, _prompt(name, number, encode, files, rng, place)


def _prompt(
    name: str,
    number: int,
    encode: Encode,
    files: Iterator[Path],
    rng: np.random.Generator,
    place: str,
) -> Prompt:
    document, asked, answer = {
        "copying": _copying,
        "recall": _recall,
        "arguments": _arguments,
    }[name](rng, passage(files, rng))
    system = encode(CHATML[0])
    sizes = rng.integers(*FILLER_TOKENS, 2)
    parts = [encode(document), *(encode(passage(files, rng))[:size] for size in sizes)]
    tokens, chunks, before = list(system), [], []
    for at, which in enumerate(rng.permutation(len(parts))):
        tokens += encode(f"Document {at + 1}:\n")
        chunks.append((len(tokens), len(parts[which])))
        before.append(seen_behind(place, encode, system, files, rng))
        tokens += parts[which] + encode("\n\n")
    question = len(tokens)
    tokens += encode(asked)
    label = f"{name} {number} {place}"
    known = tuple(encode(answer))
    return Prompt(label, tokens, chunks, before, question, place, 1.0, answer=known)


def _copying(rng: np.random.Generator, text: str) -> tuple[str, str, str]:
    words = text.split(" ")[:600]
    at = int(rng.integers(100, len(words) - 60))
    begun, rest = words[at : at + 30], words[at + 30 : at + 40]
    return " ".join(words), " ".join(begun), " " + " ".join(rest)


def _recall(rng: np.random.Generator, text: str) -> tuple[str, str, str]:
    names = rng.choice(FIRST, LINES, replace=False)
    codes = rng.integers(100, 999, LINES)
    lines = [f"The code of {name} is {code}." for name, code in zip(names, codes, strict=True)]
    order = rng.permutation(LINES)[:SHOTS]
    return "\n".join(lines), *_asked([lines[n] for n in order], len(str(codes[0])) + 1)


def _arguments(rng: np.random.Generator, text: str) -> tuple[str, str, str]:
    names = rng.choice(FIRST, LINES, replace=False)
    towns = rng.choice(WORDS, LINES, replace=False)
    lines = [f"{name} lives in {town} street." for name, town in zip(names, towns, strict=True)]
    calls = [
        f'call(name="{names[n]}", street="{towns[n]}")' for n in rng.permutation(LINES)[:SHOTS]
    ]
    return "\n".join(lines), *_asked(calls, len(calls[-1].rpartition('="')[2]))


def _asked(shots: list[str], behind: int) -> tuple[str, str]:
    """All shots, the last one cut so many characters before its end; and what it then lacks, less
    what closes it."""
    *shown, last = shots
    lacking = last[-behind:].rstrip('.")')
    return "\n".join([*shown, last[:-behind]]), lacking
