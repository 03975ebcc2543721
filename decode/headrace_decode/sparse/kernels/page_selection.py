"""Scores pages and writes each KV head's block table, in two kernels and without the host.

`scores` writes, for each query head and page, the logarithm of the attention that `page_scores`
describes. `tables` takes the softmax over pages, sums it over the query heads of a KV head, and
finds the k highest like `sparse.page_selection`: it builds the k-th highest score bit by bit
(positive floats are ordered like their bits), and counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_decode.attention.page_counts import RECENT, SINKS
from headrace_decode.sparse.kernels.summaries import LEAST, SCALES, DeviceSummaries
from headrace_decode.sparse.simd_dot import LOG2E

AT_ONCE = 16
"""Number of pages that one program scores."""
MAX_PAGES = 32768
"""Maximum pages of a row, since all its scores lie in one program's registers."""


def tables(
    summaries: DeviceSummaries,
    query: Tensor,
    pages: Tensor,
    counts: Tensor,
    chosen: Tensor,
    newest: Tensor,
    heads_apart: int,
    scale: float,
    most: int,
) -> Tensor:
    """Return the block tables of rows, by KV head.

    Args:
        summaries: summaries of the layer; up to date for all pages that rows name.
        query: [rows, heads, head_dim], rotated.
        pages: int [rows, n], blocks of each row's full pages before its newest, in order.
        counts: int32 [rows], number of these pages.
        chosen: int32 [rows], pages that a row attends to, the newest included: at least `SINKS` +
            `RECENT`, at most counts + 1.
        newest: int [rows], block of the newest page.
        heads_apart: as for `HeadCache`.
        scale: scale of the logits.
        most: maximum of `chosen`, or more.

    Returns:
        int32 [rows, kv_heads, most], places of the cache: the chosen ones in order, then the
        newest.

    Raises:
        ValueError: rows have more than `MAX_PAGES` pages.
    """
    logits = scores(summaries, query, pages, counts, scale)
    return _chosen(logits, pages, counts, chosen, newest, heads_apart, most, places=True)


def positions(
    summaries: DeviceSummaries,
    query: Tensor,
    pages: Tensor,
    counts: Tensor,
    chosen: Tensor,
    scale: float,
    most: int,
) -> Tensor:
    """Return the positions of the chosen pages in each row's context: int32 [rows, kv_heads, most].

    Args:
        pages: int [rows, n], index of the summary of each full page before the newest, in order.
        summaries, query, counts, chosen, scale, most: as for `tables`, which chooses the same.
    """
    logits = scores(summaries, query, pages, counts, scale)
    return _chosen(logits, pages, counts, chosen, counts, 1, most, places=False)


def _chosen(
    logits: Tensor,
    pages: Tensor,
    counts: Tensor,
    chosen: Tensor,
    newest: Tensor,
    heads_apart: int,
    most: int,
    places: bool,
) -> Tensor:
    rows, kv_heads, group, n = logits.shape
    if n > MAX_PAGES:
        raise ValueError(f"rows have {n} pages, must be at most {MAX_PAGES}")
    size = triton.next_power_of_2(max(n, 2))
    found = torch.zeros((rows, kv_heads, most), dtype=torch.int32, device=logits.device)
    _choose[rows, kv_heads](
        logits,
        pages,
        counts,
        chosen,
        newest,
        found,
        pages.stride(0),
        heads_apart,
        n,
        most,
        GROUP=group,
        FIRST=SINKS,
        LAST=RECENT - 1,
        SIZE=size,
        PLACES=places,
        num_warps=min(32, max(4, size // 1024)),
    )
    return found


def scores(
    summaries: DeviceSummaries, query: Tensor, pages: Tensor, counts: Tensor, scale: float
) -> Tensor:
    """Return logarithms to base 2 of the attention to pages, before the softmax divides by its sum.

    Args:
        query, pages, counts, scale: as for `tables`.

    Returns:
        float32 [rows, kv_heads, group, n]; not written where a row has no page.
    """
    rows, heads, dim = query.shape
    layout, (kv_heads, capacity, code_bytes) = summaries.layout, summaries.codes.shape
    group, n = heads // kv_heads, pages.shape[1]
    grouped = query.view(rows, kv_heads, group, dim)
    weights = torch.einsum("rhgd,hjd->rhgj", grouped.float(), summaries.back).contiguous()
    found = torch.empty((rows, kv_heads, group, n), device=query.device)
    _score[rows, kv_heads, triton.cdiv(n, AT_ONCE)](
        query,
        weights,
        pages,
        counts,
        summaries.codes,
        summaries.scales,
        found,
        scale * LOG2E,
        query.stride(0),
        query.stride(1),
        pages.stride(0),
        capacity,
        n,
        code_bytes,
        GROUP=group,
        GROUP_PADDED=max(LEAST, triton.next_power_of_2(group)),
        TOKENS=layout.page_tokens,
        DIM=dim,
        COORDINATES=layout.coordinates,
        PADDED=max(LEAST, triton.next_power_of_2(layout.coordinates)),
        PAGES=AT_ONCE,
    )
    return found


@triton.jit
def _score(
    query,
    weights,
    pages,
    counts,
    codes,
    scales,
    found,
    scale,
    query_row,
    query_head,
    pages_row,
    capacity,
    n,
    code_bytes,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    COORDINATES: tl.constexpr,
    PADDED: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Score some pages of one row and KV head. Queries are rounded to 8 bits and codes are
    integers, so products in the query's own precision are exact."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.program_id(2) * PAGES
    count = tl.load(counts + row)
    if first >= count:
        return
    g, b = tl.arange(0, GROUP_PADDED), first + tl.arange(0, PAGES)
    d, j = tl.arange(0, DIM // 2), tl.arange(0, PADDED)
    asked, there = g < GROUP, b < count
    page = tl.load(pages + row * pages_row + b, there, 0).to(tl.int64)
    slot = head * capacity.to(tl.int64) + page
    start = codes + slot * code_bytes

    heads = row * query_row + (head * GROUP + g)[:, None] * query_head + d[None, :]
    low = tl.load(query + heads, asked[:, None], 0.0)
    high = tl.load(query + heads + DIM // 2, asked[:, None], 0.0)
    largest = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)).to(tl.float32)
    low, high = _rounded(low, largest), _rounded(high, largest)
    of_query = largest / 127
    mean = _along(low, high, start[None, :] + d[:, None], there[None, :])
    mean *= tl.load(scales + SCALES * slot, there, 0.0)[None, :] * of_query[:, None]
    own = _along(low, high, start[None, :] + DIM // 2 + d[:, None], there[None, :])
    own *= tl.load(scales + SCALES * slot + 2, there, 0.0)[None, :] * of_query[:, None] * scale
    t = tl.arange(0, TOKENS)
    of_tokens = start[:, None] + DIM + COORDINATES * TOKENS // 2 + (t % (TOKENS // 2))[None, :]
    both = tl.load(of_tokens, there[:, None], 0x88).to(tl.int32)
    coefficients = ((both >> (t // (TOKENS // 2) * 4)[None, :]) & 15) - 8

    column = tl.arange(0, PAGES * TOKENS)
    token = column % TOKENS
    here = first + column // TOKENS
    inside = here < count
    of_column = tl.load(pages + row * pages_row + here, inside, 0).to(tl.int64)
    bytes_ = codes + (head * capacity.to(tl.int64) + of_column) * code_bytes + DIM
    # A byte holds coordinates j and j + 4 of a group of eight; in a last group of four, it holds
    # coordinate j of two tokens.
    eight = (j // 8 * 4 * TOKENS + j % 4)[:, None]
    alone = (j // 8 * 8 + 4 >= COORDINATES)[:, None]
    at = eight + 4 * tl.where(alone, (token % (TOKENS // 2))[None, :], token[None, :])
    shift = 4 * tl.where(alone, (token // (TOKENS // 2))[None, :], (j // 4 % 2)[:, None])
    kept = (j < COORDINATES)[:, None] & inside[None, :]
    code = ((tl.load(bytes_[None, :] + at, kept, 0x88).to(tl.int32) >> shift) & 15) - 8
    score_row = (row * tl.num_programs(1) + head) * GROUP + g
    weighing = weights + score_row[:, None] * COORDINATES + j[None, :]
    mine = tl.load(weighing, asked[:, None] & (j < COORDINATES)[None, :], 0.0)
    largest = tl.max(tl.abs(mine), 1)
    mine = _rounded(mine, largest).to(low.dtype)
    each = tl.dot(mine, code.to(low.dtype), input_precision="ieee")
    each = tl.reshape(each, (GROUP_PADDED, PAGES, TOKENS))
    wider = tl.load(scales + SCALES * slot + 1, there, 1.0)
    each *= (wider * scale)[None, :, None] * (largest / 127)[:, None, None]
    each += own[:, :, None] * coefficients.to(tl.float32)[None, :, :]
    highest = tl.max(each, 2)
    mass = tl.sum(tl.exp2(each - highest[:, :, None]), 2)
    logits = mean * scale + highest + tl.log2(mass)
    tl.store(found + score_row[:, None] * n + b[None, :], logits, asked[:, None] & there[None, :])


@triton.jit
def _rounded(
    rows,
    largest,
):
    """Return integers from -127 to 127."""
    inverse = 127 / tl.maximum(largest, 1e-30)
    return tl.floor(rows.to(tl.float32) * inverse[:, None] + 0.5).to(rows.dtype)


@triton.jit
def _along(
    low,
    high,
    bytes_,
    there,
):
    """Return products of queries with packed rows, whose bytes hold a number of each half."""
    both = tl.load(bytes_, there, 0x88).to(tl.int32)
    found = tl.dot(low, ((both & 15) - 8).to(low.dtype), input_precision="ieee")
    return tl.dot(high, ((both >> 4) - 8).to(low.dtype), found, input_precision="ieee")


@triton.jit
def _choose(
    logits,
    pages,
    counts,
    chosen,
    newest,
    found,
    pages_row,
    heads_apart,
    n,
    most,
    GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SIZE: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Choose from all pages of one row and KV head, and write their places in the cache, or their
    positions in the row's context."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, wanted = tl.load(counts + row), tl.load(chosen + row) - 1
    at = tl.arange(0, SIZE)
    there = at < count
    of_row = row * tl.num_programs(1) + head
    total = tl.zeros((SIZE,), tl.float32)
    for g in tl.static_range(GROUP):
        each = tl.load(logits + (of_row * GROUP + g) * n + at, there, -float("inf"))
        mass = tl.exp2(each - tl.max(each, 0))
        total += mass / tl.sum(mass, 0)
    bits = total.to(tl.int32, bitcast=True)
    always = (at < FIRST) | (at >= count - LAST)
    bits = tl.where(always, 0x7FFFFFFF, bits)
    bits = tl.where(there, bits, -1)

    lowest = 0
    for shift in tl.static_range(31):
        tried = lowest | (1 << (30 - shift))
        enough = tl.sum((bits >= tried).to(tl.int32), 0) >= wanted
        lowest = tl.where(enough, tried, lowest)
    above = bits > lowest
    equal = bits == lowest
    missing = wanted - tl.sum(above.to(tl.int32), 0)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing))
    place = tl.cumsum(taken.to(tl.int32), 0) - 1
    into = found + of_row * most
    if PLACES:
        page = tl.load(pages + row * pages_row + at, there, 0)
        tl.store(into + place, (page * heads_apart + head).to(tl.int32), taken)
        tl.store(into + wanted, (tl.load(newest + row) * heads_apart + head).to(tl.int32))
    else:
        tl.store(into + place, at, taken)
        tl.store(into + wanted, count)
