"""Rules on one prompt, in a process of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict

from benchmarks.blending import arms
from benchmarks.blending.figures import BUDGETS, MAIN, OUR_BUDGETS, Row
from benchmarks.plain import model

TOKENS = 2000, 6000
GROUPS = "peers", "ours", "ablations", "all"


def plan(groups: Collection[str]) -> Iterator[tuple[str, arms.Correct, float]]:
    """Yield the measurements for each prompt: (arm, rule, budget)."""
    if {"peers", "all"} & set(groups):
        yield "nothing", arms.nothing, 0.0
        for name, rule in arms.PEERS.items():
            for budget in BUDGETS:
                yield name, rule, budget
    if {"ours", "all"} & set(groups):
        for budget in OUR_BUDGETS:
            yield arms.OURS, arms.ours(), budget
        for budget in BUDGETS:
            yield arms.QUESTION_FREE, arms.question_free, budget
    if {"ablations", "all"} & set(groups):
        for name, rule in (arms.BOUNDS | arms.ABLATIONS).items():
            yield name, rule, MAIN


def done(rows: Collection[Row]) -> set[tuple[str, float]]:
    """(arm, budget) of a prompt's rows."""
    return {(row["arm"], row["budget"]) for row in rows}


def measured(
    folder: str,
    number: int,
    count: int,
    held_out: bool,
    groups: Collection[str],
    answer: int,
    but: Collection[tuple[str, float]],
) -> list[Row]:
    """These groups of arms on one prompt, but for what is done."""
    from headrace_lab.models.exact import Exact, score
    from headrace_lab.texts.prompts import documents, prompts

    lm, encode = model(folder)
    every = prompts(encode, count, files=documents(held_out), tokens=TOKENS, seed=int(held_out))
    prompt = next(each for n, each in enumerate(every) if n == number)
    case = arms.Case.of(lm, prompt, Exact.of(lm, prompt.tokens, answer))
    rows = []
    for arm, rule, budget in plan(groups):
        if (arm, budget) in but:
            continue
        corrected = rule(lm, case, budget)
        if corrected is None:
            continue
        rows.append(
            {
                "prompt": prompt.name,
                "tokens": len(prompt.tokens),
                "reused": len(case.chunk),
                "place": prompt.place,
                "share": prompt.share,
                "arm": arm,
                "budget": budget,
                "computed": sum(corrected.by_layer) / lm.layers / len(case.chunk),
                "by_layer": [round(n / len(case.chunk), 4) for n in corrected.by_layer],
                **asdict(score(lm, case.exact, corrected.kv)),
            }
        )
    return rows
