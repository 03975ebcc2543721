"""Number formats inside numba kernels: one element in, one float32 or integer out, no branches.

Arrays are passed as integers, and the integer type names the format of their bits:

    uint16  bfloat16        int16  float16        uint32  float32

All functions vectorise: a loop over contiguous elements that calls them becomes SIMD code. None
depends on subnormal float32 numbers, which an engine's threads may flush to zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

BITS: dict[str, Any] = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.int16}
"""The integer type for each dtype."""

F32, I32, I16, HALF = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.HalfType()


@intrinsic
def load(context: Any, array: Any, index: Any) -> Any:
    """Return `array[index]` of a contiguous array, without checks and reference counting.

    A slice of a row would count references, with atomic instructions that cost more than the row.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.load(builder.gep(data, [args[1]]))

    return array.dtype(array, types.intp), generate


@intrinsic
def store(context: Any, array: Any, index: Any, value: Any) -> Any:
    """Set `array[index] = value` in the same way; keep the low bits of a wider integer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        element = context.cast(builder, args[2], value, array.dtype)
        builder.store(element, builder.gep(data, [args[1]]))
        return context.get_dummy_value()

    return types.none(array, types.intp, value), generate


@intrinsic
def as_bits(context: Any, value: Any) -> Any:
    """Return the 32 bits of a float32, as int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), generate


@intrinsic
def as_float(context: Any, bits: Any) -> Any:
    """Return the float32 with these 32 bits (any integer type; higher bits are dropped)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kept = builder.trunc(args[0], I32) if args[0].type.width > 32 else args[0]
        return builder.bitcast(kept, F32)

    return types.float32(bits), generate


@intrinsic
def widen(context: Any, element: Any) -> Any:
    """Return an element of a format above as float32, exactly."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if element == types.int16:
            return builder.fpext(builder.bitcast(args[0], HALF), F32)
        if element == types.uint16:
            wide = builder.shl(builder.zext(args[0], I32), I32(16))
            return builder.bitcast(wide, F32)
        return builder.bitcast(args[0], F32)

    return types.float32(element), generate


def _narrowing(like: Any, rounded: bool) -> Any:
    """Generator of an element of `like` from a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(args[0], HALF), I16)
        bits = builder.bitcast(args[0], I32)
        if like != types.uint16:
            return bits
        if rounded:
            odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
            bits = builder.add(builder.add(bits, I32(0x7FFF)), odd)
        return builder.trunc(builder.lshr(bits, I32(16)), I16)

    return like(types.float32, like), generate


@intrinsic
def narrow(context: Any, value: Any, like: Any) -> Any:
    """Return a finite float32 in the format of `like`, rounded to nearest, ties to even."""
    return _narrowing(like, rounded=True)


@intrinsic
def cut(context: Any, value: Any, like: Any) -> Any:
    """Return `narrow` of a value that bfloat16 holds exactly, without the cost of rounding."""
    return _narrowing(like, rounded=False)


@intrinsic
def e4m3(context: Any, code: Any) -> Any:
    """Return the value of an e4m3 code divided by 2^8; NaN's two codes are read as +-480 / 2^8.

    The code's bits are those of a float16 with another bias, subnormals included.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.shl(builder.sext(args[0], I16), I16(7))
        return builder.fpext(builder.bitcast(builder.and_(wide, I16(0xBF80)), HALF), F32)

    return types.float32(types.uint8), generate


def _either(comparison: str) -> Any:
    """Select one of two int32. (Numba's `max` and `min` widen them, which halves the SIMD
    width.)"""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.icmp_signed(comparison, *args), *args)

    return types.int32(types.int32, types.int32), generate


@intrinsic
def larger(context: Any, a: Any, b: Any) -> Any:
    return _either(">")


@intrinsic
def smaller(context: Any, a: Any, b: Any) -> Any:
    return _either("<")


@njit(inline="always")
def magnitude(value: Any) -> Any:
    """Return the bits of |value|: an int32 that grows with |value|, infinity and NaN on top."""
    return np.int32(as_bits(value) & 0x7FFFFFFF)


@njit(inline="always")
def rank(value: Any) -> Any:
    """Return an int32 that grows with `value`; NaN lies beyond the infinity of its sign.

    `unrank` is its inverse.
    """
    bits = as_bits(value)
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@njit(inline="always")
def unrank(ranked: Any) -> Any:
    """Return the float32 whose rank this is."""
    return as_float(np.int32(ranked ^ ((ranked >> 31) & 0x7FFFFFFF)))
