"""Estimates, from summaries, how much attention queries pay to each unit.

For a query q and unit b with mean mu, directions V_j and coefficients u_ij of its tokens i:

    score_b = q.mu / sqrt(d) + ln sum_i exp(sum_j u_ij (q.V_j) / sqrt(d))

which is exact attention mass, in logarithm, but for what the rank and the 4 bits leave out. The
softmax over units per query head is summed over the query heads that share a KV head.

The logarithm is never taken: with s_b the sum and m_b the first term, the softmax is
s_b exp(m_b - max m) over its sum. The deviations from the mean sum to 0 over a unit's tokens, so
s_b is about 1 at least; it is at most unit_tokens e^60, since exponents are cut there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.layout import jit
from headrace_decode.sparse.summaries import Summaries
from headrace_kvstore.codec.lanes import as_float

CUT = np.float32(60.0)
LOG2E = np.float32(1.4426950408889634)
C0, C1, C2, C3, C4, C5 = (
    np.float32(c) for c in (1.0, 0.6931472, 0.24022651, 0.05550411, 0.009618129, 0.0013333558)
)


def score(
    summaries: Summaries,
    units: NDArray[np.int64],
    queries: NDArray[np.float32],
    scale: float,
) -> NDArray[np.float32]:
    """Estimated attention by unit.

    Args:
        summaries: of the layer.
        units: int64 [n], each below the capacity and stored before.
        queries: float32 [kv_heads, group, head_dim], rotated.
        scale: of the logits, 1 / sqrt(head_dim) in most models.

    Returns:
        float32 [kv_heads, n]; each row sums to the group.

    Raises:
        ValueError: queries of another shape.
        IndexError: a unit outside the capacity.
    """
    layout, (kv_heads, capacity, _) = summaries.layout, summaries.codes.shape
    if queries.ndim != 3 or (queries.shape[0], queries.shape[2]) != (kv_heads, layout.head_dim):
        raise ValueError(f"queries are {queries.shape}, must be [{kv_heads}, group, dim]")
    if len(units) and not 0 <= units.min() <= units.max() < capacity:
        raise IndexError(f"units {units.min()} to {units.max()}: must be 0 to {capacity - 1}")
    found = np.zeros((kv_heads, len(units)), np.float32)
    scaled = np.ascontiguousarray(queries, np.float32) * np.float32(scale)
    shape = layout.unit_tokens, layout.head_dim, layout.rank
    _score(summaries.codes, summaries.scales, units, scaled, found, *shape)
    return found


@jit
def _exp2(x: Any) -> Any:
    """2^x for |x| < 126, to 2e-7 of it."""
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    power = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * C5))))
    return power * as_float((np.int32(whole) + np.int32(127)) << np.int32(23))


@jit
def _score(
    codes: Any, scales: Any, units: Any, queries: Any, out: Any, tokens: int, dim: int, rank: int
) -> None:
    kv_heads, group, _ = queries.shape
    half, rows, few = dim // 2, rank + 1, tokens // 2
    plain = np.empty(rows * dim, np.float32)
    coefficients = np.empty(rank * tokens, np.float32)
    logits = np.empty(tokens, np.float32)
    along = np.empty(rows, np.float32)
    means = np.empty((group, units.size), np.float32)
    sums = np.empty((group, units.size), np.float32)
    for head in range(kv_heads):
        for n in range(units.size):
            code, scale = codes[head, units[n]], scales[head, units[n]]
            for j in range(rows):
                for i in range(half):
                    byte = np.int32(code[j * half + i])
                    plain[j * dim + i] = np.float32((byte & 15) - 8)
                    plain[j * dim + half + i] = np.float32((byte >> 4) - 8)
            for j in range(rank):
                for i in range(few):
                    byte = np.int32(code[rows * half + j * few + i])
                    coefficients[j * tokens + i] = np.float32((byte & 15) - 8)
                    coefficients[j * tokens + few + i] = np.float32((byte >> 4) - 8)
            for g in range(group):
                for j in range(rows):
                    total = np.float32(0)
                    for d in range(dim):
                        total += plain[j * dim + d] * queries[head, g, d]
                    along[j] = total * scale[j] * LOG2E
                means[g, n] = along[0]
                logits[:] = 0
                for j in range(rank):
                    for i in range(tokens):
                        logits[i] += along[1 + j] * coefficients[j * tokens + i]
                total = np.float32(0)
                for i in range(tokens):
                    cut = min(max(logits[i], -CUT * LOG2E), CUT * LOG2E)
                    total += _exp2(cut)
                sums[g, n] = total
        for g in range(group):
            highest = np.float32(-np.inf)
            for n in range(units.size):
                highest = max(highest, means[g, n])
            total = np.float32(0)
            for n in range(units.size):
                # From 2^-126 on float32 holds no normal number.
                sums[g, n] *= _exp2(max(means[g, n] - highest, np.float32(-126)))
                total += sums[g, n]
            inverse = np.float32(1) / total
            for n in range(units.size):
                out[head, n] += sums[g, n] * inverse
