"""Non-prefix reuse as in an engine: placed KV of a prompt's chunks, a probe, and computed rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_lab.models.exact import Exact
from headrace_lab.models.lm import KV, LM
from headrace_lab.texts.prompts import Prompt
from headrace_prefill.blending.kv_correction import KvCorrection
from headrace_prefill.blending.token_selection import (
    DRAFT_TOKENS,
    LAST_TOKENS,
    SelectionRule,
    offsets_of,
)

Int = NDArray[np.int64]
Sees = Callable[[Tensor], Tensor]
"""Rows -> the last position that each attends to."""


@dataclass(frozen=True)
class Probed:
    """Result of a probe.

    Attributes:
        mass: float32 [layers, n], mean attention of the prompt's last tokens and the draft to the
            positions before the question that have KV then: the text before the first chunk, and
            the chunks.
        rows: number of rows that the probe computed in all layers.
    """

    mass: NDArray[np.float32]
    rows: int


@dataclass
class Case:
    """A prompt with KV placed for its chunks, zero elsewhere."""

    prompt: Prompt
    exact: Exact
    placed: KV
    offsets: Int
    _probed: dict[tuple[bool, int], Probed] = field(default_factory=dict)

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

    def probed(self, lm: LM, stand_in: bool = False, drafts: int = DRAFT_TOKENS) -> Probed:
        """Probe with the prompt's question, or with a generic one if `stand_in`, and with a draft
        of `drafts` tokens."""
        if (stand_in, drafts) not in self._probed:
            asks, question = self.exact.tokens, self.prompt.question
            if stand_in:
                asks = torch.cat([asks[:question], torch.tensor(self.prompt.stand_in)])
            n, lead = len(asks), self.prompt.chunks[0][0]
            asks = torch.cat([asks, torch.zeros(drafts, dtype=torch.int64)])
            rows = torch.arange(max(question, n - LAST_TOKENS), n)
            kv, there = lm.empty(len(asks)), torch.ones(len(asks), dtype=torch.bool)
            there[lead:question] = torch.from_numpy(self.offsets[lead:question] >= 0)
            there[question : rows[0]] = False
            for into, placed, exact in (
                (kv.keys, self.placed.keys, self.exact.kv.keys),
                (kv.values, self.placed.values, self.exact.kv.values),
            ):
                into[:, lead:question] = placed[:, lead:question]
                into[:, :lead] = exact[:, :lead]
            found = np.zeros((lm.layers, len(self.offsets)), np.float32)
            count = len(rows) + drafts

            def watch(layer: int, rows: Tensor, q: Tensor) -> None:
                mass = lm.mass(q, rows, kv.keys[layer], there) * (len(rows) / count)
                found[layer, :question] += mass[:question].numpy()

            for at in range(n, len(asks)):
                logits = lm.compute(asks, kv, rows, watch=watch, there=there)
                asks[at], rows = logits[-1].argmax(), torch.tensor([at])
            lm.compute(asks, kv, rows, watch=watch, there=there)
            self._probed[stand_in, drafts] = Probed(found, count)
        return self._probed[stand_in, drafts]


@dataclass(frozen=True)
class Corrected:
    """Corrected KV, and the number of rows that each layer computed for it."""

    kv: KV
    by_layer: list[int]


def corrected(
    lm: LM,
    case: Case,
    budget: float,
    rule: SelectionRule = SelectionRule(),
    *,
    stand_in: bool = False,
    drafts: int = DRAFT_TOKENS,
    sees: Sees | None = None,
    drifts: bool = True,
) -> Corrected | None:
    """Correct a prompt's placed KV by a rule and a probe; the budget covers both.

    Args:
        budget: share of (token of a chunk, layer) pairs that are computed.
        stand_in: whether to probe with a generic question instead of the prompt's.
        drafts: tokens of the probe's draft.
        drifts: as in `with_depths`.

    Returns:
        The corrected KV; None if the probe alone exceeds the budget.
    """
    probed = case.probed(lm, stand_in, drafts)
    left = budget - probed.rows / len(case.chunk)
    if left <= 0:
        return None
    depths = rule.depths(case.offsets, probed.mass, lm.layers, left)
    done = with_depths(lm, case, depths, sees, drifts)
    return replace(done, by_layer=[n + probed.rows for n in done.by_layer])


def with_depths(
    lm: LM,
    case: Case,
    depths: Int,
    sees: Sees | None = None,
    drifts: bool = False,
) -> Corrected:
    """Compute each position in its number of leading layers.

    Args:
        depths: int64 [n], number of leading layers for each position.
        drifts: whether the drift that computed tokens show is added to the others.
    """
    kv, going = case.placed.clone(), torch.from_numpy(depths)
    rows = torch.from_numpy(np.flatnonzero(depths))
    chunks = case.prompt.chunks if drifts else []
    runs = [_Run(lm, case.placed, kv, going, *chunk) for chunk in chunks]

    def keep(layer: int, at: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for run in runs:
            run.update(layer, at, k, v)
        # Neither a row's last layer nor the prompt's last token needs attention, only K and V.
        return going[at] > layer + 1

    lm.compute(case.exact.tokens, kv, rows, keep, sees=sees)
    chunk = depths[case.chunk]
    return Corrected(kv, [int((chunk > layer).sum()) for layer in range(lm.layers)])


class _Run:
    """A chunk, to whose tokens the drift of its computed tokens is added."""

    def __init__(
        self, lm: LM, placed: KV, into: KV, depths: Tensor, first: int, length: int
    ) -> None:
        self._placed, self._into = placed, into
        self._positions = torch.arange(first, first + length)
        mine = depths[self._positions]
        self._correction = KvCorrection(lm.rope, lm.layers, lm.kv_heads, lm.dim, first, mine)

    def update(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Correct the chunk by rows that a layer has computed and not yet written."""
        mine = torch.isin(rows, self._positions)
        if not layer or not mine.any():
            return
        at = rows[mine]
        by_key = keys[mine] - self._placed.keys[layer, at]
        by_value = values[mine] - self._placed.values[layer, at]
        more = self._correction.update(layer, at - self._positions[0], by_key, by_value)
        self._into.keys[layer, self._positions] += more[0]
        self._into.values[layer, self._positions] += more[1]
