"""int4: half a byte an element, a least value and a step for each group of elements.

After KIVI (Liu et al., ICML 2024, arXiv 2402.02750): keys are quantised per channel, values per
token, in groups, and the most recent tokens are not quantised at all (`window_tokens`).
Keys have channels of large magnitude in every token: a group that runs along one channel (over
`group` tokens of one head) gives each such channel a range of its own, which makes K's error a
third of what groups along tokens give. Values have none; a group runs over `group` channels of one
token and head.

Least value m and step s are kept in the engine's own 16-bit format (bfloat16 for float32), m
rounded down and s up, so that m <= x <= m + 15 s. For range = max - min of the group:

    m = min (exact in 16-bit formats),  s = roundup((max - m) / 15),  0 if max - m < 2^-100
    q = round((x - m) / s) in 0..15;    x' = m + q s, rounded to the engine's format
    |x - x'| <= s/2 + (u + 2^-22)(|x'| + 15 s) + 2^-100,  s <= (range + e)(1 + 2^-7) / 15

u, the rounding to the engine's format: 2^-8 bfloat16, 2^-11 float16, 2^-24 float32; 2^-22: float32
arithmetic; e, what m lost by rounding down: at most 2^-7 |min|, nothing in the 16-bit formats.
A constant group of a 16-bit format comes back exactly.

Stored layer: m of K and V, s of K and V (2 bytes each, [head][channel][group] of K,
[head][token][group] of V), codes of K and V in the same order, zeros up to a multiple of 64 bytes.
A byte holds elements i (low half) and i + group/2 (high half) of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from headrace_kvstore.codec.base import Bytes, Codec, Coder
from headrace_kvstore.codec.bitcast import (
    as_bits,
    larger,
    load,
    narrow,
    rank,
    smaller,
    store,
    unrank,
    widen,
)
from headrace_kvstore.codec.shape import LayerShape
from headrace_kvstore.numba_jit import jit

PARAMETER: dict[str, Any] = {"float32": np.uint16, "bfloat16": np.uint16, "float16": np.int16}
"""Format of m and s for each dtype, named as in `bitcast`."""
FLAT = np.float32(2.0**-100)
"""Ranges below this count as 0: their step would be no normal float32."""
LOWEST, HIGHEST = np.int32(-(2**31)), np.int32(2**31 - 1)


@njit(inline="always")
def to_code(value: Any, least: Any, inverse: Any) -> Any:
    """Return round((value - least) * inverse), 0 to 15: from 2^23 on float32 holds whole numbers
    only."""
    steps = np.float32(np.float32(value - least) * inverse)
    return np.int32(as_bits(np.float32(steps + np.float32(8388608.0))) & 0xF)


@njit(inline="always")
def from_code(code: Any, least: Any, step: Any) -> Any:
    """Return least + code * step."""
    return np.float32(least + np.float32(np.float32(np.int32(code)) * step))


@jit(nogil=True)
def fit(low: int, high: int, leasts: Any, steps: Any, at: int, limit: int) -> bool:
    """Write m and s of a group with these lowest and highest ranks; return False if out of bounds.

    Bits of m and s grow away from zero, so that the neighbouring number is one bit step away.
    """
    if larger(high, np.int32(~low)) >= limit:
        return False
    lowest, like = unrank(low), load(leasts, at)
    bits = narrow(lowest, like)
    store(leasts, at, bits)
    if widen(load(leasts, at)) > lowest:
        store(leasts, at, bits - 1 if lowest > 0 else bits + 1)
    spread = np.float32(unrank(high) - widen(load(leasts, at)))
    if spread < FLAT:
        store(steps, at, 0)
        return True
    step = np.float32(spread / np.float32(15.0))
    bits = narrow(step, like)
    store(steps, at, bits)
    if widen(load(steps, at)) < step:
        store(steps, at, bits + 1)
    return True


@jit(nogil=True)
def write_codes(
    layer: Any,
    leasts: Any,
    steps: Any,
    codes: Any,
    heads: int,
    groups: tuple[int, int],
    limit: int,
) -> bool:
    """Write m, s and codes of a layer; return False for a value out of bounds."""
    at, code, plane = 0, 0, codes.size // heads
    for side in range(2):
        group, half = groups[side], groups[side] // 2
        for head in range(heads):
            begin = (2 * head + side) * plane
            for start in range(begin, begin + plane, group):
                low, high = HIGHEST, LOWEST
                for i in range(group):
                    ranked = rank(widen(load(layer, start + i)))
                    low, high = smaller(low, ranked), larger(high, ranked)
                if not fit(low, high, leasts, steps, at, limit):
                    return False
                least, step = widen(load(leasts, at)), widen(load(steps, at))
                inverse = np.float32(1.0) / step if step > 0 else np.float32(0.0)
                for i in range(half):
                    a = to_code(widen(load(layer, start + i)), least, inverse)
                    b = to_code(widen(load(layer, start + half + i)), least, inverse)
                    store(codes, code + i, a | (b << 4))
                at, code = at + 1, code + half
    return True


@jit(nogil=True)
def read_codes(
    layer: Any, leasts: Any, steps: Any, codes: Any, heads: int, groups: tuple[int, int]
) -> None:
    """Decode a layer."""
    like = layer[0]
    at, code, plane = 0, 0, codes.size // heads
    for side in range(2):
        group, half = groups[side], groups[side] // 2
        for head in range(heads):
            begin = (2 * head + side) * plane
            for start in range(begin, begin + plane, group):
                least, step = widen(load(leasts, at)), widen(load(steps, at))
                for i in range(half):
                    both = np.int32(load(codes, code + i))
                    a, b = from_code(both & 0xF, least, step), from_code(both >> 4, least, step)
                    store(layer, start + i, narrow(a, like))
                    store(layer, start + half + i, narrow(b, like))
                at, code = at + 1, code + half


class Int4Coder(Coder):
    """`Int4` for one shape."""

    def __init__(self, shape: LayerShape, groups: tuple[int, int]) -> None:
        self.heads, self.groups = shape.kv_heads, groups
        self.count = sum(shape.plane_elements // group for group in groups)
        super().__init__("int4", shape, 4 * self.count + shape.plane_elements)
        self.parameter_bits = PARAMETER[shape.dtype]

    def parts(self, stored: Bytes) -> tuple[Any, Any, Any]:
        """Return m, s and codes within `stored`."""
        halves = stored[: 4 * self.count].view(self.parameter_bits)
        if not halves.flags.aligned:
            raise ValueError("stored begins within an element of 2 bytes")
        codes = stored[4 * self.count : self.end_bytes]
        return halves[: self.count], halves[self.count :], codes

    def write(self, layer: Any, stored: Bytes) -> bool:
        return bool(write_codes(layer, *self.parts(stored), self.heads, self.groups, self.limit))

    def read(self, stored: Bytes, layer: Any) -> None:
        read_codes(layer, *self.parts(stored), self.heads, self.groups)


@dataclass(frozen=True)
class Int4(Codec):
    """4-bit codes in groups; float32, bfloat16, float16.

    A group is `group` tokens of a key's channel and `group` channels of a value's token, or all
    there are if fewer: an even number that divides them. Attention looks most at the last tokens,
    so KIVI never quantises them; here the last `window_tokens` of a prompt are always computed.
    """

    group: int = 32
    window_tokens: int = 128

    name = "int4"

    def bind(self, shape: LayerShape) -> Int4Coder:
        sizes = shape.block_tokens, shape.head_dim
        groups = min(self.group, sizes[0]), min(self.group, sizes[1])
        if any(size % group or group % 2 for size, group in zip(sizes, groups, strict=True)):
            raise ValueError(
                f"int4 cannot part {sizes[0]} tokens and {sizes[1]} channels into "
                f"even groups of {groups[0]} and {groups[1]}"
            )
        return Int4Coder(shape, groups)
