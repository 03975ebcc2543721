"""Estimates, from summaries, how much attention queries pay to each page.

For a query q and a page b with mean mu whose tokens i deviate from it by c_i:

    score_b = q.mu / sqrt(d) + ln sum_i exp(q.c_i / sqrt(d))

This is the logarithm of the exact attention mass, apart from the summary's errors in mu and c_i:

    q.c_i ~ sum_j w_j z_ij + sum_j u_ij (q.V_j)

with coordinates z in a shared basis, whose weights w = B q are the same for all pages, and
directions V of the page's own. q and w are rounded to 8 bits. This error is a tenth of the error of
the summaries' 4 bits, and all products are of integers (`simd_dot`).

The softmax over pages per query head is summed over the query heads that share a KV head.

The logarithm is never taken: with s_b the sum and m_b the first term, the softmax is
s_b exp(m_b - max m) over its sum. The deviations from the mean sum to 0 over a page's tokens, so
s_b is about 1 at least; it is at most page_tokens e^60, since exponents are limited to 60.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_decode.sparse.simd_dot import LOG2E, POWERS, page_mass, query_bytes, rows_at_once
from headrace_decode.sparse.summaries import Summaries
from headrace_decode.sparse.summary_layout import SummaryLayout, jit
from headrace_kvstore.codec.bitcast import as_float

TINY = np.float32(1e-30)
C0, C1, C2, C3, C4, C5 = (np.float32(power) for power in POWERS)


def score_pages(
    summaries: Summaries,
    pages: NDArray[np.int64],
    queries: NDArray[np.float32],
    scale: float,
) -> NDArray[np.float32]:
    """Estimate the attention that each page gets.

    Args:
        summaries: summaries of the layer.
        pages: int64 [n], each below the capacity and stored before.
        queries: float32 [kv_heads, group, head_dim], rotated.
        scale: scale of the logits, 1 / sqrt(head_dim) in most models.

    Returns:
        float32 [kv_heads, n]; each row sums to the group.

    Raises:
        ValueError: queries of another shape.
        IndexError: a page outside the capacity.
    """
    layout, kv_heads = summaries.layout, len(summaries.codes)
    if queries.ndim != 3 or (queries.shape[0], queries.shape[2]) != (kv_heads, layout.head_dim):
        raise ValueError(f"queries are {queries.shape}, must be [{kv_heads}, group, dim]")
    found = np.zeros((kv_heads, len(pages)), np.float32)
    kernel, back = _kernel(layout, queries.shape[1]), summaries.basis.back
    arrays = summaries.codes, summaries.scales, np.asarray(pages, np.int64)
    asked = np.ascontiguousarray(queries, np.float32), np.float32(scale), back
    if not kernel(*arrays, *asked, found):
        capacity = summaries.codes.shape[1]
        raise IndexError(f"pages {pages.min()} to {pages.max()}: must be 0 to {capacity - 1}")
    return found


@cache
def _kernel(layout: SummaryLayout, group: int) -> Any:
    """Compile the kernel for one shape, since its sums are too short for loops of any length."""
    tokens, dim, rank = layout.page_tokens, layout.head_dim, layout.rank
    coordinates = layout.coordinates
    code_bytes, scale_count = layout.code_bytes, layout.scales
    at_once, per_query = rows_at_once(layout), query_bytes(layout)

    @jit
    def kernel(
        codes: Any, scales: Any, pages: Any, queries: Any, scale: Any, back: Any, out: Any
    ) -> bool:
        kv_heads, capacity, _ = codes.shape
        for n in range(pages.size):
            if pages[n] < 0 or pages[n] >= capacity:
                return False
        flat_codes, flat_scales = codes.reshape(-1), scales.reshape(-1)
        means = np.empty((group, pages.size), np.float32)
        sums = np.empty((group, pages.size), np.float32)
        flat_means, flat_sums = means.reshape(-1), sums.reshape(-1)
        prepared = np.empty(group * per_query, np.int8)
        starts = np.empty(2 * group, np.int32)
        factors = np.empty(2 * group, np.float32)
        weights = np.empty(coordinates, np.float32)
        for head in range(kv_heads):
            for g in range(group):
                query, mine = queries[head, g], prepared[g * per_query : (g + 1) * per_query]
                factors[2 * g], starts[2 * g] = _rounded(query, mine, 0, dim // 2, at_once)
                factors[2 * g] *= scale
                if coordinates:
                    _weights(query, back[head], weights)
                    factors[2 * g + 1], starts[2 * g + 1] = _rounded(
                        weights, mine, at_once * dim, coordinates, 1
                    )
                    factors[2 * g + 1] *= scale
            for n in range(pages.size):
                slot = head * capacity + pages[n]
                page_mass(
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
                    starts,
                    factors,
                    flat_means,
                    flat_sums,
                    n,
                    pages.size,
                )
            for g in range(group):
                _add_softmax(means[g], sums[g], out[head])
        return True

    return kernel


@jit
def _weights(query: Any, back: Any, weights: Any) -> None:
    for j in range(weights.size):
        total = np.float32(0)
        for d in range(query.size):
            total += back[j, d] * query[d]
        weights[j] = total


@jit
def _rounded(row: Any, into: Any, at: int, length: int, times: int) -> Any:
    """Write a row in 8 bits, each `length` of it so many times. Return log2(e) times its step, and
    the initial value for sums of products with codes, since codes are values plus 8."""
    largest = np.float32(0)
    for d in range(row.size):
        largest = max(largest, abs(row[d]))
    inverse = np.float32(127) / largest if largest > TINY else np.float32(0)
    total = np.int32(0)
    for first in range(0, row.size, length):
        for d in range(length):
            value = np.int32(np.floor(row[first + d] * inverse + np.float32(0.5)))
            total += value
            for n in range(times):
                into[at + first * times + n * length + d] = value
    return largest * np.float32(LOG2E / 127), np.int32(-8) * total


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
    """Compute 2^x for x <= 0, in a form that compiles to vector code; 2^-126 for x below -126."""
    x = max(x, np.float32(-126))
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    power = C0 + f * (C1 + f * (C2 + f * (C3 + f * (C4 + f * C5))))
    return power * as_float((np.int32(whole) + np.int32(127)) << np.int32(23))
