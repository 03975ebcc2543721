"""Estimates, from summaries, how much attention queries pay to each unit.

For a query q and a unit b with mean mu whose tokens i deviate from it by c_i:

    score_b = q.mu / sqrt(d) + ln sum_i exp(q.c_i / sqrt(d))

which is exact attention mass, in logarithm, but for what a summary leaves out of mu and c_i:

    q.c_i ~ sum_j w_j z_ij + sum_j u_ij (q.V_j)

with coordinates z in a shared basis, whose weights w = B q are the same for all units, and
directions V of the unit's own.

The softmax over units per query head is summed over the query heads that share a KV head.

The logarithm is never taken: with s_b the sum and m_b the first term, the softmax is
s_b exp(m_b - max m) over its sum. The deviations from the mean sum to 0 over a unit's tokens, so
s_b is about 1 at least; it is at most unit_tokens e^60, since exponents are cut there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.lanes import LOG2E, POWERS, unit_mass
from headrace_decode.sparse.layout import Layout, jit
from headrace_decode.sparse.summaries import Summaries
from headrace_kvstore.codec.lanes import as_float

C0, C1, C2, C3, C4, C5 = (np.float32(power) for power in POWERS)


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
    prepared = _prepared(scaled, summaries)
    kernel = _kernel(layout, queries.shape[1])
    kernel(summaries.codes, summaries.scales, np.asarray(units, np.int64), prepared, found)
    return found


def _prepared(queries: NDArray[np.float32], summaries: Summaries) -> NDArray[np.float32]:
    """Queries as `unit_mass` reads them: float32 [kv_heads, group, query_floats].

    -8 times what a code is multiplied with stands at the end, since codes are 8 more than what
    they stand for.
    """
    lanes = queries.reshape(*queries.shape[:2], -1, 1, 4)
    beside = np.broadcast_to(lanes, (*lanes.shape[:3], summaries.layout.rank, 4))
    beside = beside.reshape(*queries.shape[:2], -1)
    weights = (queries @ summaries.basis.back.swapaxes(1, 2)) * np.float32(LOG2E)
    starts = (-8 * one.sum(-1, keepdims=True) for one in (weights, queries))
    return np.concatenate([queries, weights, beside, *starts], -1)


@cache
def _kernel(layout: Layout, group: int) -> Any:
    """Compiled for one shape: the sums over it are too short for loops of any length."""
    tokens, dim, rank = layout.unit_tokens, layout.head_dim, layout.rank
    coordinates = layout.coordinates
    code_bytes, scale_count = layout.code_bytes, layout.scales

    @jit
    def kernel(codes: Any, scales: Any, units: Any, queries: Any, out: Any) -> None:
        kv_heads, capacity, _ = codes.shape
        flat_codes, flat_scales = codes.reshape(-1), scales.reshape(-1)
        means = np.empty((group, units.size), np.float32)
        sums = np.empty((group, units.size), np.float32)
        flat_means, flat_sums = means.reshape(-1), sums.reshape(-1)
        for head in range(kv_heads):
            prepared = queries[head].reshape(-1)
            for n in range(units.size):
                slot = head * capacity + units[n]
                unit_mass(
                    tokens,
                    dim,
                    rank,
                    coordinates,
                    group,
                    flat_codes,
                    slot * code_bytes,
                    flat_scales,
                    slot * scale_count,
                    prepared,
                    flat_means,
                    flat_sums,
                    n,
                    units.size,
                )
            for g in range(group):
                _add_softmax(means[g], sums[g], out[head])

    return kernel


@jit
def _add_softmax(means: Any, sums: Any, out: Any) -> None:
    highest, total = np.float32(-np.inf), np.float32(0)
    for n in range(means.size):
        highest = max(highest, means[n])
    for n in range(means.size):
        sums[n] *= _exp2(means[n] - highest)
        total += sums[n]
    inverse = np.float32(1) / total
    for n in range(means.size):
        out[n] += sums[n] * inverse


@jit
def _exp2(x: Any) -> Any:
    """2^x for x <= 0, in a way that becomes vector code; 2^-126 for less than that."""
    x = max(x, np.float32(-126))
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    power = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * C5))))
    return power * as_float((np.int32(whole) + np.int32(127)) << np.int32(23))
