"""The order of keys and values in one layer of one KV block, as the engine keeps it.

A codec must find a key's channels and a value's tokens, so it needs the order in memory, not only
the size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
"""Bytes of one element; "uint8" means a cache that the engine itself keeps quantised."""


class Order(StrEnum):
    """Order of one layer of one block; H heads, N tokens, D channels, slowest first."""

    VEC = "vec"
    """vLLM's CPU cache, ISA "vec": H x (K as [D][N], then V as [N][D])."""
    HND = "hnd"
    """H x N x (D of K, then D of V): vLLM's CUDA cache, head-major (`LBHNC`)."""
    NHD = "nhd"
    """N x H x (D of K, then D of V): vLLM's CUDA cache, token-major (`LBNHC`)."""


@dataclass(frozen=True)
class LayerShape:
    """One layer of one KV block. Raises ValueError for a size below 1, or an unknown dtype or
    order."""

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
        return 2 * self.plane_elements * ELEMENT_BYTES[self.dtype]

    def halves(self, layer: Any) -> tuple[Any, Any]:
        """Return K and V as views [heads, tokens, channels] of the layer's elements."""
        h, n, d = self.kv_heads, self.block_tokens, self.head_dim
        match self.order:
            case Order.VEC:
                both = layer.reshape(h, 2, n * d)
                return both[:, 0].reshape(h, d, n).swapaxes(1, 2), both[:, 1].reshape(h, n, d)
            case Order.HND:
                both = layer.reshape(h, n, 2, d).transpose(2, 0, 1, 3)
            case Order.NHD:
                both = layer.reshape(n, h, 2, d).transpose(2, 1, 0, 3)
        return both[0], both[1]
