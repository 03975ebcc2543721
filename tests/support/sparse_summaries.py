"""What the bytes of summaries say, read without the compiled code."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_decode.sparse.basis import Basis
from headrace_decode.sparse.summary_layout import SummaryLayout

Rows = NDArray[np.float32]


def unpacked(
    layout: SummaryLayout, basis: Basis, codes: NDArray[np.uint8], scales: Rows, head: int
) -> tuple[Tensor, Tensor]:
    """Mean [dim], less the basis's origin, and what the page's keys add to it [tokens, dim].

    Args:
        codes: [layout.code_bytes], of one page of `head`.
        scales: [layout.scales].
    """
    mean, coordinates, own = parts(layout, codes, scales)
    shared = coordinates @ torch.from_numpy(basis.back[head]).double()
    return mean.float(), (shared + own).float()


def parts(
    layout: SummaryLayout, codes: NDArray[np.uint8], scales: Rows
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [dim], coordinates [tokens, coordinates], and what own directions add [tokens, dim],
    in float64.

    Args:
        codes, scales: as of `unpacked`.
    """
    tokens, dim = layout.page_tokens, layout.head_dim

    def row(first_byte: int, length: int) -> NDArray[np.float64]:
        part = codes[first_byte : first_byte + length // 2]
        return np.concatenate([part & 15, part >> 4]).astype(np.float64) - 8

    coordinates, own = np.zeros((tokens, layout.coordinates)), np.zeros((tokens, dim))
    for first in range(0, layout.coordinates, 8):
        here = slice(first, min(first + 8, layout.coordinates))
        at = layout.coordinates_at + first * tokens // 2
        fours = row(at, (here.stop - first) * tokens).reshape(-1, tokens, 4)
        coordinates[:, here] = fours.swapaxes(0, 1).reshape(tokens, -1) * scales[1]
    for j, scale in enumerate(scales[layout.first_own :]):
        coefficients = row(layout.coefficients_at + j * tokens // 2, tokens)
        own += np.outer(coefficients, row((1 + j) * dim // 2, dim)) * scale
    mean = row(0, dim) * scales[0]
    return torch.from_numpy(mean), torch.from_numpy(coordinates), torch.from_numpy(own)


def logits(
    layout: SummaryLayout,
    basis: Basis,
    codes: NDArray[np.uint8],
    scales: Rows,
    head: int,
    queries: Tensor,
) -> Tensor:
    """Logarithm of the attention to pages, but for the softmax's sum, in float64 [m, n].

    Args:
        codes: [n, layout.code_bytes], of pages of `head`.
        scales: [n, layout.scales].
        queries: [m, dim], times the scale of logits.
    """
    found = []
    weights = queries.float() @ torch.from_numpy(basis.back[head]).T
    for code, scale in zip(codes, scales, strict=True):
        mean, coordinates, directions = parts(layout, code, scale)
        rest = rounded(queries) @ directions.T
        if layout.coordinates:
            rest += rounded(weights) @ coordinates.T
        found.append(rounded(queries) @ mean + rest.logsumexp(-1))
    return torch.stack(found, -1)


def rounded(rows: Tensor) -> Tensor:
    """In 8 bits and back, each row with a step of its own; in float64."""
    step = rows.float().abs().amax(-1, keepdim=True) / 127
    whole = (rows.float() / step.clamp(min=1e-30) + 0.5).floor()
    return whole.double() * step.double()
