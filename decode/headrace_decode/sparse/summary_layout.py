"""Layout of the codes of a page's summary, and options for compiling the loops over them.

A summary is the mean and, for each token, its deviation from the mean: coordinates in a basis that
all pages share (`basis`), and for the rest coefficients u_j of directions V_j of the page's own.
Codes are 4 bits, stored as 1 to 15, that is value / scale + 8:

    mean           [dim]
    directions     [rank][dim], each row packed separately
    coordinates    in groups of eight, each packed separately: [2][tokens][4]; a last group may
                   have four, [tokens][4]
    coefficients   [rank][tokens], each row packed separately

A byte holds elements i (low half) and i + n/2 (high half) of the n that are packed together. One
mask and one shift therefore unpack a register. Four adjacent bytes belong to one token or one
direction. CPUs multiply them with four bytes of a query, and add up, in one instruction.

The first scale is that of the mean. If there are coordinates, the next is the factor by which the
page's steps are wider than the basis's. Then each own direction has one scale, of V_j times u_j,
which are only used as a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace_kvstore import numba_jit as compiled

jit: Any = compiled.jit(
    nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"}
)
"""Sums may be taken in any order, so that they become SIMD code; infinities and NaN keep their
meaning."""


@dataclass(frozen=True)
class SummaryLayout:
    """The shape of one head's summary of one page.

    Attributes:
        page_tokens: tokens of a page; even.
        head_dim: channels of a key; a multiple of 8.
        rank: number of own directions, 1 to `page_tokens` - 1.
        coordinates: number of coordinates in a basis; a multiple of 4, 0 to `head_dim`.
    """

    page_tokens: int
    head_dim: int
    rank: int
    coordinates: int = 0

    def __post_init__(self) -> None:
        if self.page_tokens % 2 or self.head_dim % 8 or self.head_dim <= 0:
            raise ValueError(f"{self}: page_tokens must be even, head_dim a multiple of 8")
        if self.coordinates % 4 or not 0 <= self.coordinates <= self.head_dim:
            raise ValueError(f"{self}: coordinates must be a multiple of 4, 0 to head_dim")
        if not 1 <= self.rank < self.page_tokens:
            raise ValueError(f"{self}: rank must be 1 to page_tokens - 1")

    @property
    def first_own(self) -> int:
        """Index of the first own direction's scale."""
        return 2 if self.coordinates else 1

    @property
    def scales(self) -> int:
        return self.first_own + self.rank

    @property
    def coordinates_at(self) -> int:
        """Byte at which coordinates begin; own directions begin at `head_dim` / 2."""
        return (1 + self.rank) * self.head_dim // 2

    @property
    def coefficients_at(self) -> int:
        return self.coordinates_at + self.coordinates * self.page_tokens // 2

    @property
    def code_bytes(self) -> int:
        return self.coefficients_at + self.rank * self.page_tokens // 2

    @property
    def nbytes(self) -> int:
        """Bytes of the summary of one page and head, fp32 scales included."""
        return self.code_bytes + 4 * self.scales

    @property
    def bytes_vs_k(self) -> float:
        """Bytes of a summary over bytes of the page's keys in 16 bits."""
        return self.nbytes / (2 * self.page_tokens * self.head_dim)
