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
    for head, queries in enumerate(
        (sample_rows(asked) * scale).unflatten(1, (len(keys), -1)).unbind(1)
    ):
        here = torch.ones_like(kept[head]) if there is None else there[head]
        k, v = keys[head, here], values[head, here]
        at = kept[head, here].nonzero()[:, 0]
        both = fit(k.float(), v.float(), at, queries.flatten(0, 1))
        found.append((both[0].to(k.dtype), both[1].to(v.dtype)))
    return found
