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

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.lanes import query_floats, unit_mass
from headrace_decode.sparse.layout import jit
from headrace_decode.sparse.summaries import Summaries


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
    kernel = _kernel(layout.unit_tokens, layout.head_dim, layout.rank, queries.shape[1])
    kernel(summaries.codes, summaries.scales, np.asarray(units, np.int64), scaled, found)
    return found


@cache
def _kernel(tokens: int, dim: int, rank: int, group: int) -> Any:
    """Compiled for one shape: the sums over it are too short for loops of any length."""
    floats, lanes = query_floats(dim, rank), 4 * rank

    @jit
    def kernel(codes: Any, scales: Any, units: Any, queries: Any, out: Any) -> None:
        kv_heads, capacity, code_bytes = codes.shape
        flat_codes, flat_scales = codes.reshape(-1), scales.reshape(-1)
        prepared = np.empty((group, floats), np.float32)
        flat = prepared.reshape(-1)
        means = np.empty((group, units.size), np.float32)
        sums = np.empty((group, units.size), np.float32)
        flat_means, flat_sums = means.reshape(-1), sums.reshape(-1)
        for head in range(kv_heads):
            for g in range(group):
                _prepare(queries[head, g], prepared[g], lanes)
            for n in range(units.size):
                slot = head * capacity + units[n]
                unit_mass(
                    tokens,
                    dim,
                    rank,
                    group,
                    flat_codes,
                    slot * code_bytes,
                    flat_scales,
                    slot * (rank + 1),
                    flat,
                    flat_means,
                    flat_sums,
                    n,
                    units.size,
                )
            for g in range(group):
                _add_softmax(means[g], sums[g], out[head])

    return kernel


@jit
def _prepare(query: Any, prepared: Any, lanes: int) -> None:
    """The query; the query as it meets directions; and -8 times what it meets, since codes are 8
    more than what they stand for."""
    dim, total = query.size, np.float32(0)
    for d in range(dim):
        prepared[d] = query[d]
        total += query[d]
    start = dim + lanes * dim // 4
    prepared[start : start + lanes] = 0
    for step in range(dim // 4):
        for lane in range(lanes):
            value = query[4 * step + lane % 4]
            prepared[dim + step * lanes + lane] = value
            prepared[start + lane] -= 8 * value
    prepared[start + lanes] = -8 * total


@jit
def _add_softmax(means: Any, sums: Any, out: Any) -> None:
    highest, total = np.float32(-np.inf), np.float32(0)
    for n in range(means.size):
        highest = max(highest, means[n])
    for n in range(means.size):
        sums[n] *= np.exp2(means[n] - highest)
        total += sums[n]
    inverse = np.float32(1) / total
    for n in range(means.size):
        out[n] += sums[n] * inverse
