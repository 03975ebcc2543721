"""The rules that are compared, and what each is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.sparse.attention import Budget, Layer, Mass, Score, Share
from headrace_decode.sparse.reference import Form
from headrace_decode.sparse.rivals import EXTRA, ORACLE, RIVALS, Rival
from headrace_decode.sparse.scoring import score
from headrace_decode.sparse.summaries import Summaries

OURS, BEST = "ours", "oracle"
SHARE = 0.1
UNIT_TOKENS = 16
SHARES = 0.05, 0.2, 0.3


@dataclass(frozen=True)
class Arm:
    """One rule with a budget.

    Attributes:
        bytes_vs_k: of what it keeps, over those of 16-bit keys.
    """

    name: str
    score: Score
    budget: Budget
    unit_tokens: int = UNIT_TOKENS
    bytes_vs_k: float = 0.0


def ours(layer: Layer) -> Tensor:
    """As an engine calls it."""
    heads, units, tokens, dim = layer.keys.shape
    summaries = Summaries(units, heads, tokens, dim)
    summaries.put(np.arange(units), layer.keys.transpose(0, 1))
    found = torch.zeros(heads, len(layer.rows), units)
    for row, count in enumerate(layer.counts.tolist()):
        queries = layer.queries[:, row].contiguous().numpy()
        scores = score(summaries, np.arange(count - 1), queries, 1.0)
        found[:, row, : count - 1] = torch.from_numpy(scores)
    return found


def rival(rule: Rival) -> Score:
    return lambda layer: layer.combined(
        rule.logits(layer.keys, layer.queries.flatten(1, 2)), rule.softmax
    )


def of_form(form: Form) -> Score:
    return lambda layer: layer.combined(
        form.logits(form.summary(layer.keys), layer.queries.flatten(1, 2))
    )


def arms(which: str) -> Iterator[Arm]:
    """What is measured of each text; "main" leaves the ablations out."""
    share = Share(SHARE)
    yield Arm(OURS, ours, share, bytes_vs_k=Summaries(1, 1, UNIT_TOKENS, 64).layout.bytes_vs_k)
    yield Arm(BEST, rival(ORACLE), share, bytes_vs_k=1.0)
    for name, one in (RIVALS | EXTRA).items():
        yield Arm(name, rival(one), share, bytes_vs_k=one.bytes_vs_k)
    if which == "main":
        return
    for name, form in FORMS.items():
        whole = 2 * UNIT_TOKENS * 64
        yield Arm(name, of_form(form), share, bytes_vs_k=form.nbytes(UNIT_TOKENS, 64) / whole)
    for other in SHARES:
        for name, score_ in ((OURS, ours), (BEST, rival(ORACLE)), ("mean", rival(RIVALS["mean"]))):
            yield Arm(f"{name}, {other:.0%}", score_, Share(other))
    for name, budget in BUDGETS.items():
        yield Arm(f"{OURS}, {name}", ours, budget)
    for name, score_ in ((OURS, ours), (BEST, rival(ORACLE)), ("mean", rival(RIVALS["mean"]))):
        yield Arm(f"{name}, units of 32", score_, share, 32)


FORMS = {
    "rank 1": Form(rank=1),
    "rank 2": Form(rank=2),
    "rank 4": Form(),
    "rank 6": Form(rank=6),
    "rank 4, 8 bits": Form(bits=8),
    "rank 4, fp32": Form(bits=None),
    "rank 4, max": Form(largest=True),
    "rank 3, 1 key kept by distance": Form(rank=3, kept=1),
    "rank 3, 1 key kept by norm": Form(rank=3, kept=1, by_norm=True),
    "rank 0, 2 keys kept by norm": Form(rank=0, kept=2, by_norm=True),
}
BUDGETS = {
    "mass 0.9": Mass(0.9),
    "mass 0.95, 5 to 30 %": Mass(0.95, 0.05, 0.3),
}
"""Targets that choose about as much as a share of 10 % does, on texts for tuning."""
