"""The directions in which queries look at keys, by which the keys of a page are summarised.

`headrace lab calibrate sparse` learns them (`headrace_lab.sparse.moments`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
COORDINATES = 20


@dataclass(frozen=True)
class Basis:
    """Coordinates of one layer's keys, the weightiest first, each in steps of its 4-bit code.

    Attributes:
        origin: float32 [kv_heads, head_dim], the mean key.
        into: float32 [kv_heads, head_dim, rank], from deviations to coordinates.
        back: float32 [kv_heads, rank, head_dim], from coordinates to deviations.
    """

    origin: Float
    into: Float
    back: Float

    def of_heads(self, heads: range) -> Basis:
        """Return the basis of consecutive KV heads."""
        own = slice(heads.start, heads.stop)
        return Basis(self.origin[own], self.into[own], self.back[own])

    @staticmethod
    def none(kv_heads: int, head_dim: int) -> Basis:
        """Return a basis without coordinates, for a model without calibration."""
        shapes = (kv_heads, head_dim), (kv_heads, head_dim, 0), (kv_heads, 0, head_dim)
        return Basis(*(np.zeros(shape, np.float32) for shape in shapes))
