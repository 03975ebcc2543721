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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit

from headrace_kvstore.codec.base import (
    Bytes,
    Errors,
    Unfit,
    check,
    limit_bits,
    quantisable,
    round_up,
    view,
)
from headrace_kvstore.codec.lanes import (
    BITS,
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
        offset, heads, head_stride = planes[plane, 0], planes[plane, 1], planes[plane, 2]
        rows, row_stride, cols = planes[plane, 3], planes[plane, 4], planes[plane, 5]
        across = planes[plane, 6]
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
        offset, heads, head_stride = planes[plane, 0], planes[plane, 1], planes[plane, 2]
        rows, row_stride, cols = planes[plane, 3], planes[plane, 4], planes[plane, 5]
        across = planes[plane, 6]
        inverses = np.empty(cols if across else rows, np.float32)
        for head in range(heads):
            row = offset + head * head_stride
            for i in range(inverses.size):
                inverses[i] = power(127 - np.int64(load(scales, at + i)))
            at += inverses.size
            for r in range(rows):
                if across:
                    for i in range(cols):
                        scaled = widen(load(layer, row + i)) * load(inverses, i)
                        store(codes, code + i, to_e4m3(np.float32(scaled)))
                else:
                    inverse = inverses[r]
                    for i in range(cols):
                        scaled = widen(load(layer, row + i)) * inverse
                        store(codes, code + i, to_e4m3(np.float32(scaled)))
                row += row_stride
                code += cols


@njit(nogil=True, cache=True)
def read_codes(layer: Any, scales: Any, codes: Any, planes: Any) -> None:
    """Decode both planes into `layer`."""
    like = layer[0]
    at, code = 0, 0
    for plane in range(2):
        offset, heads, head_stride = planes[plane, 0], planes[plane, 1], planes[plane, 2]
        rows, row_stride, cols = planes[plane, 3], planes[plane, 4], planes[plane, 5]
        across = planes[plane, 6]
        factors = np.empty(cols if across else rows, np.float32)
        for head in range(heads):
            row = offset + head * head_stride
            for i in range(factors.size):
                factors[i] = power(np.int64(load(scales, at + i)) - 127 + 8)
            at += factors.size
            for r in range(rows):
                if across:
                    for i in range(cols):
                        value = e4m3(load(codes, code + i)) * load(factors, i)
                        store(layer, row + i, cut(np.float32(value), like))
                else:
                    factor = factors[r]
                    for i in range(cols):
                        value = e4m3(load(codes, code + i)) * factor
                        store(layer, row + i, cut(np.float32(value), like))
                row += row_stride
                code += cols


class Fp8Coder:
    """`Fp8` for one shape."""

    def __init__(self, shape: LayerShape) -> None:
        self.layer_bytes = shape.layer_bytes
        self.scale_bytes = scale_bytes(shape)
        self.end_bytes = self.scale_bytes + 2 * shape.plane_elements
        self.stored_bytes = round_up(self.end_bytes)
        self.bits = BITS[shape.dtype]
        self.planes = np.array(shape.planes, np.int64)
        self.k_min, self.limit = K_MIN[shape.dtype], limit_bits(shape)

    def encode(self, layer: Bytes, stored: Bytes) -> None:
        codes = check("stored", stored, self.stored_bytes)[self.scale_bytes :]
        source = view("layer", layer, self.layer_bytes, self.bits)
        if not write_scales(source, stored, self.planes, self.k_min, self.limit):
            raise Unfit("fp8 refuses a layer with values that are not finite or too large")
        write_codes(source, stored, codes, self.planes)
        stored[self.end_bytes :] = 0

    def decode(self, stored: Bytes, layer: Bytes) -> None:
        codes = check("stored", stored, self.stored_bytes)[self.scale_bytes :]
        target = view("layer", layer, self.layer_bytes, self.bits)
        read_codes(target, stored, codes, self.planes)


def scale_bytes(shape: LayerShape) -> int:
    """One byte for each channel of K and each token of V, of every head."""
    return shape.kv_heads * (shape.head_dim + shape.block_tokens)


@dataclass(frozen=True)
class Fp8:
    """e4m3 with power-of-two scales; float32, bfloat16, float16 in every order but latent."""

    name: str = field(default="fp8", init=False)
    version: int = field(default=1, init=False)
    parameters: Mapping[str, int] = field(default_factory=dict, init=False)
    window_tokens: int = field(default=0, init=False)
    lossy: bool = field(default=True, init=False)
    identity: bool = field(default=False, init=False)
    errors: Errors = field(default=Errors(0.026, 0.027, 0.050, 0.0044, 0.964), init=False)

    def stored_bytes(self, shape: LayerShape) -> int:
        return self.bind(shape).stored_bytes

    def bind(self, shape: LayerShape) -> Fp8Coder:
        quantisable(self.name, shape)
        return Fp8Coder(shape)
