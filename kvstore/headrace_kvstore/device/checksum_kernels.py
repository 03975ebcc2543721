"""`checksum.copy_sum` as a Triton kernel: copies KV in device memory and sums it in the same pass.

One program takes one run of bytes. A lane's second sum adds up its first after every row, so word w
of row r counts rows - r times, and rows can be summed in any order:

    a[l] = sum of w[r, l];  b[l] = sum of (rows - r) w[r, l]        modulo 2^64

The sums equal the compiled kernels' to the bit, whichever side made them. Addresses are of memory
that the device reaches, as integers; nothing checks them.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace_kvstore.blocks.checksum import length_mix

WORD_BYTES = 4
ROWS_AT_ONCE = 64
"""Rows of 64 bytes that a program reads at once."""
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)


def copy_sum(dst: Tensor | None, src: Tensor, piece_bytes: int, seeds: Tensor) -> Tensor:
    """Copy runs of bytes and sum the bytes read; queued on the current stream.

    Args:
        dst, src: int64 [runs, pieces], addresses. Without `dst` nothing is copied.
        piece_bytes: of each piece, a multiple of 4.
        seeds: int64 [runs], the bits of u64.

    Returns:
        int64 [runs], the bits of the u64 sums.

    Raises:
        ValueError: pieces that are no whole words.
    """
    if piece_bytes % WORD_BYTES:
        raise ValueError(f"pieces of {piece_bytes} bytes are no whole words of {WORD_BYTES}")
    runs, pieces = src.shape
    sums = torch.empty(runs, dtype=torch.int64, device=src.device)
    words = pieces * piece_bytes // WORD_BYTES
    length = np.array(length_mix(pieces * piece_bytes)).view(np.int64)
    if runs:
        _copy_sum[(runs,)](
            src if dst is None else dst,
            src,
            seeds,
            sums,
            words,
            int(length.item()),
            PIECES=pieces,
            PIECE_WORDS=piece_bytes // WORD_BYTES,
            COPY=dst is not None,
            ROWS=ROWS_AT_ONCE,
        )
    return sums


@triton.jit
def _copy_sum(
    dst,
    src,
    seeds,
    sums,
    words,
    length: tl.int64,
    PIECES: tl.constexpr,
    PIECE_WORDS: tl.constexpr,
    COPY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy and sum one run."""
    run = tl.program_id(0)
    lanes = tl.arange(0, 16)
    rows = tl.cdiv(words, 16)
    a = tl.zeros([16], tl.uint64)
    b = tl.zeros([16], tl.uint64)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        word = row[:, None] * 16 + lanes[None, :]
        inside = word < words
        piece = word // PIECE_WORDS
        offset = (word - piece * PIECE_WORDS).to(tl.int64) * 4
        places = run * PIECES + piece
        if PIECES == 1:
            source = tl.load(src + run) + offset
        else:
            source = tl.load(src + places, inside, 0) + offset
        value = tl.load(source.to(tl.pointer_type(tl.int32)), inside, 0)
        if COPY:
            if PIECES == 1:
                target = tl.load(dst + run) + offset
            else:
                target = tl.load(dst + places, inside, 0) + offset
            tl.store(target.to(tl.pointer_type(tl.int32)), value, inside)
        wide = value.to(tl.int64).to(tl.uint64, bitcast=True) & 0xFFFFFFFF
        a += tl.sum(wide, 0)
        weight = (rows - row).to(tl.int64).to(tl.uint64, bitcast=True)
        b += tl.sum(wide * weight[:, None], 0)
    order = (lanes + 1).to(tl.int64).to(tl.uint64, bitcast=True) * GAMMA
    folded = tl.sum(_mix(_mix(a + order) ^ b), 0)
    seed = tl.load(seeds + run).to(tl.uint64, bitcast=True)
    mixed = length.to(tl.uint64, bitcast=True)
    total = _mix(_mix(seed ^ mixed) ^ folded)
    tl.store(sums + run, total.to(tl.int64, bitcast=True))


@triton.jit
def _mix(z):
    """splitmix64's finaliser."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
