"""Decides which (layer, KV head, token) pairs of a context are kept, given a score for each.

Pairs of all layers and heads compete for one budget: a head that looks something up in many places
keeps many tokens, and a head that looks at the first token keeps little more than that. With a
budget for each head, the same scores lose most of their information.

Some pairs are kept whatever their score: the first tokens, where idle heads put their attention
(attention sinks), and the newest, which the next words continue.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AlwaysKept:
    """Pairs that are kept whatever their score.

    Attributes:
        sinks: number of first tokens.
        newest: number of last tokens.
        whole_layers: number of first layers that keep all tokens.
    """

    sinks: int = 4
    newest: int = 16
    whole_layers: int = 0

    def __post_init__(self) -> None:
        if min(self.sinks, self.newest, self.whole_layers) < 0:
            raise ValueError(f"counts are 0 or more: {self}")

    def pairs(self, scores: Tensor) -> Tensor:
        """Return the pairs that are always kept: bool [layers, heads, tokens]."""
        layers, _, tokens = scores.shape
        at = torch.arange(tokens, device=scores.device)
        ends = (at < self.sinks) | (at >= tokens - self.newest)
        found = ends.expand(scores.shape).clone()
        found[: min(self.whole_layers, layers)] = True
        return found


def select_tokens(
    scores: Tensor, total: int, always: AlwaysKept | None = None, budgets: Tensor | None = None
) -> Tensor:
    """Choose the pairs to keep: `total` of them, or all if there are fewer.

    Args:
        scores: float [layers, heads, tokens], 0 or more; higher is kept first.
        total: number of pairs, over all layers and heads.
        always: pairs that are kept whatever their score; None for the defaults.
        budgets: int64 [layers, heads], number of pairs of each head, in place of one budget for
            all. They add up to `total` at most.

    Returns:
        bool [layers, heads, tokens].

    Raises:
        ValueError: scores have another shape or are not finite, budgets do not fit, or more pairs
            must be kept than a budget allows.
    """
    if scores.ndim != 3 or not scores.isfinite().all():
        raise ValueError("scores are finite numbers [layers, heads, tokens]")
    must = (always or AlwaysKept()).pairs(scores)
    if budgets is None:
        chosen = _best(
            scores.reshape(1, -1), must.reshape(1, -1), torch.tensor([total], device=scores.device)
        )
        return chosen.view(scores.shape)
    if budgets.shape != scores.shape[:2] or int(budgets.sum()) > total:
        raise ValueError(f"budgets are [layers, heads] and add up to {total} pairs at most")
    return _best(scores.flatten(0, 1), must.flatten(0, 1), budgets.flatten()).view(scores.shape)


def select_token_pages(
    scores: Tensor, pages: int, page_tokens: int, always: AlwaysKept | None = None
) -> Tensor:
    """Choose the pairs to keep like `select_tokens`, in whole pages for each head. A page holds as
    many tokens as a block of an attention kernel.

    A head's tokens are cut into pages in order of score. Pages compete by the sum of their scores.

    Args:
        pages: maximum over all layers and heads.
        page_tokens: tokens of a page; divides the number of tokens of the context.

    Raises:
        ValueError: as for `select_tokens`; or the context is not a whole number of pages.
    """
    layers, heads, tokens = scores.shape
    if tokens % page_tokens or not scores.isfinite().all():
        raise ValueError(f"scores are finite numbers, of {page_tokens} tokens or a multiple")
    must = (always or AlwaysKept()).pairs(scores)
    ranked = scores.masked_fill(must, torch.inf).sort(dim=-1, descending=True, stable=True)
    worth = ranked.values.unflatten(-1, (-1, page_tokens)).sum(-1).view(1, -1)
    budget = torch.tensor([pages], device=scores.device)
    chosen = _best(worth, worth.isinf(), budget).view(layers, heads, -1)
    at = torch.arange(tokens, device=scores.device)
    wanted = at < page_tokens * chosen.sum(-1, keepdim=True)
    return torch.zeros_like(must).scatter_(-1, ranked.indices, wanted)


def _best(scores: Tensor, must: Tensor, counts: Tensor) -> Tensor:
    """Choose the given count of the highest scores in each row, those that must stay first."""
    if (must.sum(-1) > counts).any():
        row = int((must.sum(-1) - counts).argmax())
        raise ValueError(
            f"{int(must[row].sum())} pairs must stay and the budget is {int(counts[row])}: "
            "raise it, or keep less whatever its score"
        )
    order = scores.masked_fill(must, torch.inf).argsort(dim=-1, descending=True, stable=True)
    wanted = torch.arange(scores.shape[-1], device=scores.device) < counts[:, None]
    return torch.zeros_like(must).scatter_(-1, order, wanted)
