"""Contexts whose KV is dropped in part, and the questions about them.

    source, prose, dialogue, copy   `benchmarks.sparse.texts`; the context ends where the measured
                                    part begins
    needle                          facts at even depths of a prose context; then all are asked for
    turns                           a first sentence, prose, five turns about other passages, and
                                    a question about the first sentence

A context is prefilled exactly. Then a rule that does not know the tail drops KV. The tail has the
questions and the right answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.quality.tasks import FIRST
from benchmarks.sparse import texts as sparse
from headrace_lab.texts.prompts import Encode, passage

KINDS = ("needle", "turns", "source", "prose", "dialogue", "copy")
FACTS, TURNS = sparse.FACTS, 5
FEWEST_COPY_TOKENS = sparse.PIECE_TOKENS + sparse.COPY_TOKENS + 1
END = "<|im_end|>\n"
USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
Rng = np.random.Generator


@dataclass(frozen=True)
class Case:
    """One context and its tail.

    Attributes:
        name: number and kind.
        tokens: context and tail.
        first: length of the context.
        judged: positions in the tail of tokens whose prediction is judged: of answers, or all.
        facts: of needles and first sentences: depth in [0, 1) -> positions of the answer's tokens.
    """

    name: str
    kind: str
    tokens: list[int]
    first: int
    judged: list[int]
    facts: dict[float, list[int]] = field(default_factory=dict)


def case(number: int, encode: Encode, tokens: int, *, held_out: bool) -> Case:
    """Context `number`, of about so many tokens; every number has other files of its side.

    Raises:
        ValueError: a context is too short for a passage and a part of its copy.
    """
    kind = KINDS[number % len(KINDS)]
    name = f"{number} {kind}"
    if kind == "copy" and tokens < FEWEST_COPY_TOKENS:
        raise ValueError(f"a copy takes {FEWEST_COPY_TOKENS} tokens or more, not {tokens}")
    rng = np.random.default_rng([number, held_out, 19])
    left = sparse.files_of(kind, number, held_out)
    if kind in MAKERS:
        return MAKERS[kind](name, encode, left, rng, tokens)
    made, _ = sparse.MAKERS[kind](encode, left, rng, tokens)
    first = len(made) - (sparse.COPY_TOKENS if kind == "copy" else sparse.TAIL_TOKENS)
    begun = sparse.COPY_BEGUN_TOKENS if kind == "copy" else 1
    return Case(name, kind, made, first, list(range(first + begun, len(made))))


class _Written:
    """Tokens written so far, and the positions of answers among them."""

    def __init__(self, encode: Encode) -> None:
        self.encode, self.tokens = encode, list[int]()

    def add(self, text: str) -> list[int]:
        begin = len(self.tokens)
        self.tokens += self.encode(text)
        return list(range(begin, len(self.tokens)))


def _needle(name: str, encode: Encode, files: Iterator[Path], rng: Rng, length: int) -> Case:
    said = sparse.facts(rng)
    body, _ = sparse.MAKERS["prose"](encode, files, rng, length)
    written = _Written(encode)
    cuts = [200 + n * (length - 400) // (FACTS - 1) for n in range(FACTS)]
    for (question, answer), (start, end) in zip(said, itertools.pairwise([0, *cuts]), strict=True):
        written.tokens += body[start:end]
        written.add(f"\n{question}{answer}.\n")
    written.tokens += body[cuts[-1] :]
    written.add("\n")
    first = len(written.tokens)
    facts = {}
    for n in rng.permutation(FACTS).tolist():
        question, answer = said[n]
        written.add(question)
        facts[cuts[n] / length] = written.add(answer)
        written.add(".\n")
    judged = [at for each in facts.values() for at in each]
    return Case(name, "needle", written.tokens, first, judged, facts)


def _turns(name: str, encode: Encode, files: Iterator[Path], rng: Rng, length: int) -> Case:
    who, code = rng.choice(FIRST), int(rng.integers(100, 1000))
    written = _Written(encode)
    written.add(f"{USER}My name is {who}, and the code of my locker is {code}. Here is a text.\n")
    text = passage(files, rng)
    while len(encode(text)) < length:
        text += "\n" + passage(files, rng)[:4000]
    lines = [line for line in text.splitlines() if len(line.strip()) > 20]
    while len(encode("\n".join(lines))) > length:
        lines = lines[: -max(1, len(lines) // 50)]
    written.add("\n".join(lines) + END)
    first, judged = len(written.tokens), list[int]()
    for n in range(TURNS):
        at = int(rng.integers(len(lines) * n // TURNS, len(lines) * (n + 1) // TURNS - 1))
        begin = USER if n else ASSISTANT + "I have read it." + END + USER
        written.add(f'{begin}What follows "{lines[at].strip()[:100]}"?{END}{ASSISTANT}')
        judged += written.add(lines[at + 1].strip()[:200])
        written.add(END)
    written.add(f"{USER}What is the code of my locker?{END}{ASSISTANT}The code of your locker is")
    answer = written.add(f" {code}")
    return Case(name, "turns", written.tokens, first, judged + answer, {0.0: answer})


MAKERS = {"needle": _needle, "turns": _turns}
