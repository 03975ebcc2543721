"""Decides how many tokens each layer and KV head keeps, from the entropy of its attention.

A head whose attention is spread over e^H tokens, H its entropy, gets a share of one total in
proportion to e^H, no less than a floor and no more than there is. Measured in docs/bounded.md:
budgets that follow from scores (`keeping`) are better, and these are there to be compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entropies(queries: Tensor, keys: Tensor) -> Tensor:
    """Mean entropy of the attention of a window's queries to all keys: nats, fp32 [heads].

    Args:
        queries: fp32 [heads, rows, head_dim], rotated, times the scale of the logits.
        keys: fp32 [heads, tokens, head_dim], rotated, all of them before the rows.
    """
    weights = (queries @ keys.transpose(1, 2)).softmax(-1)
    return torch.special.entr(weights).sum(-1).mean(-1)


def by_entropy(entropy: Tensor, total: int, tokens: int, floor: int = 0) -> Tensor:
    """Pairs for each layer and head: int64 [layers, heads], `total` in sum, or all there are.

    Args:
        entropy: nats, float [layers, heads].
        total: of pairs.
        tokens: of the context, the most that a head can keep.
        floor: the least that each keeps.

    Raises:
        ValueError: entropies are not numbers, or the floor is more than the total.
    """
    if entropy.ndim != 2 or not entropy.isfinite().all():
        raise ValueError("entropies are finite numbers [layers, heads]")
    heads, floor = entropy.numel(), min(floor, tokens)
    if floor * heads > total:
        raise ValueError(f"a floor of {floor} for {heads} heads is more than {total} pairs")
    total = min(total, tokens * heads)
    weight = entropy.flatten().double().exp()
    found = torch.full_like(weight, floor)
    open_ = torch.ones(heads, dtype=torch.bool)
    # What is above the most that a head can keep goes to the others, until none is above.
    while (left := total - float(found.sum())) > 1e-6 and open_.any():
        found[open_] += left * weight[open_] / weight[open_].sum()
        found.clamp_(max=tokens)
        open_ &= found < tokens
    whole = found.floor().long()
    # Largest remainders take the rest.
    rest = torch.where(whole < tokens, found - whole, -1.0).argsort(descending=True, stable=True)
    whole[rest[: total - int(whole.sum())]] += 1
    return whole.view(entropy.shape)
