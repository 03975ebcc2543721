"""Summaries of all pages of a layer on a device, in the bytes that `summary_layout` describes.

A page's summary is made again only if the sum of its keys' bytes differs from the sum that it was
made from. A caller may therefore name pages repeatedly, and writers of KV need not report a write.
The sum is a multilinear hash, modulo 2^64, of the bits of the keys' elements (16 or 32), with a
factor for each position (Lemire and Kaser, arXiv 1008.1715).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.kernels.cache import HeadCache
from headrace_decode.sparse.summaries import RANK_BESIDE
from headrace_decode.sparse.summarising import PRODUCTS, STEPS
from headrace_decode.sparse.summary_layout import SummaryLayout

LEAST = 16
"""Minimum size of each side of `tl.dot`."""
TINY = tl.constexpr(1e-30)
SCALES = tl.constexpr(3)
"""Scales of a summary: of the mean, of coordinates, and of the one own direction."""


class DeviceSummaries:
    """Summaries of one layer's pages, in memory of a size that is fixed at the start.

    Attributes:
        layout: layout of one page's summary for one head.
        codes: uint8 [kv_heads, capacity, layout.code_bytes].
        scales: float32 [kv_heads, capacity, 3].
        sums: int64 [kv_heads, capacity], sum of the keys that a summary was made from; 0: none.
        back: float32 [kv_heads, rank, head_dim], as `Basis.back`.
    """

    def __init__(self, capacity: int, page_tokens: int, basis: Basis, device: str) -> None:
        """
        Args:
            capacity: number of pages that can be stored; they are numbered like the cache's blocks.

        Raises:
            ValueError: the sizes of pages and heads are not powers of 2 of at least 16 and 32.
        """
        kv_heads, dim, rank = basis.into.shape
        if page_tokens & (page_tokens - 1) or dim & (dim - 1) or page_tokens < 16 or dim < 32:
            raise ValueError(f"pages of {page_tokens} tokens, heads of {dim}: no kernel for these")
        self.layout = SummaryLayout(page_tokens, dim, RANK_BESIDE, rank)
        self.codes = torch.full(
            (kv_heads, capacity, self.layout.code_bytes), 0x88, dtype=torch.uint8, device=device
        )
        self.scales = torch.zeros((kv_heads, capacity, self.layout.scales), device=device)
        self.sums = torch.zeros((kv_heads, capacity), dtype=torch.int64, device=device)
        self._origin, self._into, self.back = (
            torch.from_numpy(one).to(device) for one in (basis.origin, basis.into, basis.back)
        )

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.codes, self.scales, self.sums))

    def refresh(self, cache: HeadCache, pages: Tensor, slots: Tensor | None = None) -> None:
        """Bring the summaries of pages up to date.

        Args:
            cache: cache of the layer; its keys are finite.
            pages: int64 [n], blocks of the cache; a negative one is left out.
            slots: int64 [n], index of each page's summary, below the capacity; None: the pages.
        """
        if not len(pages):
            return
        layout, kv_heads = self.layout, self.codes.shape[0]
        _refresh[len(pages), kv_heads](
            cache.keys,
            pages,
            pages if slots is None else slots,
            self.codes,
            self.scales,
            self.sums,
            self._origin,
            self._into,
            self.back,
            cache.keys.stride(0),
            cache.keys.stride(1),
            cache.heads_apart,
            self.codes.shape[1],
            layout.code_bytes,
            TOKENS=layout.page_tokens,
            DIM=layout.head_dim,
            COORDINATES=layout.coordinates,
            PADDED=max(LEAST, triton.next_power_of_2(-(-layout.coordinates // 8) * 4)),
            WIDE=cache.keys.element_size() == 4,
            ROUNDS=STEPS,
            PRODUCTS=PRODUCTS,
        )


@triton.jit
def _refresh(
    keys,
    pages,
    slots,
    codes,
    scales,
    sums,
    origin,
    into,
    back,
    place_stride,
    token_stride,
    heads_apart,
    capacity,
    code_bytes,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    COORDINATES: tl.constexpr,
    PADDED: tl.constexpr,
    WIDE: tl.constexpr,
    ROUNDS: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Summarise one page of one head. A byte holds elements i and i + n / 2 of those packed
    together: coordinates j and j + 4 of a group of eight, or in a last group of four, tokens i and
    i + TOKENS / 2. PADDED: padded number of coordinates in the first fours of all groups."""
    page, head = tl.load(pages + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    if page < 0:
        return
    i = tl.arange(0, TOKENS)
    d = tl.arange(0, DIM // 2)
    j = tl.arange(0, PADDED)
    at = (page * heads_apart + head) * place_stride + i[:, None] * token_stride + d[None, :]
    low, high = tl.load(keys + at), tl.load(keys + at + DIM // 2)
    slot = head.to(tl.int64) * capacity + tl.load(slots + tl.program_id(0)).to(tl.int64)

    number = (i[:, None] * DIM + d[None, :]).to(tl.int64)
    found = _sum(low, number, WIDE) + _sum(high, number + DIM // 2, WIDE)
    found = tl.where(found == 0, 1, found)
    if tl.load(sums + slot) == found:
        return

    low, high = low.to(tl.float32), high.to(tl.float32)
    low_mean, high_mean = tl.sum(low, 0) / TOKENS, tl.sum(high, 0) / TOKENS
    low, high = low - low_mean[None, :], high - high_mean[None, :]
    first, second = j // 4 * 8 + j % 4, j // 4 * 8 + 4 + j % 4
    paired, alone = second < COORDINATES, (first < COORDINATES) & (second >= COORDINATES)
    there = first < COORDINATES
    column = into + head * DIM * COORDINATES + d[:, None] * COORDINATES
    below = column + DIM // 2 * COORDINATES
    a = _product(low, column + first[None, :], there[None, :])
    a += _product(high, below + first[None, :], there[None, :])
    b = _product(low, column + second[None, :], paired[None, :])
    b += _product(high, below + second[None, :], paired[None, :])
    largest = tl.maximum(tl.max(tl.abs(a)), tl.max(tl.abs(b)))
    # Coarser steps where a coordinate lies beyond the codes.
    wider = tl.maximum(1.0, largest / 7)
    a, b = a / wider, b / wider
    start = codes + slot * code_bytes
    fours = start + DIM + (j // 4 * 4 * TOKENS + j % 4)[None, :]
    tl.store(fours + 4 * i[:, None], _packed(a, b), paired[None, :])
    tokens = tl.reshape(_code(a), (2, TOKENS // 2, PADDED))
    both = tl.sum(tokens << (4 * tl.arange(0, 2))[:, None, None], 0)
    half = tl.arange(0, TOKENS // 2)
    tl.store(fours + 4 * half[:, None], both.to(tl.uint8), alone[None, :])
    tl.store(scales + SCALES * slot + 1, wider)

    low_mean -= tl.load(origin + head * DIM + d)
    high_mean -= tl.load(origin + head * DIM + DIM // 2 + d)
    scale = tl.maximum(tl.max(tl.abs(low_mean)), tl.max(tl.abs(high_mean))) / 7
    inverse = _inverse(scale)
    tl.store(start + d, _packed(low_mean * inverse, high_mean * inverse))
    tl.store(scales + SCALES * slot, scale)

    a, b = (_code(a) - 8).to(tl.float32) * wider, (_code(b) - 8).to(tl.float32) * wider
    row = back + head * DIM * COORDINATES + d[None, :]
    low -= _product(a, row + first[:, None] * DIM, there[:, None])
    low -= _product(b, row + second[:, None] * DIM, paired[:, None])
    high -= _product(a, row + first[:, None] * DIM + DIM // 2, there[:, None])
    high -= _product(b, row + second[:, None] * DIM + DIM // 2, paired[:, None])
    u = _leading(low, high, ROUNDS, PRODUCTS)
    low_own, high_own = tl.sum(u[:, None] * low, 0), tl.sum(u[:, None] * high, 0)
    scale = tl.maximum(tl.max(tl.abs(low_own)), tl.max(tl.abs(high_own))) / 7
    of_u = tl.max(tl.abs(u)) / 7
    inverse = _inverse(scale)
    tl.store(start + DIM // 2 + d, _packed(low_own * inverse, high_own * inverse))
    halves = tl.reshape(_code(u * _inverse(of_u)), (2, TOKENS // 2))
    both = tl.sum(halves << (4 * tl.arange(0, 2))[:, None], 0)
    tl.store(start + DIM + COORDINATES * TOKENS // 2 + half, both.to(tl.uint8))
    tl.store(scales + SCALES * slot + 2, scale * of_u)
    tl.store(sums + slot, found)


@triton.jit
def _product(
    rows,
    columns,
    there,
):
    return tl.dot(rows, tl.load(columns, there, 0.0), input_precision="ieee")


@triton.jit
def _leading(
    low,
    high,
    ROUNDS: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Return the leading eigenvector of the Gram matrix of rows in two halves, like
    `summarising`."""
    gram = tl.dot(low, tl.trans(low), input_precision="ieee")
    gram = tl.dot(high, tl.trans(high), gram, input_precision="ieee")
    at = tl.arange(0, gram.shape[0])
    diagonal = tl.sum(tl.where(at[:, None] == at[None, :], gram, 0.0), 1)
    inverse = _inverse(tl.sum(diagonal))
    gram *= inverse
    u = tl.sum(tl.where(at[None, :] == tl.argmax(diagonal, 0), gram, 0.0), 1)
    for _ in tl.static_range(ROUNDS):
        u *= _inverse(tl.sqrt(tl.sum(u * u)))
        for _ in tl.static_range(PRODUCTS):
            u = tl.sum(gram * u[None, :], 1)
    return u * _inverse(tl.sqrt(tl.sum(u * u)))


@triton.jit
def _inverse(
    x,
):
    """Return 1 / x; 0 if x is nearly 0."""
    return tl.where(x > TINY, 1.0 / tl.maximum(x, TINY), 0.0)


@triton.jit
def _packed(
    low,
    high,
):
    """Return codes of numbers between -7 and 7, two in a byte."""
    return (_code(low) | (_code(high) << 4)).to(tl.uint8)


@triton.jit
def _code(
    x,
):
    return tl.floor(x + 8.5).to(tl.int32)


@triton.jit
def _sum(
    part,
    number,
    WIDE: tl.constexpr,
):
    """Return the sum of a part of a page's keys, whose elements have these numbers in the page."""
    if WIDE:
        bits = part.to(tl.int32, bitcast=True).to(tl.int64)
    else:
        bits = part.to(tl.int16, bitcast=True).to(tl.int64)
    # The factors are those of SplitMix64.
    x = (number + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return tl.sum(tl.sum(x * bits, 1), 0)
