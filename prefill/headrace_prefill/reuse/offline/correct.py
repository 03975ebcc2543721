"""Places KV for a prompt's chunks as an engine does, probes, and computes chosen rows again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_prefill.reuse.offline.exact import Exact
from headrace_prefill.reuse.offline.lm import KV, LM
from headrace_prefill.reuse.offline.prompts import Prompt
from headrace_prefill.reuse.rules import HEAD_TOKENS, Rule, offsets_of

Int = NDArray[np.int64]
Sees = Callable[[Tensor], Tensor]
"""Rows -> the last position that each attends to."""


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


def corrected(
    lm: LM, case: Case, budget: float, rule: Rule = Rule(), sees: Sees | None = None
) -> Corrected | None:
    """Correct by a rule and a probe, which the budget pays for.

    Args:
        budget: share of (token of a chunk, layer) pairs.

    Returns:
        None where the probe alone costs more.
    """
    left = budget - len(case.probe_rows) / len(case.chunk)
    if left <= 0:
        return None
    depths = rule.depths(case.offsets, case.mass(lm), lm.layers, left)
    done = with_depths(lm, case, depths, sees)
    return replace(done, by_layer=[n + len(case.probe_rows) for n in done.by_layer])


def with_depths(
    lm: LM,
    case: Case,
    depths: Int,
    sees: Sees | None = None,
    start: KV | None = None,
) -> Corrected:
    """Compute each position in so many leading layers.

    Args:
        depths: int64 [n].
        start: KV to begin with; None for the placed one.
    """
    kv, going = (start or case.placed).clone(), torch.from_numpy(depths)
    rows = torch.from_numpy(np.flatnonzero(depths))
    # K and V of a row's last layer need no attention; nor does the prompt's last token.
    lm.compute(
        case.exact.tokens, kv, rows, lambda layer, at, k, v: going[at] > layer + 1, sees=sees
    )
    chunk = depths[case.chunk]
    return Corrected(kv, [int((chunk > layer).sum()) for layer in range(lm.layers)])
