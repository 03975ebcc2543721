"""Makes summaries: the mean of each page's keys, and each key's deviation from it, in 4 bits.

Coordinates in a shared basis are one product. The part of the deviations that they leave out, C, is
approximated by U V, directions of the page's own: U [tokens, rank] is orthonormal, the leading
eigenvectors of the Gram matrix C C^T, and V = U^T C. The eigenvectors come from orthogonal
iteration (Golub and Van Loan, section 8.2.4). It starts from the tokens that lie farthest from the
span of earlier ones (pivoted Cholesky). A few steps are enough, since only the energy that U spans
counts, not each vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace_decode.sparse.summary_layout import jit

STEPS, PRODUCTS = 3, 4
"""Steps of orthogonal iteration, and products with the Gram matrix in each step."""
TINY = np.float32(1e-30)


@jit
def summarise(
    keys: Any, pages: Any, codes: Any, scales: Any, origin: Any, into: Any, back: Any, rank: int
) -> None:
    """Summarise each page and head and store it.

    Args:
        keys: float32 [n, kv_heads, tokens, dim], contiguous.
        pages: int64 [n], where each is stored.
        codes: uint8 [kv_heads, capacity, code bytes].
        scales: float32 [kv_heads, capacity, scales].
        origin: float32 [kv_heads, dim].
        into: float32 [kv_heads, coordinates, dim], from deviations to coordinates of scale 1.
        back: float32 [kv_heads, coordinates, dim], from coordinates to deviations.
        rank: number of own directions.
    """
    tokens, (_, coordinates, dim) = keys.shape[2], into.shape
    centred = np.empty((tokens, dim), np.float32)
    mean = np.empty(dim, np.float32)
    placed = np.empty((tokens, coordinates), np.float32)
    gram = np.empty((tokens, tokens), np.float32)
    basis = np.empty((rank, tokens), np.float32)
    image = np.empty((rank, tokens), np.float32)
    directions = np.empty((rank, dim), np.float32)
    eight = np.empty(8 * tokens, np.float32)
    first_own = 2 if coordinates else 1
    coordinates_at = (1 + rank) * dim // 2
    coefficients_at = coordinates_at + coordinates * tokens // 2
    for n in range(pages.size):
        for head in range(codes.shape[0]):
            code, scale = codes[head, pages[n]], scales[head, pages[n]]
            _centre(keys[n, head], mean, centred)
            for d in range(dim):
                mean[d] -= origin[head, d]
            scale[0] = _scaled(mean)
            _pack(mean, code, 0)
            if coordinates:
                scale[1] = _placed(centred, into[head], back[head], placed)
                for first in range(0, coordinates, 8):
                    count = min(8, coordinates - first)
                    for j in range(count):
                        for i in range(tokens):
                            eight[(j // 4 * tokens + i) * 4 + j % 4] = placed[i, first + j]
                    _pack(eight[: count * tokens], code, coordinates_at + first * tokens // 2)
            _gram(centred, gram)
            _start(gram, basis)
            for _ in range(STEPS):
                for _ in range(PRODUCTS // 2):
                    _multiplied(basis, gram, image)
                    _multiplied(image, gram, basis)
                _orthonormal(basis, image)
                basis[:] = image
            _multiplied(basis, centred, directions)
            for j in range(rank):
                scale[first_own + j] = _scaled(directions[j]) * _scaled(basis[j])
                _pack(directions[j], code, (1 + j) * dim // 2)
                _pack(basis[j], code, coefficients_at + j * tokens // 2)


@jit
def _placed(centred: Any, into: Any, back: Any, placed: Any) -> Any:
    """Write the coordinates of deviations, divided by the width of the page's steps; return that.

    The values that their codes stand for are subtracted from the deviations.
    """
    tokens, (coordinates, dim) = len(centred), into.shape
    largest = np.float32(0)
    for i in range(tokens):
        for j in range(coordinates):
            total = np.float32(0)
            for d in range(dim):
                total += centred[i, d] * into[j, d]
            placed[i, j] = total
            largest = max(largest, abs(total))
    # Coarser steps where a coordinate lies beyond the codes.
    wider = max(np.float32(1), largest / np.float32(7))
    inverse = np.float32(1) / wider
    for i in range(tokens):
        for j in range(coordinates):
            placed[i, j] *= inverse
            value = np.floor(placed[i, j] + np.float32(0.5)) * wider
            for d in range(dim):
                centred[i, d] -= value * back[j, d]
    return wider


@jit
def _centre(keys: Any, mean: Any, centred: Any) -> None:
    tokens, dim = keys.shape
    mean[:] = 0
    for i in range(tokens):
        for d in range(dim):
            mean[d] += keys[i, d]
    part = np.float32(1.0 / tokens)
    for d in range(dim):
        mean[d] *= part
    for i in range(tokens):
        for d in range(dim):
            centred[i, d] = keys[i, d] - mean[d]


@jit
def _gram(centred: Any, gram: Any) -> None:
    """Compute the Gram matrix over its trace. Entries are at most 1, so powers do not overflow."""
    tokens, dim = centred.shape
    trace = np.float32(0)
    for i in range(tokens):
        for k in range(i + 1):
            total = np.float32(0)
            for d in range(dim):
                total += centred[i, d] * centred[k, d]
            gram[i, k] = total
        trace += gram[i, i]
    inverse = np.float32(1) / trace if trace > TINY else np.float32(0)
    for i in range(tokens):
        for k in range(i + 1):
            gram[i, k] *= inverse
            gram[k, i] = gram[i, k]


@jit
def _start(gram: Any, basis: Any) -> None:
    """Write the columns of a pivoted Cholesky factorisation."""
    rank, tokens = basis.shape
    left = np.empty(tokens, np.float32)
    for i in range(tokens):
        left[i] = gram[i, i]
    for j in range(rank):
        pivot = 0
        for i in range(tokens):
            if left[i] > left[pivot]:
                pivot = i
        if left[pivot] <= TINY:
            basis[j] = 0
            continue
        inverse = np.float32(1) / np.sqrt(left[pivot])
        for i in range(tokens):
            basis[j, i] = gram[i, pivot]
        for k in range(j):
            weight = basis[k, pivot]
            for i in range(tokens):
                basis[j, i] -= weight * basis[k, i]
        for i in range(tokens):
            basis[j, i] *= inverse
            left[i] -= basis[j, i] * basis[j, i]
        left[pivot] = 0


@jit
def _multiplied(rows: Any, matrix: Any, into: Any) -> None:
    """Compute rows @ matrix."""
    for j in range(rows.shape[0]):
        into[j] = 0
        for i in range(matrix.shape[0]):
            weight = rows[j, i]
            for k in range(matrix.shape[1]):
                into[j, k] += weight * matrix[i, k]


@jit
def _orthonormal(rows: Any, into: Any) -> None:
    """Apply modified Gram-Schmidt. A row in the span of earlier ones becomes zero."""
    count, n = rows.shape
    for j in range(count):
        before = np.float32(0)
        for i in range(n):
            into[j, i] = rows[j, i]
            before += rows[j, i] * rows[j, i]
        for _ in range(2):
            for k in range(j):
                along = np.float32(0)
                for i in range(n):
                    along += into[k, i] * into[j, i]
                for i in range(n):
                    into[j, i] -= along * into[k, i]
        norm = np.float32(0)
        for i in range(n):
            norm += into[j, i] * into[j, i]
        kept = norm > np.float32(1e-10) * before and norm > TINY
        inverse = np.float32(1) / np.sqrt(norm) if kept else np.float32(0)
        for i in range(n):
            into[j, i] *= inverse


@jit
def _scaled(row: Any) -> Any:
    """Divide a row by its scale, to between -7 and 7; return the scale."""
    largest = np.float32(0)
    for i in range(row.size):
        largest = max(largest, abs(row[i]))
    scale = largest / np.float32(7)
    inverse = np.float32(1) / scale if scale > TINY else np.float32(0)
    for i in range(row.size):
        row[i] *= inverse
    return scale


@jit
def _pack(row: Any, code: Any, at: int) -> None:
    """Write codes of numbers between -7 and 7, two in a byte."""
    half = row.size // 2
    for i in range(half):
        low = np.int32(np.floor(row[i] + np.float32(8.5)))
        high = np.int32(np.floor(row[half + i] + np.float32(8.5)))
        code[at + i] = np.uint8(low | (high << 4))
