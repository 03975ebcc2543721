"""fp8: one byte an element, e4m3 with power-of-two scales: one a channel for K, one a token for V.

Number format: OCP e4m3 ("fn": 4 exponent bits, bias 7, 3 mantissa bits, largest 448, no infinity).
Scales are exponents alone, as in OCP's microscaling formats (E8M0: one byte, 127 + k for 2^k): a
floating-point code gains nothing from a finer scale but range, and a power of two makes every
decoded value exact in bfloat16, float16 and float32 alike.

K shares a scale over the block's tokens of one head and channel, since K's outliers sit in
channels; V over the channels of one head and token. With a the largest magnitude of the group:

    k = max(K_MIN, the least integer with a <= 448 * 2^k)
    code = e4m3(x / 2^k), to nearest, ties to even;  x' = code * 2^k
    |x - x'| <= max(2^-4 |x|, 2^(k-10))

where 2^(k-10), half the step of e4m3's subnormals, is below a * 2^-17 unless k = K_MIN.

Errors are relative, so K's channels of large magnitude carry most of them into the attention's
scores, whatever the scales.

Stored layer: scales of K [head][channel], scales of V [head][token], codes of K
[head][channel][token], codes of V [head][token][channel], zeros up to a multiple of 64 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from headrace_kvstore.codec.base import Bytes, Codec, Coder
from headrace_kvstore.codec.bitcast import (
    as_bits,
    as_float,
    cut,
    e4m3,
    larger,
    load,
    magnitude,
    store,
    widen,
)
from headrace_kvstore.codec.shape import LayerShape
from headrace_kvstore.numba_jit import jit

K_MIN = {"float32": -100, "bfloat16": -100, "float16": -15}
"""Least scale exponent: keeps 2^(k-9), the smallest code, a normal number (float16: a number)."""


Groups = tuple[int, int]
"""Elements that share a scale: tokens of a key's channel, channels of a value's token."""


@njit(inline="always")
def to_e4m3(scaled: Any) -> Any:
    """Return the e4m3 code of a float32 within +-448, to nearest, ties to even."""
    bits = as_bits(scaled)
    size = np.int32(bits & 0x7FFFFFFF)
    normal = np.int32(((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3))
    # Below 2^-6 codes are evenly spaced by 2^-9, the spacing of float32 numbers from 2^14 on.
    subnormal = np.int32(as_bits(np.float32(as_float(size) + np.float32(16384.0))) & 0xF)
    code = normal if size >= 0x3C800000 else subnormal
    return np.uint8(code | ((bits >> 24) & 0x80))


@njit(inline="always")
def exponent(largest: Any, k_min: int) -> Any:
    """Return k for a group whose largest magnitude has these float32 bits (448 is 1.75 * 2^8)."""
    k = (largest >> 23) - 127 - 8
    if (largest & 0x7FFFFF) > 0x600000:
        k += 1
    return max(k, k_min)


@njit(inline="always")
def power(k: Any) -> Any:
    """Return 2^k as float32, for a normal 2^k."""
    return as_float(np.int32((k + 127) << 23))


@jit(nogil=True)
def write_codes(
    layer: Any, scales: Any, codes: Any, heads: int, groups: Groups, k_min: int, limit: int
) -> bool:
    """Write scales and codes of a layer; return False for a value out of bounds."""
    at, code, plane = 0, 0, groups[0] * groups[1]
    for half in range(2):
        group = groups[half]
        for head in range(heads):
            begin = (2 * head + half) * plane
            for start in range(begin, begin + plane, group):
                largest = np.int32(0)
                for i in range(group):
                    largest = larger(largest, magnitude(widen(load(layer, start + i))))
                if largest >= limit:
                    return False
                k = exponent(largest, k_min)
                store(scales, at, k + 127)
                inverse = power(-k)
                for i in range(group):
                    scaled = np.float32(widen(load(layer, start + i)) * inverse)
                    store(codes, code + i, to_e4m3(scaled))
                at, code = at + 1, code + group
    return True


@jit(nogil=True)
def read_codes(layer: Any, scales: Any, codes: Any, heads: int, groups: Groups) -> None:
    """Decode a layer."""
    like = layer[0]
    at, code, plane = 0, 0, groups[0] * groups[1]
    for half in range(2):
        group = groups[half]
        for head in range(heads):
            begin = (2 * head + half) * plane
            for start in range(begin, begin + plane, group):
                factor = power(np.int64(load(scales, at)) - 127 + 8)
                for i in range(group):
                    value = np.float32(e4m3(load(codes, code + i)) * factor)
                    store(layer, start + i, cut(value, like))
                at, code = at + 1, code + group


class Fp8Coder(Coder):
    """`Fp8` for one shape."""

    def __init__(self, shape: LayerShape) -> None:
        self.heads, self.groups = shape.kv_heads, (shape.block_tokens, shape.head_dim)
        self.scale_bytes = self.heads * sum(self.groups)
        super().__init__("fp8", shape, self.scale_bytes + 2 * shape.plane_elements)
        self.k_min = K_MIN[shape.dtype]

    def write(self, layer: Any, stored: Bytes) -> bool:
        codes = stored[self.scale_bytes :]
        bounds = self.k_min, self.limit
        return bool(write_codes(layer, stored, codes, self.heads, self.groups, *bounds))

    def read(self, stored: Bytes, layer: Any) -> None:
        read_codes(layer, stored, stored[self.scale_bytes :], self.heads, self.groups)


class Fp8(Codec):
    """e4m3 with power-of-two scales; float32, bfloat16, float16."""

    name = "fp8"

    def bind(self, shape: LayerShape) -> Fp8Coder:
        return Fp8Coder(shape)
