"""Fits kept keys and values so that they make up for the dropped ones.

Over the kept keys S alone a query q attends with weights A_S(q) in place of A(q). Two things are
lost: the dropped values, and the weight of the whole context against the tokens after it. Both are
fitted for each layer and KV head, in closed form, to queries that stand for later ones, one row
each. Positions and numbers of bytes do not change.

Keys. All kept keys move by one vector,

    u = argmin sum (q u - m(q))^2 + ridge * trace(Q^T Q) / dim * |u|^2,
    m(q) = logsumexp(q K) - logsumexp(q K_S)

so that the sum of their weights' numerators equals the sum over the whole context again. Weights
among the kept keys do not change, since q u is the same for all of them.

Values. The result of attention would be A_S V_S and should be A V:

    D = argmin |A_S (V_S + D) - A V|^2 + ridge * rows / |S| * |D|^2

Each ridge sets how much better the fit must be for a change to pay. Directions that no query
covers therefore do not move.

Source: Attention Matching (arXiv 2602.16284) fits new keys, values, and a bias for each key, to
attention's output and its mass. Here keys have no bias, which a kernel would have to support.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE, KEY_RIDGE = 1e-3, 1.0
MIN_RIDGE = 1e-6
"""Lower limit of the values' ridge over the number of kept tokens. The matrix that is factorised
has eigenvalues up to `rows`, and fp32 rounds them by a tenth of this."""
FITTED_ROWS = 64
"""Number of query rows that an engine fits to, or a few more."""


MAX_LOGITS = 1 << 24
"""Maximum logits of the heads that are fitted together on a GPU, unless one head has more."""


HeadKV = tuple[Tensor, Tensor]
"""K and V that one KV head keeps, each [k, head_dim]."""


def fit(
    keys: Tensor,
    values: Tensor,
    kept: Tensor,
    queries: Tensor,
    ridge: float | None = RIDGE,
    key_ridge: float | None = KEY_RIDGE,
) -> HeadKV:
    """Fit the keys and values of one head.

    Args:
        keys, values: fp32 [tokens, head_dim], keys rotated.
        kept: int64 [k], positions.
        queries: fp32 [rows, head_dim], of all heads of the group, rotated, times the scale of the
            logits. They come after all keys.
        ridge, key_ridge: above 0; larger changes less. None leaves values, or keys, as they are.

    Raises:
        ValueError: a ridge is not above 0.
    """
    for each in (ridge, key_ridge):
        if each is not None and not each > 0:
            raise ValueError(f"a ridge of {each}: it is above 0")
    k, v = keys[kept], values[kept]
    if len(kept) in (0, len(keys)) or not len(queries):
        return k, v
    logits = queries @ keys.T
    (whole, sums), (weights, part) = _attention(logits), _attention(logits[:, kept])
    if key_ridge is not None:
        k = k + _move(sums - part, queries, key_ridge)
    if ridge is not None:
        v = v + _change(whole, weights, values, kept, ridge)
    return k, v


def _change(whole: Tensor, weights: Tensor, values: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """Return D, for A [rows, tokens] and A_S [rows, k]."""
    missing = whole @ values - weights @ values[kept]
    rows, count = weights.shape
    # Both forms have the same solution; this is the smaller one.
    small = weights.T @ weights if count <= rows else weights @ weights.T
    small.diagonal().add_(rows * max(ridge / count, MIN_RIDGE))
    factor = torch.linalg.cholesky(small)
    if count <= rows:
        return torch.cholesky_solve(weights.T @ missing, factor)
    return weights.T @ torch.cholesky_solve(missing, factor)


def _move(missing: Tensor, queries: Tensor, ridge: float) -> Tensor:
    """Return u, for m [rows]."""
    asked = queries.double()
    square = asked.T @ asked
    square.diagonal().add_(ridge * square.diagonal().mean() + torch.finfo(square.dtype).tiny)
    return torch.linalg.solve(square, asked.T @ missing.double()).to(queries.dtype)


def _attention(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights [rows, tokens], and the logarithm of their denominators [rows]."""
    weights = logits.softmax(-1)
    most, at = weights.max(-1)
    return weights, logits.gather(-1, at[:, None])[:, 0] - most.log()


def fit_heads(
    keys: Tensor, values: Tensor, kept: Tensor, queries: Tensor, there: Tensor
) -> list[HeadKV]:
    """Fit the keys and values of several heads together, with the default ridges.

    The result is that of `fit` for each head but for rounding. A device that is fast at large
    operations needs a few of them here, and reads back only how many tokens the heads keep. Heads
    are filled up to the one that keeps most, which costs a CPU more than it saves.

    Args:
        keys, values: [heads, places, head_dim], of one float dtype, keys rotated.
        kept, there: bool [heads, places], as for `fit_layer`; each head keeps at least one place.
        queries: fp32 [heads, rows, head_dim], as for `fit`.
    """
    counts = kept.sum(-1)
    numbers = counts.tolist()
    order = kept.byte().argsort(dim=-1, descending=True, stable=True)[:, : max(numbers)]
    filled = torch.arange(order.shape[1], device=keys.device) < counts[:, None]
    k, v = (
        each.gather(1, order[..., None].expand(-1, -1, each.shape[-1])).float()
        for each in (keys, values)
    )
    logits = (queries @ keys.float().transpose(1, 2)).masked_fill_(~there[:, None], -torch.inf)
    of_kept = logits.gather(2, order[:, None].expand(-1, queries.shape[1], -1))
    of_kept.masked_fill_(~filled[:, None], -torch.inf)
    missing = logits.logsumexp(-1) - of_kept.logsumexp(-1)
    weights = of_kept.softmax(-1)
    # Places without a token may hold no numbers, and a weight of 0 does not make them 0.
    whole = values.float().masked_fill(~there[..., None], 0.0)
    part = v.masked_fill(~filled[..., None], 0.0)
    result = logits.softmax(-1) @ whole - weights @ part

    asked = queries.double()
    square = asked.transpose(1, 2) @ asked
    diagonal = square.diagonal(dim1=1, dim2=2)
    least = torch.finfo(square.dtype).tiny
    diagonal.add_(KEY_RIDGE * diagonal.mean(-1, keepdim=True) + least)
    move = torch.linalg.solve(square, (asked.transpose(1, 2) @ missing.double()[..., None]))

    rows = queries.shape[1]
    small = weights @ weights.transpose(1, 2)
    small.diagonal(dim1=1, dim2=2).add_(rows * (RIDGE / counts).clamp_min(MIN_RIDGE)[:, None])
    change = weights.transpose(1, 2) @ torch.cholesky_solve(result, torch.linalg.cholesky(small))
    k, v = (k + move[..., 0][:, None].float()).to(keys.dtype), (v + change).to(values.dtype)
    found = (each[filled].split(numbers) for each in (k, v))  # copies without the filling
    return list(zip(*found, strict=True))


def sample_rows(asked: Tensor) -> Tensor:
    """Return evenly spaced rows of these, `FITTED_ROWS` or a few more."""
    return asked[:: max(1, len(asked) // FITTED_ROWS)]


def fit_layer(
    keys: Tensor,
    values: Tensor,
    kept: Tensor,
    asked: Tensor,
    scale: float,
    there: Tensor | None = None,
) -> list[HeadKV]:
    """Fit the keys and values of all heads of a layer, as engines do; in the dtype of the input.

    Args:
        keys, values: [kv_heads, places, head_dim], of one float dtype, keys rotated.
        kept: bool [kv_heads, places].
        asked: queries of the context's newest rows, turned to later positions, fp32
            [rows, heads, head_dim], rotated. Only the rows that `sample_rows` selects count.
        scale: scale of the logits.
        there: bool [kv_heads, places], True where a place has a token; None: everywhere.
    """
    found: list[HeadKV] = []
    by_head = (sample_rows(asked) * scale).unflatten(1, (len(keys), -1)).transpose(0, 1)
    if keys.device.type != "cpu":
        here = torch.ones_like(kept) if there is None else there
        rows = by_head.flatten(1, 2)
        at_once = max(1, MAX_LOGITS // (rows.shape[1] * keys.shape[1]))
        parts = (each.split(at_once) for each in (keys, values, kept, rows, here))
        return [one for part in zip(*parts, strict=True) for one in fit_heads(*part)]
    for head, queries in enumerate(by_head):
        here = torch.ones_like(kept[head]) if there is None else there[head]
        k, v = keys[head, here], values[head, here]
        at = kept[head, here].nonzero()[:, 0]
        both = fit(k.float(), v.float(), at, queries.flatten(0, 1))
        found.append((both[0].to(k.dtype), both[1].to(v.dtype)))
    return found
