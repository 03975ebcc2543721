"""All arms of ours on one context, in a process of its own."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.longcontext.arms import (
    ARMS,
    BOTH,
    LEFT,
    MAIN_SHARE,
    OURS,
    PAGE_TOKENS,
    SHARES,
    Arm,
    has_predictor,
)
from benchmarks.longcontext.context import Context, computed
from benchmarks.longcontext.held import Held
from benchmarks.longcontext.judge import Row, judge, judged_rows
from benchmarks.longcontext.peers import pressed
from benchmarks.longcontext.streaming import ByEntropy, Streaming, WithPredictor
from benchmarks.longcontext.texts import Case, case
from benchmarks.plain import model
from headrace_decode.attention.calibration_file import ModelShape
from headrace_decode.compression.engine.calibration import read_predictor
from headrace_decode.compression.importance_predictor import ImportancePredictor
from headrace_lab.models.lm import LM

STREAMING: dict[str, Streaming | ByEntropy] = {
    "streamed in four blocks": Streaming(4),
    "streamed in four blocks, values as they were": Streaming(4, LEFT),
    "streamed in four blocks by entropy, two layers whole": ByEntropy(4),
}
STREAMED = {
    "streamed with a predictor": (),
    "streamed with a predictor, in two turns": (0.8,),
}
"""And the shares of the context that earlier prompts had."""


def peers(folder: str, number: int, tokens: int, held_out: bool) -> list[Row]:
    """kvpress on context `number`."""
    _, encode = model(folder)
    return pressed(folder, case(number, encode, tokens, held_out=held_out), SHARES)


def ours(
    folder: str,
    number: int,
    tokens: int,
    held_out: bool,
    ablated: bool,
    predictor: Path | None = None,
) -> list[Row]:
    """Our arms on context `number`, a row of each; with a predictor's file more."""
    lm, encode = model(folder)
    begun = time.monotonic()
    found = computed(lm, case(number, encode, tokens, held_out=held_out))
    print(f"  {found.case.name}: computed after {time.monotonic() - begun:.0f} s", flush=True)
    rows = []
    for arm, share in plan(ablated, () if predictor is None else predictor_arms(folder, predictor)):
        rows.append(measured(lm, found, arm, share))
        print(
            f"  {found.case.name}: {arm.name} at {share}: KL {rows[-1]['kl']:.4f} "
            f"after {time.monotonic() - begun:.0f} s",
            flush=True,
        )
    for name, one in STREAMING.items():
        if one == Streaming(4, LEFT) and not ablated:
            continue
        rows += streamed(lm, found, name, one, MAIN_SHARE)
    if predictor is not None:
        of_model = predictor_of(folder, predictor)
        for (name, turns), share in itertools.product(STREAMED.items(), SHARES):
            rows += streamed(lm, found, name, WithPredictor(of_model, turns), share)
    return rows


def streamed(
    lm: LM, context: Context, name: str, one: Streaming | ByEntropy | WithPredictor, share: float
) -> list[Row]:
    """A row, with the most that was ever held, as a share of the context's KV; none where the
    context is too short."""
    case = context.case
    pairs = lm.layers * lm.kv_heads * case.first
    found = one.held(lm, torch.tensor(case.tokens[: case.first]), int(share * pairs))
    if found is None:
        return []
    row = judged(lm, case, name, share, found[0], context.exact) | {"most_held": found[1] / pairs}
    print(f"  {case.name}: {name} at {share}: KL {row['kl']:.4f}", flush=True)
    return [row]


def predictor_of(folder: str, file: Path) -> ImportancePredictor:
    """Return the predictor in a file, for the model in a folder."""
    shape = ModelShape.of(json.loads((Path(folder) / "config.json").read_text("utf-8")))
    return read_predictor(file, shape, PAGE_TOKENS)


def predictor_arms(folder: str, predictor: Path) -> tuple[Arm, Arm]:
    """Return the arm of an engine with this file, and the same arm without its fits."""
    scores, name = has_predictor(predictor_of(folder, predictor)), f"{OURS}, with a predictor"
    fits = Arm(name, scores, BOTH, queries="last", page_tokens=PAGE_TOKENS, main=True)
    return fits, replace(fits, name=f"{name}, keys and values as they were", ridges=LEFT)


def plan(ablated: bool, more: Sequence[Arm] = ()) -> Iterator[tuple[Arm, float]]:
    for arm in (*ARMS, *more):
        for share in SHARES:
            if arm.main or (ablated and share == MAIN_SHARE):
                yield arm, share


def measured(lm: LM, context: Context, arm: Arm, share: float) -> Row:
    held = arm.held(lm, context, share)
    row = judged(lm, context.case, arm.name, share, held, context.exact)
    return row | {"kept": row["kept"] * arm.bytes_of_pair(lm)}


def judged(lm: LM, one: Case, name: str, share: float, held: Held, exact: torch.Tensor) -> Row:
    """The tail over what is held."""
    logp = held.follow(lm, torch.tensor(one.tokens), one.first)[judged_rows(one)]
    kept = held.pairs / (lm.layers * lm.kv_heads * one.first)
    return judge(one, name, share, kept, exact, logp)
