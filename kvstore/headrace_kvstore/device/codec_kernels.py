"""The store's codecs as Triton kernels: stored bytes equal those of `codec` to the bit.

A layer of a block is read where it lies in the engine's cache, by its strides, so no order in
memory must be changed. K's elements share a scale along tokens, V's along channels. A *line* is a
channel of K or a token of V; it has one scale, or one for each of its groups. A *place* is an index
along a line. A program takes some lines, or some groups of lines, of one head of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from headrace_kvstore.codec import Codec, LayerShape
from headrace_kvstore.codec.fp8 import Fp8Coder
from headrace_kvstore.codec.int4 import FLAT, Int4Coder
from headrace_kvstore.device.number_formats import (
    EXACT,
    bits_of,
    float_of,
    narrow,
    rank,
    read,
    widen,
    write,
)

ELEMENTS_AT_ONCE = 4096
"""Number of elements of one program."""
FLAT_RANGE = tl.constexpr(float(FLAT))
HIGHEST, LOWEST = tl.constexpr(2**31 - 1), tl.constexpr(-(2**31))


@dataclass(frozen=True)
class LayerStrides:
    """Steps in a layer of one block in the engine's cache, in elements; channels follow each other.

    Attributes:
        head, token: to the next one. value: from a key to its value.
    """

    head: int
    token: int
    value: int


class DeviceCoder:
    """A codec for layers of one shape, on a device.

    Args:
        codec: fp8 or int4. shape: of a layer.
        strides: of it in the engine's cache.

    Raises:
        ValueError: the codec does not take such layers, or has no kernels.
    """

    def __init__(self, codec: Codec, shape: LayerShape, strides: LayerStrides) -> None:
        coder = codec.bind(shape)
        if not isinstance(coder, Fp8Coder | Int4Coder):
            raise ValueError(f"codec {codec.name} has no kernels for devices")
        self._coder: Fp8Coder | Int4Coder = coder
        self._shape, self._strides = shape, strides

    def encode(self, layers: Tensor, stored: Tensor, unfit: Tensor) -> None:
        """Fill `stored` from layers; queued on the current stream.

        Args:
            layers: int64 [n], addresses of the blocks' layers.
            stored: uint8 [n, at least the codec's stored bytes], rows contiguous.
            unfit: int32 [n], becomes 1 where a layer holds a value that the codec refuses; the
                row of such a layer is undefined.
        """
        stored[:, self._coder.end_bytes :] = 0
        kernel = _fp8_encode if isinstance(self._coder, Fp8Coder) else _int4_encode
        for grid, place, sizes in self._launches(len(layers)):
            kernel[grid](layers, stored, unfit, stored.stride(0), *place, **sizes, **EXACT)

    def decode(self, stored: Tensor, layers: Tensor) -> None:
        """Fill layers from what `encode` made; arguments as there."""
        kernel = _fp8_decode if isinstance(self._coder, Fp8Coder) else _int4_decode
        for grid, place, sizes in self._launches(len(layers)):
            del sizes["LIMIT"]
            sizes.pop("K_MIN", None)
            kernel[grid](layers, stored, stored.stride(0), *place, **sizes, **EXACT)

    def _launches(self, blocks: int) -> Iterator[tuple[Any, tuple[int, ...], dict[str, Any]]]:
        """Yield for K, then for V: the grid, the places of elements, scales and codes, and
        sizes."""
        coder, shape, steps = self._coder, self._shape, self._strides
        heads, tokens, channels = shape.kv_heads, shape.block_tokens, shape.head_dim
        both = (
            (channels, tokens, steps.head, 1, steps.token, 0),
            (tokens, channels, steps.head, steps.token, 1, steps.value),
        )
        if not blocks:
            return
        before = 0
        for side, (lines, places, *element) in enumerate(both):
            sizes: dict[str, Any] = {"FORMAT": shape.dtype, "LIMIT": coder.limit}
            if isinstance(coder, Fp8Coder):
                padded = triton.next_power_of_2(places)
                at = before, coder.scale_bytes + side * shape.plane_elements
                sizes |= {"K_MIN": coder.k_min, "PLACES": places, "PADDED": padded}
                units = lines
            else:
                group = coder.groups[side]
                padded = triton.next_power_of_2(group // 2)
                at = before, 4 * coder.count + side * shape.plane_elements // 2
                sizes |= {"GROUPS": places // group, "HALF": group // 2, "PADDED": padded}
                sizes["COUNT"] = coder.count
                units = lines * (places // group)
            at_once = max(1, min(ELEMENTS_AT_ONCE // padded, triton.next_power_of_2(units)))
            grid = (blocks, heads, triton.cdiv(units, at_once))
            yield grid, (*element, *at, units), sizes | {"UNITS": at_once}
            before += heads * units


@triton.jit
def _fp8_tile(
    units,
    head_step,
    line_step,
    place_step,
    value_step,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Return a program's lines, the places of elements, scales and codes, and which are inside."""
    head = tl.program_id(1).to(tl.int64)
    line = tl.program_id(2) * UNITS + tl.arange(0, UNITS)
    place = tl.arange(0, PADDED)
    inside = (line < units)[:, None] & (place < PLACES)[None, :]
    at = value_step + head * head_step + line[:, None] * line_step + place[None, :] * place_step
    scale = head * units + line
    code = scale[:, None] * PLACES + place[None, :]
    return line, at, scale, code, inside


@triton.jit
def _fp8_encode(
    layers,
    stored,
    unfit,
    row_bytes,
    head_step,
    line_step,
    place_step,
    value_step,
    scales_at,
    codes_at,
    units,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    K_MIN: tl.constexpr,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Encode with the formulas of `codec.fp8`."""
    block = tl.program_id(0).to(tl.int64)
    line, at, scale, code, inside = _fp8_tile(
        units, head_step, line_step, place_step, value_step, PLACES, PADDED, UNITS
    )
    value = read(tl.load(layers + block), at, inside, FORMAT)
    largest = tl.max(bits_of(value) & 0x7FFFFFFF, 1)
    if tl.max(largest, 0) >= LIMIT:
        tl.store(unfit + block, 1)
    k = (largest >> 23) - 135 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    k = tl.maximum(k, K_MIN)
    row = stored + block * row_bytes
    tl.store(row + scales_at + scale, (k + 127).to(tl.uint8), line < units)
    bits = bits_of(value * float_of((127 - k) << 23)[:, None])
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    subnormal = bits_of(float_of(size) + 16384.0) & 0xF
    made = tl.where(size >= 0x3C800000, normal, subnormal) | ((bits >> 24) & 0x80)
    tl.store(row + codes_at + code, made.to(tl.uint8), inside)


@triton.jit
def _fp8_decode(
    layers,
    stored,
    row_bytes,
    head_step,
    line_step,
    place_step,
    value_step,
    scales_at,
    codes_at,
    units,
    FORMAT: tl.constexpr,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Decode fp8. A code's bits are those of a float16 with another bias."""
    block = tl.program_id(0).to(tl.int64)
    line, at, scale, code, inside = _fp8_tile(
        units, head_step, line_step, place_step, value_step, PLACES, PADDED, UNITS
    )
    row = stored + block * row_bytes
    k = tl.load(row + scales_at + scale, line < units, 0).to(tl.int32)
    made = tl.load(row + codes_at + code, inside, 0).to(tl.int8, bitcast=True)
    half = ((made.to(tl.int32) << 7) & 0xBF80).to(tl.int16)
    factor = float_of((k + 8) << 23)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * factor[:, None]
    write(tl.load(layers + block), at, value, inside, FORMAT, EXACTLY=True)


@triton.jit
def _int4_tile(
    units,
    head_step,
    line_step,
    place_step,
    value_step,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Return a program's groups, the places of their first halves' elements, of parameters and
    codes, and which are inside. A group's second half is HALF places further on."""
    head = tl.program_id(1).to(tl.int64)
    group = tl.program_id(2) * UNITS + tl.arange(0, UNITS)
    i = tl.arange(0, PADDED)
    inside = (group < units)[:, None] & (i < HALF)[None, :]
    line, first = group // GROUPS, (group % GROUPS) * (2 * HALF)
    at = value_step + head * head_step + line[:, None] * line_step
    at += (first[:, None] + i[None, :]) * place_step
    parameter = head * units + group
    code = parameter[:, None] * HALF + i[None, :]
    return group, at, parameter, code, inside


@triton.jit
def _int4_encode(
    layers,
    stored,
    unfit,
    row_bytes,
    head_step,
    line_step,
    place_step,
    value_step,
    least_at,
    codes_at,
    units,
    FORMAT: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Encode with the formulas of `codec.int4`."""
    block = tl.program_id(0).to(tl.int64)
    group, at, parameter, code, inside = _int4_tile(
        units, head_step, line_step, place_step, value_step, GROUPS, HALF, PADDED, UNITS
    )
    layer = tl.load(layers + block)
    first = read(layer, at, inside, FORMAT)
    second = read(layer, at + HALF * place_step, inside, FORMAT)
    ranks, others = rank(bits_of(first)), rank(bits_of(second))
    low = tl.min(tl.where(inside, tl.minimum(ranks, others), HIGHEST), 1)
    high = tl.max(tl.where(inside, tl.maximum(ranks, others), LOWEST), 1)
    there = group < units
    if tl.max(tl.where(there, tl.maximum(high, ~low), 0), 0) >= LIMIT:
        tl.store(unfit + block, 1)
    low, high = tl.where(there, low, 0), tl.where(there, high, 0)

    lowest = float_of(rank(low))
    bits = narrow(lowest, FORMAT)
    below = tl.where(lowest > 0, bits - 1, bits + 1) & 0xFFFF
    bits = tl.where(widen(bits, FORMAT) > lowest, below, bits)
    least = widen(bits, FORMAT)
    spread = float_of(rank(high)) - least
    wanted = tl.math.div_rn(spread, tl.full([UNITS], 15.0, tl.float32))
    rounded = narrow(wanted, FORMAT)
    rounded = tl.where(widen(rounded, FORMAT) < wanted, rounded + 1, rounded)
    rounded = tl.where(spread < FLAT_RANGE, 0, rounded)
    step = widen(rounded, FORMAT)
    divisor = tl.where(step > 0, step, 1.0)
    inverse = tl.where(step > 0, tl.math.div_rn(tl.full([UNITS], 1.0, tl.float32), divisor), 0.0)

    row = stored + block * row_bytes
    parameters = row.to(tl.pointer_type(tl.int16))
    tl.store(parameters + least_at + parameter, bits.to(tl.int16), there)
    tl.store(parameters + COUNT + least_at + parameter, rounded.to(tl.int16), there)
    a = bits_of((first - least[:, None]) * inverse[:, None] + 8388608.0) & 0xF
    b = bits_of((second - least[:, None]) * inverse[:, None] + 8388608.0) & 0xF
    tl.store(row + codes_at + code, (a | (b << 4)).to(tl.uint8), inside)


@triton.jit
def _int4_decode(
    layers,
    stored,
    row_bytes,
    head_step,
    line_step,
    place_step,
    value_step,
    least_at,
    codes_at,
    units,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Decode int4."""
    block = tl.program_id(0).to(tl.int64)
    group, at, parameter, code, inside = _int4_tile(
        units, head_step, line_step, place_step, value_step, GROUPS, HALF, PADDED, UNITS
    )
    row = stored + block * row_bytes
    parameters = row.to(tl.pointer_type(tl.int16))
    there = group < units
    least = widen(
        tl.load(parameters + least_at + parameter, there, 0).to(tl.int32) & 0xFFFF, FORMAT
    )
    rounded = tl.load(parameters + COUNT + least_at + parameter, there, 0).to(tl.int32) & 0xFFFF
    step = widen(rounded, FORMAT)
    both = tl.load(row + codes_at + code, inside, 0).to(tl.int32)
    layer = tl.load(layers + block)
    first = least[:, None] + (both & 0xF).to(tl.float32) * step[:, None]
    second = least[:, None] + (both >> 4).to(tl.float32) * step[:, None]
    write(layer, at, first, inside, FORMAT, EXACTLY=False)
    write(layer, at + HALF * place_step, second, inside, FORMAT, EXACTLY=False)
