"""The rules that are compared: each turns placed KV into corrected KV at a given budget.

A budget is a share of the (token of a chunk, layer) pairs. It includes all that a rule computes to
choose what to recompute: a peer's check layer counts as one layer over all tokens of chunks, our
probe as its rows in all layers. Every rule computes tokens outside of chunks, and they do not
count.

    V-L2, K-L2, K-L1    the tokens whose V or K changed most at layer 1, in all layers from there on
                        (CacheBlend arXiv 2405.16444; LMCache; UCM)
    EPIC                the first tokens of each chunk, in all layers (arXiv 2410.15332)
    article             drift of K and V at each layer among those that the layer before computed,
                        above a threshold, the share falling linearly to none (UCM's article)
    oracle              the tokens whose K and V really have the largest error, mean over layers
    ours                `headrace_prefill.blending.token_selection`; "question-free" probes with a
                        generic question
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_lab.blending.correct import Case, Corrected, corrected, with_depths
from headrace_lab.models.lm import LM
from headrace_prefill.blending.token_selection import SelectionRule

ARTICLE_THRESHOLD = 0.02
DRIFT = 0.3
"""Exponent of drift where it is added to our score."""

Int = NDArray[np.int64]


Correct = Callable[[LM, Case, float], Corrected | None]
"""None: the rule's own cost is above the budget."""


def nothing(lm: LM, case: Case, budget: float) -> Corrected:
    """Chunks stay as they were placed."""
    return with_depths(lm, case, offsets_depths(case, np.zeros(len(case.chunk)), lm.layers))


def epic(lm: LM, case: Case, budget: float) -> Corrected:
    order = np.argsort(case.offsets[case.chunk], kind="stable")
    return _whole(lm, case, order, budget)


def random(lm: LM, case: Case, budget: float) -> Corrected:
    order = np.random.default_rng(len(case.offsets)).permutation(len(case.chunk))
    return _whole(lm, case, order, budget)


def oracle(lm: LM, case: Case, budget: float) -> Corrected:
    wrong = np.zeros(len(case.chunk))
    at = torch.from_numpy(case.chunk)
    for layer in range(lm.layers):
        pairs = (
            (case.placed.keys, case.exact.kv.keys),
            (case.placed.values, case.exact.kv.values),
        )
        for placed, exact in pairs:
            wrong += _relative(exact[layer, at], placed[layer, at]).numpy()
    return _whole(lm, case, np.argsort(-wrong, kind="stable"), budget)


def check(which: str, power: int) -> Correct:
    """Rules with one check layer.

    Args:
        which: "K" or "V".
        power: of the norm: 1 or 2.
    """

    def correct(lm: LM, case: Case, budget: float) -> Corrected | None:
        tokens = len(case.chunk)
        count = int((budget * lm.layers - 1) / (lm.layers - 1) * tokens)
        if count <= 0:
            return None
        computed = [tokens] + [count] * (lm.layers - 1)
        outside = torch.from_numpy(case.offsets < 0)

        def keep(layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer != 1:
                return torch.ones_like(rows).bool()
            fresh, old = (k, case.placed.keys) if which == "K" else (v, case.placed.values)
            change = (fresh - old[1, rows]).abs().pow(power).sum((1, 2))
            change[outside[rows]] = torch.inf
            return _most(change, count + int(outside[rows].sum()))

        rows = torch.arange(len(case.offsets))
        kv = case.placed.clone()
        lm.compute(case.exact.tokens, kv, rows, keep)
        return Corrected(kv, computed)

    return correct


def article(lm: LM, case: Case, budget: float) -> Corrected | None:
    tokens, layers = len(case.chunk), lm.layers
    # Layer 0 shows no drift: it computes all. From there the share falls by the same each layer.
    most = (budget * layers - 1) / sum(1 - layer / layers for layer in range(1, layers))
    if most <= 0:
        return None
    computed = [tokens]
    outside = torch.from_numpy(case.offsets < 0)

    def keep(layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
        beside = outside[rows]
        if layer == 0:
            return torch.ones_like(rows).bool()
        drift = _correction(case, layer, rows, k, v)
        count = min(int(most * (1 - layer / layers) * tokens), int((~beside).sum()))
        drift[~beside & (drift < ARTICLE_THRESHOLD)] = -1.0
        drift[beside] = torch.inf
        kept = _most(drift, count + int(beside.sum())) & (drift >= 0)
        computed.append(int((kept & ~beside).sum()))
        return kept

    kv = case.placed.clone()
    lm.compute(case.exact.tokens, kv, torch.arange(len(case.offsets)), keep)
    return Corrected(kv, computed)


def ours(rule: SelectionRule = SelectionRule()) -> Correct:
    """Our rule with a probe."""
    return lambda lm, case, budget: corrected(lm, case, budget, rule)


def question_free(lm: LM, case: Case, budget: float) -> Corrected | None:
    """Our rule without the prompt's question, as for warming: another one stands in."""
    return corrected(lm, case, budget, stand_in=True)


def no_probe(lm: LM, case: Case, budget: float) -> Corrected:
    """Correct by the prior only, without a probe."""
    depths = SelectionRule().depths(case.offsets, None, lm.layers, budget)
    return with_depths(lm, case, depths, drifts=True)


def no_draft(lm: LM, case: Case, budget: float) -> Corrected | None:
    """Correct by our rule with a probe of the prompt's last tokens only, without a draft."""
    return corrected(lm, case, budget, drafts=0)


def drift_left(lm: LM, case: Case, budget: float) -> Corrected | None:
    """Correct by our rule, but leave tokens that are not computed as they were placed."""
    return corrected(lm, case, budget, drifts=False)


def with_drift(lm: LM, case: Case, budget: float) -> Corrected | None:
    """Our rule with drift as a third factor, taken where a layer has just computed K and V, and
    nothing for tokens that are not computed."""
    probed = case.probed(lm)
    left = budget - probed.rows / len(case.chunk)
    if left <= 0:
        return None
    rule, mass, tokens = SelectionRule(), probed.mass, len(case.chunk)
    counts = rule.counts(tokens, lm.layers, left)
    first = rule.depths(case.offsets, mass, lm.layers, left) > 0
    outside, computed = torch.from_numpy(case.offsets < 0), [int(counts[0])]

    def keep(layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer + 1 == lm.layers:
            return torch.ones_like(rows).bool()
        at, beside = rows.numpy(), outside[rows]
        score = torch.from_numpy(rule.scores(case.offsets[at], mass[:, at], layer + 1))
        score = score * _correction(case, layer, rows, k, v).clamp(min=1e-6) ** DRIFT
        score[beside] = torch.inf
        kept = _most(score, int(counts[layer + 1] + beside.sum()))
        computed.append(int((kept & ~beside).sum()))
        return kept

    kv = case.placed.clone()
    lm.compute(case.exact.tokens, kv, torch.from_numpy(np.flatnonzero(first)), keep)
    return Corrected(kv, [n + probed.rows for n in computed])


def bottom_right(case: Case) -> Callable[[Tensor], Tensor]:
    """The usual mask of r queries over n positions: query i sees n - r + i, too much for most."""
    n = len(case.offsets)
    return lambda rows: torch.arange(n - len(rows), n)


def wrong_mask(lm: LM, case: Case, budget: float) -> Corrected | None:
    return corrected(lm, case, budget, sees=bottom_right(case))


PEERS: dict[str, Correct] = {
    "V-L2": check("V", 2),
    "K-L2": check("K", 2),
    "K-L1": check("K", 1),
    "EPIC": epic,
}
OURS = "ours"
QUESTION_FREE = "question-free"
ABLATIONS: dict[str, Correct] = {
    "ours, no probe": no_probe,
    "ours, no draft": no_draft,
    "ours, no prior": ours(SelectionRule(prior=0.0)),
    "ours, drift left": drift_left,
    "ours, drift left, but a factor": with_drift,
    "ours, no decay": ours(SelectionRule(decay=np.inf)),
    "ours, bottom-right mask": wrong_mask,
}
BOUNDS: dict[str, Correct] = {"random": random, "oracle": oracle, "article": article}


def offsets_depths(case: Case, depths: NDArray[Any], layers: int) -> Int:
    """Depths [n] from those of the chunks' tokens; all layers outside."""
    all_depths = np.full(len(case.offsets), layers, np.int64)
    all_depths[case.chunk] = depths
    return all_depths


def _whole(lm: LM, case: Case, order: Int, budget: float) -> Corrected:
    """Tokens in this order of the chunks' tokens, each in all layers."""
    depths = np.zeros(len(case.chunk), np.int64)
    depths[order[: int(budget * len(order))]] = lm.layers
    return with_depths(lm, case, offsets_depths(case, depths, lm.layers))


def _correction(case: Case, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _relative(k, case.placed.keys[layer, rows]) + _relative(
        v, case.placed.values[layer, rows]
    )


def _relative(new: Tensor, old: Tensor) -> Tensor:
    """|new - old| / |new| of each token."""
    return (new - old).flatten(1).norm(dim=1) / new.flatten(1).norm(dim=1).clamp(min=1e-9)


def _most(score: Tensor, count: int) -> Tensor:
    """Bool: the highest so many."""
    kept = torch.zeros(len(score), dtype=torch.bool)
    kept[score.topk(min(count, len(score))).indices] = True
    return kept
