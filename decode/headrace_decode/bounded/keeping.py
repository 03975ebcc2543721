"""Decides which (layer, KV head, token) pairs of a context stay, given a score for each.

Pairs of all layers and heads compete for one budget: a head that looks something up in many places
keeps many tokens, one that looks at the first token keeps little more than that. In one budget for
each head the same scores lose most of what they know.

Some pairs stay whatever their score: the first tokens, where heads without anything to say put
their attention, and the newest, which the next words continue.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Always:
    """What stays whatever its score.

    Attributes:
        sinks: first tokens.
        newest: last tokens.
        whole_layers: first layers that keep all tokens.
    """

    sinks: int = 4
    newest: int = 16
    whole_layers: int = 0

    def __post_init__(self) -> None:
        if min(self.sinks, self.newest, self.whole_layers) < 0:
            raise ValueError(f"counts are 0 or more: {self}")

    def pairs(self, scores: Tensor) -> Tensor:
        """bool [layers, heads, tokens]."""
        layers, _, tokens = scores.shape
        at = torch.arange(tokens)
        ends = (at < self.sinks) | (at >= tokens - self.newest)
        found = ends.expand(scores.shape).clone()
        found[: min(self.whole_layers, layers)] = True
        return found


def keep(
    scores: Tensor, total: int, always: Always | None = None, budgets: Tensor | None = None
) -> Tensor:
    """The pairs that stay: `total` of them, or all there are.

    Args:
        scores: float [layers, heads, tokens], 0 or more; higher is kept first.
        total: of pairs, over all layers and heads.
        always: what stays whatever its score; None for the defaults.
        budgets: int64 [layers, heads], pairs of each, in place of one budget for all. They add up
            to `total` at most.

    Returns:
        bool [layers, heads, tokens].

    Raises:
        ValueError: scores are of another shape or not numbers, or what must stay is more than the
            budget.
    """
    if scores.ndim != 3 or not scores.isfinite().all():
        raise ValueError("scores are finite numbers [layers, heads, tokens]")
    must = (always or Always()).pairs(scores)
    if budgets is None:
        chosen = _best(scores.reshape(1, -1), must.reshape(1, -1), torch.tensor([total]))
        return chosen.view(scores.shape)
    if budgets.shape != scores.shape[:2] or int(budgets.sum()) > total:
        raise ValueError(f"budgets are [layers, heads] and add up to {total} pairs at most")
    return _best(scores.flatten(0, 1), must.flatten(0, 1), budgets.flatten()).view(scores.shape)


def keep_units(
    scores: Tensor, units: int, unit_tokens: int, always: Always | None = None
) -> Tensor:
    """As `keep`, but each head keeps whole units: what a block of an attention kernel holds.

    A head's tokens are cut into units in order of score, and units compete by the sum of theirs.

    Args:
        units: of all layers and heads, at most.
        unit_tokens: of one; divides the context.

    Raises:
        ValueError: as `keep`; or the context is no number of units.
    """
    layers, heads, tokens = scores.shape
    if tokens % unit_tokens or not scores.isfinite().all():
        raise ValueError(f"scores are finite numbers, of {unit_tokens} tokens or a multiple")
    must = (always or Always()).pairs(scores)
    ranked = scores.masked_fill(must, torch.inf).sort(dim=-1, descending=True, stable=True)
    worth = ranked.values.unflatten(-1, (-1, unit_tokens)).sum(-1).view(1, -1)
    chosen = _best(worth, worth.isinf(), torch.tensor([units])).view(layers, heads, -1)
    wanted = torch.arange(tokens) < unit_tokens * chosen.sum(-1, keepdim=True)
    return torch.zeros_like(must).scatter_(-1, ranked.indices, wanted)


def _best(scores: Tensor, must: Tensor, counts: Tensor) -> Tensor:
    """Of each row so many, those that must stay first."""
    if (must.sum(-1) > counts).any():
        row = int((must.sum(-1) - counts).argmax())
        raise ValueError(
            f"{int(must[row].sum())} pairs must stay and the budget is {int(counts[row])}: "
            "raise it, or keep less whatever its score"
        )
    order = scores.masked_fill(must, torch.inf).argsort(dim=-1, descending=True, stable=True)
    wanted = torch.arange(scores.shape[-1]) < counts[:, None]
    return torch.zeros_like(must).scatter_(-1, order, wanted)
