"""Where the keys and values lie in one layer of one KV block, as the engine keeps it.

A codec must find a key's channels and a value's tokens, so it is told the order in memory, not just
the size. Every order known here is two planes (K and V) of `heads` matrices each, whose columns are
contiguous; they differ in strides and in whether K's rows are tokens or channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
"""Bytes of one element; "uint8" stands for a cache that the engine itself keeps quantised."""


class Order(StrEnum):
    """Order of one layer of one block; H heads, N tokens, D channels, slowest first."""

    VEC = "vec"
    """vLLM's CPU cache, ISA "vec": H x (K as [D][N], then V as [N][D])."""
    HND = "hnd"
    """H x N x (D of K, then D of V): vLLM's CUDA cache, head-major (`LBHNC`)."""
    NHD = "nhd"
    """N x H x (D of K, then D of V): vLLM's CUDA cache, token-major (`LBNHC`)."""
    HND_APART = "hnd_apart"
    """All of K as H x N x D, then all of V: K and V in separate pieces, gathered."""
    NHD_APART = "nhd_apart"
    """All of K as N x H x D, then all of V."""
    LATENT = "latent"
    """N x H x D of one compressed vector (MLA): K and V cannot be told apart."""


class Plane(NamedTuple):
    """K or V of one layer: `heads` matrices of `rows` x `cols` elements, columns contiguous.

    Offset and strides count elements.
    """

    offset: int
    heads: int
    head_stride: int
    rows: int
    row_stride: int
    cols: int
    across: int
    """1: elements that share a scale stand in one column; 0: in one row."""


@dataclass(frozen=True)
class LayerShape:
    """One layer of one KV block. ValueError for a size below 1 or an unknown dtype or order."""

    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: str
    """"float32", "bfloat16", "float16" or "uint8"."""
    order: Order

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.block_tokens, self.head_dim) < 1:
            raise ValueError(f"a layer needs heads, tokens and channels: {self}")
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(ELEMENT_BYTES)}")
        object.__setattr__(self, "order", Order(self.order))

    @property
    def plane_elements(self) -> int:
        """Elements of K alone, or of V alone."""
        return self.kv_heads * self.block_tokens * self.head_dim

    @property
    def layer_bytes(self) -> int:
        """Bytes of the layer as the engine keeps it."""
        planes = 1 if self.order is Order.LATENT else 2
        return planes * self.plane_elements * ELEMENT_BYTES[self.dtype]

    @property
    def planes(self) -> tuple[Plane, Plane]:
        """K and V; a scale is shared by tokens of one channel in K, by channels of one token in V.

        ValueError where K and V cannot be told apart.
        """
        h, n, d = self.kv_heads, self.block_tokens, self.head_dim
        match self.order:
            case Order.VEC:
                return Plane(0, h, 2 * n * d, d, n, n, 0), Plane(n * d, h, 2 * n * d, n, d, d, 0)
            case Order.HND:
                head, row, value = 2 * n * d, 2 * d, d
            case Order.NHD:
                head, row, value = 2 * d, 2 * h * d, d
            case Order.HND_APART:
                head, row, value = n * d, d, h * n * d
            case Order.NHD_APART:
                head, row, value = d, h * d, h * n * d
            case Order.LATENT:
                raise ValueError("a latent (MLA) layer has no K and V to tell apart: store it raw")
        return Plane(0, h, head, n, row, d, 1), Plane(value, h, head, n, row, d, 0)
