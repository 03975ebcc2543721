"""What the bytes of summaries say, read without the compiled code."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.layout import Layout

Rows = NDArray[np.float32]


def unpacked(
    layout: Layout, basis: Basis, codes: NDArray[np.uint8], scales: Rows, head: int
) -> tuple[Tensor, Tensor]:
    """Mean [dim], less the basis's origin, and what the unit's keys add to it [tokens, dim].

    Args:
        codes: [layout.code_bytes], of one unit of `head`.
        scales: [layout.scales].
    """
    tokens, dim, rank = layout.unit_tokens, layout.head_dim, layout.rank

    def row(first_byte: int, length: int) -> Rows:
        part = codes[first_byte : first_byte + length // 2]
        return np.concatenate([part & 15, part >> 4]).astype(np.float32) - 8

    rest = np.zeros((tokens, dim), np.float32)
    if count := layout.coordinates:
        coordinates = row(dim // 2, count * tokens).reshape(count, tokens)
        rest += coordinates.T @ basis.back[head] * scales[1]
    directions = row(layout.directions_at, rank * dim).reshape(dim // 4, rank, 4)
    for j, scale in enumerate(scales[layout.first_own :]):
        coefficients = row(layout.coefficients_at + j * tokens // 2, tokens)
        rest += np.outer(coefficients, directions[:, j].ravel()) * scale
    return torch.from_numpy(row(0, dim) * scales[0]), torch.from_numpy(rest)


def logits(
    layout: Layout,
    basis: Basis,
    codes: NDArray[np.uint8],
    scales: Rows,
    head: int,
    queries: Tensor,
) -> Tensor:
    """Logarithm of the attention to units, but for the softmax's sum, in float64 [m, n].

    Args:
        codes: [n, layout.code_bytes], of units of `head`.
        scales: [n, layout.scales].
        queries: [m, dim], times the scale of logits.
    """
    found = []
    for code, scale in zip(codes, scales, strict=True):
        mean, rest = (part.double() for part in unpacked(layout, basis, code, scale, head))
        found.append(queries.double() @ mean + (queries.double() @ rest.T).logsumexp(-1))
    return torch.stack(found, -1)
