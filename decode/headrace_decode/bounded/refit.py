"""Gives the kept tokens values that make up for the dropped ones.

Over the kept keys S alone a query q attends with weights A_S(q) in place of A(q). Its result would
be A_S V_S and should be A V. Values are free to change: positions, keys and bytes stay as they are.
With queries that stand for later ones, one row each, the change of values is a ridge regression,

    D = argmin |A_S (V_S + D) - A V|^2 + ridge * rows / |S| * |D|^2,

solved in closed form for each layer and KV head, over the queries of its group. The ridge says how
much better a fit must be to be worth a change, so values that no query tells about do not move.
Source: the idea of fitting values to attention's output is that of Attention Matching (arXiv
2602.16284), which fits new keys and biases as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3
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
    weights = logits[:, kept].softmax(-1)
    missing = logits.softmax(-1) @ values - weights @ values[kept]
    rows, count = weights.shape
    # The smaller of the two forms of the same solution.
    small = weights.T @ weights if count <= rows else weights @ weights.T
    small.diagonal().add_(rows * max(ridge / count, LEAST_RIDGE))
    factor = torch.linalg.cholesky(small)
    if count <= rows:
        change = torch.cholesky_solve(weights.T @ missing, factor)
    else:
        change = weights.T @ torch.cholesky_solve(missing, factor)
    return values[kept] + change


def some(asked: Tensor) -> Tensor:
    """Evenly spaced rows of these, `FITTED_ROWS` or a few more."""
    return asked[:: max(1, len(asked) // FITTED_ROWS)]


def fitted(
    keys: Tensor,
    values: Tensor,
    kept: Tensor,
    asked: Tensor,
    scale: float,
    there: Tensor | None = None,
) -> Tensor:
    """`refitted` for all heads of a layer, as engines do it: values, of which those of kept tokens
    are changed.

    Args:
        keys, values: [kv_heads, places, head_dim], of one float dtype, keys rotated.
        kept: bool [kv_heads, places].
        asked: queries of the context's newest rows as if they came later, fp32
            [rows, heads, head_dim], rotated. Only `some` count.
        scale: of the logits.
        there: bool [kv_heads, places], where there is a token; None: everywhere.
    """
    changed = values.clone()
    for head, queries in enumerate((some(asked) * scale).unflatten(1, (len(keys), -1)).unbind(1)):
        here = torch.ones_like(kept[head]) if there is None else there[head]
        k, v = keys[head, here].float(), values[head, here].float()
        at = kept[head, here].nonzero()[:, 0]
        changed[head, kept[head]] = refitted(k, v, at, queries.flatten(0, 1)).to(values.dtype)
    return changed
