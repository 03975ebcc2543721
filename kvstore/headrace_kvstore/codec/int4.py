"""int4: half a byte an element, a least value and a step for each group of elements.

After KIVI (Liu et al., ICML 2024, arXiv 2402.02750): keys are quantised per channel, values per
token, in groups, and the most recent tokens are not quantised at all (that part is `window`).
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

Stored layer: m of K and V, s of K and V (2 bytes each, [head][row][group], or [head][group][column]
where a channel stands in a column), codes of K and V, zeros up to a multiple of 64 bytes. A byte
holds elements i (low half) and i + group/2 (high half) of a group.
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
    limit_bits,
    quantisable,
    round_up,
    view,
)
from headrace_kvstore.codec.lanes import (
    BITS,
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

PARAMETER: dict[str, Any] = {"float32": np.uint16, "bfloat16": np.uint16, "float16": np.int16}
"""Format of m and s for each dtype, named as in `lanes`."""
FLAT = np.float32(2.0**-100)
"""Ranges below are taken for none: their step would be no normal float32."""
LOWEST, HIGHEST = np.int32(-(2**31)), np.int32(2**31 - 1)


@njit(inline="always")
def to_code(value: Any, least: Any, inverse: Any) -> Any:
    """round((value - least) * inverse), 0 to 15: from 2^23 on float32 holds whole numbers only."""
    steps = np.float32(np.float32(value - least) * inverse)
    return np.int32(as_bits(np.float32(steps + np.float32(8388608.0))) & 0xF)


@njit(inline="always")
def from_code(code: Any, least: Any, step: Any) -> Any:
    """least + code * step."""
    return np.float32(least + np.float32(np.float32(np.int32(code)) * step))


@njit(nogil=True, cache=True)
def fit(low: int, high: int, leasts: Any, steps: Any, at: int, limit: int) -> bool:
    """Write m and s of a group with these lowest and highest ranks; False if out of bounds.

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


@njit(nogil=True, cache=True)
def write_groups(layer: Any, leasts: Any, steps: Any, planes: Any, limit: int) -> bool:
    """m and s of both planes; False for a value out of bounds."""
    at = 0
    for plane in range(2):
        offset, heads, head_stride = planes[plane, 0], planes[plane, 1], planes[plane, 2]
        rows, row_stride, cols = planes[plane, 3], planes[plane, 4], planes[plane, 5]
        across, group = planes[plane, 6], planes[plane, 7]
        tall, wide = (group, cols) if across else (1, group)
        lows, highs = np.empty(cols, np.int32), np.empty(cols, np.int32)
        for head in range(heads):
            row = offset + head * head_stride
            for _ in range(rows // tall):
                if across:
                    lows[:] = HIGHEST
                    highs[:] = LOWEST
                    for _ in range(tall):
                        for i in range(cols):
                            ranked = rank(widen(load(layer, row + i)))
                            store(lows, i, smaller(load(lows, i), ranked))
                            store(highs, i, larger(load(highs, i), ranked))
                        row += row_stride
                else:
                    for g in range(cols // wide):
                        low, high = HIGHEST, LOWEST
                        for i in range(wide):
                            ranked = rank(widen(load(layer, row + g * wide + i)))
                            low, high = smaller(low, ranked), larger(high, ranked)
                        lows[g], highs[g] = low, high
                    row += row_stride
                for g in range(cols if across else cols // wide):
                    if not fit(lows[g], highs[g], leasts, steps, at, limit):
                        return False
                    at += 1
    return True


@njit(nogil=True, cache=True)
def write_codes(layer: Any, leasts: Any, steps: Any, codes: Any, planes: Any) -> None:
    """Codes of both planes under the m and s already written."""
    at, code = 0, 0
    for plane in range(2):
        offset, heads, head_stride = planes[plane, 0], planes[plane, 1], planes[plane, 2]
        rows, row_stride, cols = planes[plane, 3], planes[plane, 4], planes[plane, 5]
        across, group = planes[plane, 6], planes[plane, 7]
        count = cols if across else cols // group
        floors, inverses = np.empty(count, np.float32), np.empty(count, np.float32)
        half = group // 2
        below = half * row_stride
        for head in range(heads):
            top = offset + head * head_stride
            for _ in range(rows // group if across else rows):
                for g in range(count):
                    step = widen(load(steps, at + g))
                    inverses[g] = np.float32(1.0) / step if step > 0 else np.float32(0.0)
                    floors[g] = widen(load(leasts, at + g))
                at += count
                if across:
                    for row in range(top, top + below, row_stride):
                        for i in range(cols):
                            least, inverse = load(floors, i), load(inverses, i)
                            a = to_code(widen(load(layer, row + i)), least, inverse)
                            b = to_code(widen(load(layer, row + below + i)), least, inverse)
                            store(codes, code + i, a | (b << 4))
                        code += cols
                    top += group * row_stride
                else:
                    for g in range(count):
                        least, inverse, first = floors[g], inverses[g], top + g * group
                        for i in range(half):
                            a = to_code(widen(load(layer, first + i)), least, inverse)
                            b = to_code(widen(load(layer, first + half + i)), least, inverse)
                            store(codes, code + i, a | (b << 4))
                        code += half
                    top += row_stride


@njit(nogil=True, cache=True)
def read_codes(layer: Any, leasts: Any, steps: Any, codes: Any, planes: Any) -> None:
    """Decode both planes into `layer`."""
    like = layer[0]
    at, code = 0, 0
    for plane in range(2):
        offset, heads, head_stride = planes[plane, 0], planes[plane, 1], planes[plane, 2]
        rows, row_stride, cols = planes[plane, 3], planes[plane, 4], planes[plane, 5]
        across, group = planes[plane, 6], planes[plane, 7]
        count = cols if across else cols // group
        half = group // 2
        below = half * row_stride
        for head in range(heads):
            top = offset + head * head_stride
            for _ in range(rows // group if across else rows):
                if across:
                    for row in range(top, top + below, row_stride):
                        for i in range(cols):
                            both = np.int32(load(codes, code + i))
                            least, step = widen(load(leasts, at + i)), widen(load(steps, at + i))
                            a = from_code(both & 0xF, least, step)
                            b = from_code(both >> 4, least, step)
                            store(layer, row + i, narrow(a, like))
                            store(layer, row + below + i, narrow(b, like))
                        code += cols
                    top += group * row_stride
                else:
                    for g in range(count):
                        least, step = widen(load(leasts, at + g)), widen(load(steps, at + g))
                        first = top + g * group
                        for i in range(half):
                            both = np.int32(load(codes, code + i))
                            a = from_code(both & 0xF, least, step)
                            b = from_code(both >> 4, least, step)
                            store(layer, first + i, narrow(a, like))
                            store(layer, first + half + i, narrow(b, like))
                        code += half
                    top += row_stride
                at += count


class Int4Coder:
    """`Int4` for one shape."""

    def __init__(self, shape: LayerShape, groups: tuple[int, int]) -> None:
        self.groups = sum(shape.plane_elements // group for group in groups)
        self.layer_bytes = shape.layer_bytes
        self.end_bytes = 4 * self.groups + shape.plane_elements
        self.stored_bytes = round_up(self.end_bytes)
        self.bits, self.parameter_bits = BITS[shape.dtype], PARAMETER[shape.dtype]
        self.planes = np.array(
            [(*plane, group) for plane, group in zip(shape.planes, groups, strict=True)], np.int64
        )
        self.limit = limit_bits(shape)

    def parts(self, stored: Bytes) -> tuple[Any, Any, Any]:
        """m, s and codes within `stored`; ValueError for a buffer that is not as it must be."""
        halves = view("stored", stored, self.stored_bytes, self.parameter_bits)
        return halves[: self.groups], halves[self.groups :], stored[4 * self.groups :]

    def encode(self, layer: Bytes, stored: Bytes) -> None:
        leasts, steps, codes = self.parts(stored)
        source = view("layer", layer, self.layer_bytes, self.bits)
        if not write_groups(source, leasts, steps, self.planes, self.limit):
            raise Unfit("int4 refuses a layer with values that are not finite or too large")
        write_codes(source, leasts, steps, codes, self.planes)
        stored[self.end_bytes :] = 0

    def decode(self, stored: Bytes, layer: Bytes) -> None:
        leasts, steps, codes = self.parts(stored)
        target = view("layer", layer, self.layer_bytes, self.bits)
        read_codes(target, leasts, steps, codes, self.planes)


@dataclass(frozen=True)
class Int4:
    """4-bit codes in groups; float32, bfloat16, float16 in every order but latent.

    A group is `group` tokens of a key's channel and `group` channels of a value's token, or all
    there are if fewer: an even number that divides them.
    """

    group: int = 32
    window_tokens: int = 128
    name: str = field(default="int4", init=False)
    version: int = field(default=1, init=False)
    lossy: bool = field(default=True, init=False)
    identity: bool = field(default=False, init=False)
    errors: Errors = field(default=Errors(0.036, 0.079, 0.068, 0.0055, 0.958), init=False)

    def __post_init__(self) -> None:
        if self.group < 2 or self.group % 2:
            raise ValueError(f"int4 needs an even group of at least 2, not {self.group}")
        if self.window_tokens < 0:
            raise ValueError(f"int4 has no window of {self.window_tokens} tokens")

    @property
    def parameters(self) -> Mapping[str, int]:
        return {"group": self.group, "window_tokens": self.window_tokens}

    def stored_bytes(self, shape: LayerShape) -> int:
        return self.bind(shape).stored_bytes

    def bind(self, shape: LayerShape) -> Int4Coder:
        quantisable(self.name, shape)
        groups = min(self.group, shape.block_tokens), min(self.group, shape.head_dim)
        if (
            shape.block_tokens % groups[0]
            or shape.head_dim % groups[1]
            or any(group % 2 for group in groups)
        ):
            raise ValueError(
                f"int4 cannot part {shape.block_tokens} tokens and {shape.head_dim} channels into "
                f"even groups of {groups[0]} and {groups[1]}"
            )
        return Int4Coder(shape, groups)
