"""Number formats inside Triton kernels, as `codec.bitcast` has them inside numba's.

`FORMAT` names an element: "float32", "bfloat16" or "float16". All functions round to nearest, ties
to even. Kernels must therefore be launched with `EXACT`, which forbids fused multiply-and-add.
"""

from __future__ import annotations

import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}


@triton.jit
def read(base, at, inside, FORMAT: tl.constexpr):
    """Read elements as float32, exactly; `base`, addresses as int64; `at`, in elements; 0
    outside."""
    if FORMAT == "float32":
        found = tl.load((base + 4 * at).to(tl.pointer_type(tl.float32)), inside, 0.0)
    elif FORMAT == "float16":
        found = tl.load((base + 2 * at).to(tl.pointer_type(tl.float16)), inside, 0.0).to(tl.float32)
    else:
        half = tl.load((base + 2 * at).to(tl.pointer_type(tl.int16)), inside, 0)
        found = (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return found


@triton.jit
def write(base, at, value, inside, FORMAT: tl.constexpr, EXACTLY: tl.constexpr):
    """Write float32 as elements, rounded; arguments as `read`.

    EXACTLY: whether bfloat16 holds the values exactly, so that nothing is rounded.
    """
    if FORMAT == "float32":
        tl.store((base + 4 * at).to(tl.pointer_type(tl.float32)), value, inside)
    else:
        if EXACTLY and FORMAT == "bfloat16":
            half = (bits_of(value) >> 16).to(tl.int16)
        else:
            half = narrow(value, FORMAT).to(tl.int16)
        tl.store((base + 2 * at).to(tl.pointer_type(tl.int16)), half, inside)


@triton.jit
def bits_of(value):
    """Return the 32 bits of a float32, as int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Return the float32 with these 32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def narrow(value, FORMAT: tl.constexpr):
    """Return the 16 bits of a float32, rounded to float16, or else to bfloat16; as int32.

    A NaN stays one; without this rule a GPU's NaN, 0x7FFFFFFF, would be rounded up to -0.
    """
    if FORMAT == "float16":
        found = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        bits = bits_of(value)
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
        found = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, found)
    return found


@triton.jit
def widen(half, FORMAT: tl.constexpr):
    """Return the float32 of 16 bits, as `narrow` makes them."""
    if FORMAT == "float16":
        found = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        found = float_of(half << 16)
    return found


@triton.jit
def rank(bits):
    """Return an int32 that grows with the float32 of these bits; the function is its own
    inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
