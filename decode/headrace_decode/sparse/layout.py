"""Where the codes of a unit's summary lie, and how the loops over them are compiled.

A summary is rank + 1 rows over the head's dimensions (the mean, then the directions V_j) and rank
rows over the unit's tokens (the coefficients u_j). Codes are 4 bits, stored as 1 to 15, that is
value / scale + 8. A byte holds elements i (low half) and i + n/2 (high half) of a row of n, so that
the halves unpack into neighbouring lanes.

Each row over dimensions has a scale. That of row 1 + j is the product of those of V_j and u_j:
the two only ever meet as a product.
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
        head_dim: of a key; even.
        rank: directions beside the mean, at least 1 and less than `unit_tokens`.
    """

    unit_tokens: int
    head_dim: int
    rank: int

    def __post_init__(self) -> None:
        if self.unit_tokens % 2 or self.head_dim % 2 or self.head_dim <= 0:
            raise ValueError(f"{self}: unit_tokens and head_dim must be even and positive")
        if not 1 <= self.rank < self.unit_tokens:
            raise ValueError(f"{self}: rank must be 1 to unit_tokens - 1")

    @property
    def rows(self) -> int:
        """Rows over dimensions, each with a scale."""
        return self.rank + 1

    @property
    def code_bytes(self) -> int:
        return (self.rows * self.head_dim + self.rank * self.unit_tokens) // 2

    @property
    def nbytes(self) -> int:
        """Of the summary of one unit and head, fp32 scales included."""
        return self.code_bytes + 4 * self.rows

    @property
    def bytes_vs_k(self) -> float:
        """Bytes of a summary over bytes of the unit's keys in 16 bits."""
        return self.nbytes / (2 * self.unit_tokens * self.head_dim)
