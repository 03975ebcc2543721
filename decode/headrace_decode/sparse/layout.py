"""Where the codes of a unit's summary lie, and how the loops over them are compiled.

A summary is the mean, `rank` directions V_j over the head's dimensions, and `rank` rows u_j of
coefficients over the unit's tokens. Codes are 4 bits, stored as 1 to 15, that is value / scale + 8:

    mean           [dim]
    directions     [dim / 4][rank][4], so that dot products with all of them run side by side
    coefficients   [rank][tokens], a row after the other

Each line is packed by itself, but each row of coefficients too: a byte holds elements i (low half)
and i + n/2 (high half) of n, so that the halves unpack into neighbouring lanes.

There are 1 + rank scales: of the mean, and of each direction times its coefficients, which only
ever meet as a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace_kvstore import compiled

jit: Any = compiled.jit(
    nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"}
)
"""Sums may be taken in any order, so that they become SIMD code; infinities and NaN keep their
meaning."""


@dataclass(frozen=True)
class Layout:
    """The shape of one head's summary of one unit.

    Attributes:
        unit_tokens: of a unit; even.
        head_dim: of a key; a multiple of 8.
        rank: directions beside the mean, at least 1 and less than `unit_tokens`.
    """

    unit_tokens: int
    head_dim: int
    rank: int

    def __post_init__(self) -> None:
        if self.unit_tokens % 2 or self.head_dim % 8 or self.head_dim <= 0:
            raise ValueError(f"{self}: unit_tokens must be even, head_dim a multiple of 8")
        if not 1 <= self.rank < self.unit_tokens:
            raise ValueError(f"{self}: rank must be 1 to unit_tokens - 1")

    @property
    def scales(self) -> int:
        return self.rank + 1

    @property
    def code_bytes(self) -> int:
        return ((self.rank + 1) * self.head_dim + self.rank * self.unit_tokens) // 2

    @property
    def nbytes(self) -> int:
        """Of the summary of one unit and head, fp32 scales included."""
        return self.code_bytes + 4 * self.scales

    @property
    def bytes_vs_k(self) -> float:
        """Bytes of a summary over bytes of the unit's keys in 16 bits."""
        return self.nbytes / (2 * self.unit_tokens * self.head_dim)
