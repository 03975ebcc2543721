"""Number of tokens that each layer and KV head keeps, from the entropy of its attention.

A head whose attention is spread over e^H tokens, H its entropy, gets a share of one total in
proportion to e^H, at least a floor and at most the number of tokens. docs/compression.md has a
measurement: budgets that follow from scores (`selection`) are better. These exist for comparison.
"""

from __future__ import annotations

import torch
from torch import Tensor


def entropies(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the mean entropy of a window's attention to all keys: nats, fp32 [heads].

    Args:
        queries: fp32 [heads, rows, head_dim], rotated, times the scale of the logits.
        keys: fp32 [heads, tokens, head_dim], rotated; all precede the rows.
    """
    weights = (queries @ keys.transpose(1, 2)).softmax(-1)
    return torch.special.entr(weights).sum(-1).mean(-1)


def by_entropy(entropy: Tensor, total: int, tokens: int, floor: int = 0) -> Tensor:
    """Return the number of tokens that each layer and head keeps: int64 [layers, heads].

    The sum is `total`, or the number of all (head, token) pairs if that is less.

    Args:
        entropy: nats, float [layers, heads].
        total: number of (head, token) pairs over all layers.
        tokens: tokens of the context, the maximum that a head can keep.
        floor: minimum that each head keeps.

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
    # Tokens above a head's maximum go to the other heads, until no head is above it.
    while (left := total - float(found.sum())) > 1e-6 and open_.any():
        found[open_] += left * weight[open_] / weight[open_].sum()
        found.clamp_(max=tokens)
        open_ &= found < tokens
    whole = found.floor().long()
    # The heads with the largest remainders get the rest.
    rest = torch.where(whole < tokens, found - whole, -1.0).argsort(descending=True, stable=True)
    whole[rest[: total - int(whole.sum())]] += 1
    return whole.view(entropy.shape)
