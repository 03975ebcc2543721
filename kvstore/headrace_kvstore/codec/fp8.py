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

Stored layer: scales of K [head][channel], scales of V [head][token], codes of K, codes of V (each
[head][row][column] in the engine's order of rows), zeros up to a multiple of 64 bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from headrace_kvstore.codec.base import Bytes, Codec, Coder, planes
from headrace_kvstore.codec.lanes import (
    as_bits,
    as_float,
    cut,
    e4m3,
    fields,
    larger,
    load,
    magnitude,
    store,
    widen,
)
from headrace_kvstore.codec.shape import LayerShape

K_MIN = {"float32": -100, "bfloat16": -100, "float16": -15}
"""Least scale exponent: keeps 2^(k-9), the smallest code, a normal number (float16: a number)."""


@njit(inline="always")
def to_e4m3(scaled: Any) -> Any:
    """e4m3 code of a float32 within +-448, to nearest, ties to even."""
    bits = as_bits(scaled)
    size = np.int32(bits & 0x7FFFFFFF)
    normal = np.int32(((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3))
    # Below 2^-6 codes are evenly spaced by 2^-9, the spacing of float32 numbers from 2^14 on.
    subnormal = np.int32(as_bits(np.float32(as_float(size) + np.float32(16384.0))) & 0xF)
    code = normal if size >= 0x3C800000 else subnormal
    return np.uint8(code | ((bits >> 24) & 0x80))


@njit(inline="always")
def exponent(largest: Any, k_min: int) -> Any:
    """k for a group whose largest magnitude has these float32 bits (448 is 1.75 * 2^8)."""
    k = (largest >> 23) - 127 - 8
    if (largest & 0x7FFFFF) > 0x600000:
        k += 1
    return max(k, k_min)


@njit(inline="always")
def power(k: Any) -> Any:
    """2^k as float32, for a normal 2^k."""
    return as_float(np.int32((k + 127) << 23))


@njit(nogil=True, cache=True)
def write_scales(layer: Any, scales: Any, planes: Any, k_min: int, limit: int) -> bool:
    """Scales of both planes; False for a value out of bounds."""
    at = 0
    for plane in range(2):
        offset, heads, head_stride, rows, row_stride, cols, across, _ = fields(planes, plane)
        sizes = np.empty(cols if across else rows, np.int32)
        for head in range(heads):
            row = offset + head * head_stride
            sizes[:] = 0
            for r in range(rows):
                if across:
                    for i in range(cols):
                        size = magnitude(widen(load(layer, row + i)))
                        store(sizes, i, larger(load(sizes, i), size))
                else:
                    largest = np.int32(0)
                    for i in range(cols):
                        largest = larger(largest, magnitude(widen(load(layer, row + i))))
                    sizes[r] = largest
                row += row_stride
            for i in range(sizes.size):
                if sizes[i] >= limit:
                    return False
                store(scales, at + i, exponent(sizes[i], k_min) + 127)
            at += sizes.size
    return True


@njit(nogil=True, cache=True)
def write_codes(layer: Any, scales: Any, codes: Any, planes: Any) -> None:
    """Codes of both planes under the scales already written."""
    at, code = 0, 0
    for plane in range(2):
        offset, heads, head_stride, rows, row_stride, cols, across, _ = fields(planes, plane)
        inverses = np.empty(cols if across else rows, np.float32)
        for head in range(heads):
            row = offset + head * head_stride
            for i in range(inverses.size):
                inverses[i] = power(127 - np.int64(load(scales, at + i)))
            at += inverses.size
            for r in range(rows):
                inverse = inverses[0 if across else r]
                for i in range(cols):
                    scaled = widen(load(layer, row + i)) * (
                        load(inverses, i) if across else inverse
                    )
                    store(codes, code + i, to_e4m3(np.float32(scaled)))
                row += row_stride
                code += cols


@njit(nogil=True, cache=True)
def read_codes(layer: Any, scales: Any, codes: Any, planes: Any) -> None:
    """Decode both planes into `layer`."""
    like = layer[0]
    at, code = 0, 0
    for plane in range(2):
        offset, heads, head_stride, rows, row_stride, cols, across, _ = fields(planes, plane)
        factors = np.empty(cols if across else rows, np.float32)
        for head in range(heads):
            row = offset + head * head_stride
            for i in range(factors.size):
                factors[i] = power(np.int64(load(scales, at + i)) - 127 + 8)
            at += factors.size
            for r in range(rows):
                factor = factors[0 if across else r]
                for i in range(cols):
                    value = e4m3(load(codes, code + i)) * (load(factors, i) if across else factor)
                    store(layer, row + i, cut(np.float32(value), like))
                row += row_stride
                code += cols


class Fp8Coder(Coder):
    """`Fp8` for one shape."""

    def __init__(self, shape: LayerShape) -> None:
        # One byte for each channel of K and each token of V, of every head.
        self.scale_bytes = shape.kv_heads * (shape.head_dim + shape.block_tokens)
        super().__init__("fp8", shape, self.scale_bytes + 2 * shape.plane_elements)
        self.planes, self.k_min = planes(shape, (0, 0)), K_MIN[shape.dtype]

    def write(self, layer: Any, stored: Bytes) -> bool:
        if not write_scales(layer, stored, self.planes, self.k_min, self.limit):
            return False
        write_codes(layer, stored, stored[self.scale_bytes :], self.planes)
        return True

    def read(self, stored: Bytes, layer: Any) -> None:
        read_codes(layer, stored, stored[self.scale_bytes :], self.planes)


class Fp8(Codec):
    """e4m3 with power-of-two scales; float32, bfloat16, float16 in every order but latent."""

    name = "fp8"

    def bind(self, shape: LayerShape) -> Fp8Coder:
        return Fp8Coder(shape)
