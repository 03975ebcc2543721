"""Changes kept keys and values so that they make up for the dropped ones.

Over the kept keys S alone a query q attends with weights A_S(q) in place of A(q). Two things are
lost: values that left, and the weight that all of the context had against what comes behind it.
Both are fitted for each layer and KV head, in closed form, to queries that stand for later ones,
one row each. Positions and bytes stay as they are.

Keys. All that stay move by one vector,

    u = argmin sum (q u - m(q))^2 + ridge * trace(Q^T Q) / dim * |u|^2,
    m(q) = logsumexp(q K) - logsumexp(q K_S)

so that the sum of their weights' numerators becomes what it was. Weights among them stay as they
are, since q u is the same for all.

Values. The result of attention would be A_S V_S and should be A V:

    D = argmin |A_S (V_S + D) - A V|^2 + ridge * rows / |S| * |D|^2

Each ridge says how much better a fit must be to be worth a change, so what no query tells about
does not move.
Source: Attention Matching (arXiv 2602.16284) fits new keys, values, and a bias for each key, to
attention's output and its mass. Here keys have no bias that a kernel would have to know.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE, KEY_RIDGE = 1e-3, 1.0
LEAST_RIDGE = 1e-6
"""Of a token. The square has eigenvalues up to `rows`, of which fp32 rounds a tenth of this."""
FITTED_ROWS = 64
"""To whose queries an engine fits values, or a few more."""


def refitted(
    keys: Tensor, values: Tensor, kept: Tensor, queries: Tensor, ridge: float = RIDGE
) -> Tensor:
    """Values of the kept tokens of one head: fp32 [k, head_dim].

    Args:
        keys, values: fp32 [tokens, head_dim], keys rotated.
        kept: int64 [k], positions.
        queries: fp32 [rows, head_dim], of all heads of the group, rotated, times the scale of the
            logits. All keys stand before them.
        ridge: above 0; larger moves values less.

    Raises:
        ValueError: nothing is kept, or the ridge is not above 0.
    """
    if not len(kept) or not ridge > 0:
        raise ValueError(f"{len(kept)} tokens and a ridge of {ridge}: both are above 0")
    if len(kept) == len(keys) or not len(queries):
        return values[kept]
    logits = queries @ keys.T
    whole, weights = logits.softmax(-1), logits[:, kept].softmax(-1)
    return values[kept] + _change(whole, weights, values, kept, ridge)


def _change(whole: Tensor, weights: Tensor, values: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """D, for A [rows, tokens] and A_S [rows, k]."""
    missing = whole @ values - weights @ values[kept]
    rows, count = weights.shape
    # The smaller of the two forms of the same solution.
    small = weights.T @ weights if count <= rows else weights @ weights.T
    small.diagonal().add_(rows * max(ridge / count, LEAST_RIDGE))
    factor = torch.linalg.cholesky(small)
    if count <= rows:
        return torch.cholesky_solve(weights.T @ missing, factor)
    return weights.T @ torch.cholesky_solve(missing, factor)


def move(keys: Tensor, kept: Tensor, queries: Tensor, ridge: float = KEY_RIDGE) -> Tensor:
    """The vector that the kept keys of one head move by: fp32 [head_dim]; arguments as of
    `refitted`."""
    if not len(kept) or len(kept) == len(keys) or not len(queries):
        return keys.new_zeros(keys.shape[1])
    logits = queries @ keys.T
    (_, whole), (_, part) = _attention(logits), _attention(logits[:, kept])
    return _move(whole - part, queries, ridge)


def _move(missing: Tensor, queries: Tensor, ridge: float) -> Tensor:
    """u, for m [rows]."""
    asked = queries.double()
    square = asked.T @ asked
    square.diagonal().add_(ridge * square.diagonal().mean() + torch.finfo(square.dtype).tiny)
    return torch.linalg.solve(square, asked.T @ missing.double()).to(queries.dtype)


def _attention(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [rows, tokens], and the logarithm of what they were divided by, [rows]."""
    weights = logits.softmax(-1)
    most, at = weights.max(-1)
    return weights, logits.gather(-1, at[:, None])[:, 0] - most.log()


def some(asked: Tensor) -> Tensor:
    """Evenly spaced rows of these, `FITTED_ROWS` or a few more."""
    return asked[:: max(1, len(asked) // FITTED_ROWS)]


Kept = list[tuple[Tensor, Tensor]]
"""By KV head: K and V of what it keeps, each [k, head_dim]."""


def fitted(
    keys: Tensor,
    values: Tensor,
    kept: Tensor,
    asked: Tensor,
    scale: float,
    there: Tensor | None = None,
) -> Kept:
    """Both fits for all heads of a layer, as engines do them; in the dtype of the keys.

    Args:
        keys, values: [kv_heads, places, head_dim], of one float dtype, keys rotated.
        kept: bool [kv_heads, places].
        asked: queries of the context's newest rows as if they came later, fp32
            [rows, heads, head_dim], rotated. Only `some` count.
        scale: of the logits.
        there: bool [kv_heads, places], where there is a token; None: everywhere.
    """
    found: Kept = []
    for head, queries in enumerate((some(asked) * scale).unflatten(1, (len(keys), -1)).unbind(1)):
        here = torch.ones_like(kept[head]) if there is None else there[head]
        at = kept[head, here].nonzero()[:, 0]
        if not len(at) or len(at) == int(here.sum()):
            found.append((keys[head, kept[head]], values[head, kept[head]]))
            continue
        k, v, q = keys[head, here].float(), values[head, here].float(), queries.flatten(0, 1)
        logits = q @ k.T
        (whole, sums), (weights, part) = _attention(logits), _attention(logits[:, at])
        moved = k[at] + _move(sums - part, q, KEY_RIDGE)
        changed = v[at] + _change(whole, weights, v, at, RIDGE)
        found.append((moved.to(keys.dtype), changed.to(values.dtype)))
    return found
