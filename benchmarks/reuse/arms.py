"""The rules that are compared: each turns placed KV into corrected KV at a given budget.

A budget is a share of the (token of a chunk, layer) pairs, and all that a rule computes to learn
what to recompute counts: a peer's check layer as one layer over all tokens of chunks, our probe as
its rows in all layers. Tokens outside of chunks are computed by every rule, and counted by none.

    V-L2, K-L2, K-L1    the tokens whose V or K changed most at layer 1, in all layers from there on
                        (CacheBlend arXiv 2405.16444; LMCache; UCM)
    EPIC                the first tokens of each chunk, in all layers (arXiv 2410.15332)
    article             drift of K and V at each layer among those that the layer before computed,
                        above a threshold, the share falling linearly to none (UCM's article)
    oracle              the tokens whose K and V are truly most wrong, meaned over layers
    ours                `headrace_prefill.reuse.rules`; "question-free" is the same without a probe
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.quality.case import Exact
from benchmarks.quality.lm import KV, LM
from benchmarks.quality.prompts import Prompt
from headrace_prefill.reuse.rules import HEAD_TOKENS, Rule, offsets_of

ARTICLE_THRESHOLD = 0.02
DRIFT = 0.3
"""Exponent of drift where it is added to our score."""

Int = NDArray[np.int64]


@dataclass
class Case:
    """A prompt with KV placed for its chunks, zero elsewhere."""

    prompt: Prompt
    exact: Exact
    placed: KV
    offsets: Int
    _probed: tuple[NDArray[np.float32], KV] | None = None

    @staticmethod
    def of(lm: LM, prompt: Prompt, exact: Exact) -> Case:
        placed = lm.empty(len(prompt.tokens))
        for (first, length), before in zip(prompt.chunks, prompt.before, strict=True):
            chunk = prompt.tokens[first : first + length]
            seen = lm.prefill(torch.tensor(before + chunk)).part(len(before), length)
            for layer in range(lm.layers):
                moved = lm.rope.shift(seen.keys[layer], first - len(before))
                placed.keys[layer, first : first + length] = moved
                placed.values[layer, first : first + length] = seen.values[layer]
        return Case(prompt, exact, placed, offsets_of(len(prompt.tokens), prompt.chunks))

    @property
    def chunk(self) -> Int:
        """Positions of the chunks' tokens."""
        return np.flatnonzero(self.offsets >= 0)

    @property
    def heads(self) -> Int:
        """First tokens of each chunk, which the probe computes afresh."""
        return np.flatnonzero((self.offsets >= 0) & (self.offsets < HEAD_TOKENS))

    @property
    def probe_rows(self) -> Int:
        return np.concatenate([self.heads, np.arange(self.prompt.question, len(self.offsets))])

    def probed(self, lm: LM) -> tuple[NDArray[np.float32], KV]:
        """The question's attention, float32 [layers, n], and the KV as the probe leaves it."""
        if self._probed is None:
            kv, found = self.placed.clone(), np.zeros((lm.layers, len(self.offsets)), np.float32)

            def watch(layer: int, rows: Tensor, q: Tensor) -> None:
                asked = rows >= self.prompt.question
                found[layer] = lm.mass(q[asked], rows[asked], kv.keys[layer]).numpy()

            lm.compute(self.exact.tokens, kv, torch.from_numpy(self.probe_rows), watch=watch)
            self._probed = found, kv
        return self._probed

    def mass(self, lm: LM) -> NDArray[np.float32]:
        return self.probed(lm)[0]


@dataclass(frozen=True)
class Corrected:
    """Corrected KV, and how many pairs of each layer were computed for it."""

    kv: KV
    by_layer: list[int]


Correct = Callable[[LM, Case, float], Corrected | None]
"""None: the rule's own cost is above the budget."""


def nothing(lm: LM, case: Case, budget: float) -> Corrected:
    """Chunks stay as they were placed."""
    return _with_depths(lm, case, offsets_depths(case, np.zeros(len(case.chunk)), lm.layers))


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
        drift = _drift(case, layer, rows, k, v)
        count = min(int(most * (1 - layer / layers) * tokens), int((~beside).sum()))
        drift[~beside & (drift < ARTICLE_THRESHOLD)] = -1.0
        drift[beside] = torch.inf
        kept = _most(drift, count + int(beside.sum())) & (drift >= 0)
        computed.append(int((kept & ~beside).sum()))
        return kept

    kv = case.placed.clone()
    lm.compute(case.exact.tokens, kv, torch.arange(len(case.offsets)), keep)
    return Corrected(kv, computed)


def ours(rule: Rule = Rule(), **how: Any) -> Correct:
    """Our rule with a probe, which the budget pays for."""

    def correct(lm: LM, case: Case, budget: float) -> Corrected | None:
        left = budget - len(case.probe_rows) / len(case.chunk)
        if left <= 0:
            return None
        depths = rule.depths(case.offsets, case.mass(lm), lm.layers, left)
        done = _with_depths(lm, case, depths, **how)
        return replace(done, by_layer=[n + len(case.probe_rows) for n in done.by_layer])

    return correct


def heads_once(rule: Rule = Rule()) -> Correct:
    """Our rule; the chunks' first tokens stay as the probe computed them."""

    def correct(lm: LM, case: Case, budget: float) -> Corrected | None:
        left = budget - len(case.probe_rows) / len(case.chunk)
        if left <= 0:
            return None
        mass, kv = case.probed(lm)
        offsets = case.offsets.copy()
        offsets[case.heads] = -1
        share = left * len(case.chunk) / (len(case.chunk) - len(case.heads))
        depths = rule.depths(offsets, mass, lm.layers, share)
        depths[case.heads] = 0
        done = _with_depths(lm, case, depths, start=kv)
        return replace(done, by_layer=[n + len(case.probe_rows) for n in done.by_layer])

    return correct


def question_free(rule: Rule = Rule()) -> Correct:
    """Our rule without a question, as for warming."""

    def correct(lm: LM, case: Case, budget: float) -> Corrected:
        depths = rule.depths(case.offsets, None, lm.layers, budget)
        return _with_depths(lm, case, depths)

    return correct


def with_drift(lm: LM, case: Case, budget: float) -> Corrected | None:
    """Our rule with drift as a third factor, taken where a layer has just computed K and V."""
    left = budget - len(case.probe_rows) / len(case.chunk)
    if left <= 0:
        return None
    rule, mass, tokens = Rule(), case.mass(lm), len(case.chunk)
    counts = rule.counts(tokens, lm.layers, left)
    first = rule.depths(case.offsets, mass, lm.layers, left) > 0
    outside, computed = torch.from_numpy(case.offsets < 0), [int(counts[0])]

    def keep(layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer + 1 == lm.layers:
            return torch.ones_like(rows).bool()
        at, beside = rows.numpy(), outside[rows]
        score = torch.from_numpy(rule.scores(case.offsets[at], mass[:, at], layer + 1))
        score = score * _drift(case, layer, rows, k, v).clamp(min=1e-6) ** DRIFT
        score[beside] = torch.inf
        kept = _most(score, int(counts[layer + 1] + beside.sum()))
        computed.append(int((kept & ~beside).sum()))
        return kept

    kv = case.placed.clone()
    lm.compute(case.exact.tokens, kv, torch.from_numpy(np.flatnonzero(first)), keep)
    return Corrected(kv, [n + len(case.probe_rows) for n in computed])


def bottom_right(case: Case) -> Callable[[Tensor], Tensor]:
    """The usual mask of r queries over n positions: query i sees n - r + i, too much for most."""
    n = len(case.offsets)
    return lambda rows: torch.arange(n - len(rows), n)


def wrong_mask(lm: LM, case: Case, budget: float) -> Corrected | None:
    return ours(sees=bottom_right(case))(lm, case, budget)


PEERS: dict[str, Correct] = {
    "V-L2": check("V", 2),
    "K-L2": check("K", 2),
    "K-L1": check("K", 1),
    "EPIC": epic,
}
OURS = "ours"
QUESTION_FREE = "question-free"
ABLATIONS: dict[str, Correct] = {
    "ours, heads once": heads_once(),
    "ours, no prior": ours(Rule(prior=0.0)),
    "ours, with drift": with_drift,
    "ours, no decay": ours(Rule(decay=np.inf)),
    "ours, no sink": ours(Rule(head_tokens=0)),
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
    return _with_depths(lm, case, offsets_depths(case, depths, lm.layers))


def _with_depths(
    lm: LM,
    case: Case,
    depths: Int,
    sees: Callable[[Tensor], Tensor] | None = None,
    start: KV | None = None,
) -> Corrected:
    kv, going = (start or case.placed).clone(), torch.from_numpy(depths)
    rows = torch.from_numpy(np.flatnonzero(depths))
    # K and V of a row's last layer need no attention; nor does the prompt's last token.
    lm.compute(
        case.exact.tokens, kv, rows, lambda layer, at, k, v: going[at] > layer + 1, sees=sees
    )
    chunk = depths[case.chunk]
    return Corrected(kv, [int((chunk > layer).sum()) for layer in range(lm.layers)])


def _drift(case: Case, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> Tensor:
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
