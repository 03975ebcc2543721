"""All arms on one prompt, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from benchmarks.plain import model
from benchmarks.quality.arms import ARMS, Arm, exact
from benchmarks.quality.tasks import tasks
from headrace_lab.blending.correct import Case
from headrace_lab.models.exact import Exact, score
from headrace_lab.models.lm import KV, LM
from headrace_lab.texts.prompts import Prompt, documents, prompts

ANSWER_TOKENS = 48
TEXT_TOKENS = 1500, 2500


def measured(
    folder: str, name: str, sizes: tuple[int, int], techniques: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows of one prompt.

    Args:
        name: "text" or "task", and its number.
        sizes: how many prompts of documents there are, and of each task.
    """
    lm, encode = model(folder)
    kind, number = name.split()
    every: Iterator[Prompt]
    if kind == "text":
        files = documents(True)
        every = prompts(encode, sizes[0], files=files, tokens=TEXT_TOKENS, seed=7)
    else:
        every = (prompt for _, prompt in tasks(encode, sizes[1], held_out=True))
    prompt = next(islice(every, int(number), None))
    case = Case.of(lm, prompt, Exact.of(lm, prompt.tokens, len(prompt.answer) or ANSWER_TOKENS))
    rows = []
    for arm, make, budget in _plan(techniques):
        kv = make(lm, case, budget)
        if kv is None:
            continue
        row = {"prompt": f"{kind} {prompt.name}", "arm": arm, "budget": budget}
        row |= asdict(score(lm, case.exact, kv))
        if prompt.answer:
            row["task"] = right(lm, case, kv)
        rows.append(row)
    return rows


def right(lm: LM, case: Case, kv: KV) -> float:
    """Return the share of the known answer's tokens that greedy decoding over this KV predicts."""
    wanted = case.prompt.answer
    said = lm.greedy(case.exact.tokens, kv, len(wanted))[len(case.exact.tokens) :].tolist()
    return sum(a == b for a, b in zip(said, wanted, strict=True)) / len(wanted)


def _plan(techniques: Sequence[str]) -> Iterator[tuple[str, Arm, float]]:
    yield "exact", exact, 1.0
    for technique in techniques:
        for name, (arm, budgets) in ARMS[technique].items():
            for budget in budgets:
                yield name, arm, budget
