"""Codecs against naive models: every stored byte, every bound."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kvstore.codec import Fp8, Int4, LayerShape, Order
from tests.support.kv import from_bits, from_layer, to_bits, to_layer

E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
)[:127]
"""Magnitudes of codes 0 to 126; 127 is NaN."""
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative error of rounding to the format."""
DTYPES = st.sampled_from(["bfloat16", "float16", "float32"])
ORDERS = st.sampled_from(Order)
QUICK = settings(max_examples=40)


@st.composite
def layers(draw, group):
    """A shape, and K and V of all magnitudes that its dtype holds below the codecs' limit, also
    when they are rounded up."""
    sizes = st.integers(1, 3).map(lambda n: n * group)
    shape = LayerShape(
        draw(st.integers(1, 3)), draw(sizes), draw(sizes), draw(DTYPES), draw(ORDERS)
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    top = 13 if shape.dtype == "float16" else 124
    low, high = sorted(draw(st.tuples(st.integers(-149, top), st.integers(-149, top))))
    offset = draw(st.sampled_from([0.0, 1.0, -1.0, 1000.0]))
    parts = []
    for _ in range(2):
        size = (shape.kv_heads, shape.block_tokens, shape.head_dim)
        exponents = rng.integers(low, high + 1, size)
        numbers = rng.choice([-1.0, 1.0], size) * rng.uniform(1, 1.99, size) * 2.0**exponents
        numbers[rng.random(size) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0.0
        kept = from_bits(to_bits((numbers + offset).astype(np.float32), shape.dtype), shape.dtype)
        parts.append(kept.reshape(size))
    return shape, *parts


def encoded(codec, shape, keys, values):
    coder = codec.bind(shape)
    layer, stored = to_layer(shape, keys, values), np.full(coder.stored_bytes, 170, np.uint8)
    coder.encode(layer, stored)
    return stored


def decoded(codec, shape, stored):
    layer = np.full(shape.layer_bytes, 170, np.uint8)
    codec.bind(shape).decode(stored, layer)
    return from_layer(shape, layer)


def matrices(keys, values):
    """K and V as [head][row][column], as stored in every order; a row shares a scale."""
    return keys.swapaxes(1, 2), values


@QUICK
@given(layers(1))
def test_fp8_stores_what_the_format_says(layer):
    shape, keys, values = layer
    k_min = -15 if shape.dtype == "float16" else -100
    scales, codes = [], []
    for matrix in matrices(keys, values):
        largest = np.abs(matrix).max(axis=2).astype(np.float64)
        k = np.full(largest.shape, k_min)
        while (small := largest > 448 * 2.0**k).any():
            k += small
        scales.append((127 + k).ravel())
        scaled = matrix.astype(np.float64) / 2.0 ** k[:, :, None]
        apart = np.abs(np.abs(scaled)[..., None] - E4M3)
        nearest = apart == apart.min(axis=-1, keepdims=True)
        even = np.where(nearest, np.arange(127) % 2, 2).argmin(axis=-1)
        codes.append((even | np.where(np.signbit(scaled), 128, 0)).ravel())
    expected = np.concatenate((*scales, *codes)).astype(np.uint8)
    stored = encoded(Fp8(), shape, keys, values)
    assert np.array_equal(stored[: expected.size], expected)
    assert not stored[expected.size :].any()


@QUICK
@given(layers(1))
def test_fp8_errs_within_its_bound_and_only_once(layer):
    """|x - x'| <= max(2^-4 |x|, 2^(k-10)); what was decoded is encoded without further loss."""
    shape, keys, values = layer
    k_min = -15 if shape.dtype == "float16" else -100
    got = decoded(Fp8(), shape, encoded(Fp8(), shape, keys, values))
    for part, back, axis in zip((keys, values), got, (1, 2), strict=True):
        exact = part.astype(np.float64)
        largest = np.abs(exact).max(axis=axis, keepdims=True)
        with np.errstate(divide="ignore"):
            k = np.maximum(k_min, np.ceil(np.log2(largest / 448)))
        assert (np.abs(exact - back) <= np.maximum(np.abs(exact) / 16, 2.0 ** (k - 10))).all()
    again = decoded(Fp8(), shape, encoded(Fp8(), shape, *got))
    assert all(np.array_equal(a, b) for a, b in zip(got, again, strict=True))


def grouped(matrix, group):
    """[head][row][column] to [head][row][group][element]."""
    h, rows, cols = matrix.shape
    return matrix.reshape(h, rows, cols // group, group)


def rounded(numbers, dtype, up):
    """The nearest number of the 16-bit format that is not above (`up`: not below)."""
    bits = to_bits(numbers, dtype).view(np.uint16).reshape(numbers.shape).astype(np.int64)
    near = from_bits(bits.astype(np.uint16).ravel().view(np.uint8), dtype).reshape(numbers.shape)
    wrong = near < numbers if up else near > numbers
    away = (numbers > 0) == up
    moved = (bits + np.where(wrong, np.where(away, 1, -1), 0)).astype(np.uint16)
    return moved, from_bits(moved.ravel().view(np.uint8), dtype).reshape(numbers.shape)


@QUICK
@given(layers(4), st.sampled_from([2, 4]))
def test_int4_stores_what_the_format_says_within_its_bound(layer, group):
    """|x - x'| <= s/2 + (u + 2^-22)(|x'| + 15 s) + 2^-100."""
    shape, keys, values = layer
    kept = "float16" if shape.dtype == "float16" else "bfloat16"
    leasts, steps, codes = [], [], []
    got = decoded(Int4(group), shape, stored := encoded(Int4(group), shape, keys, values))
    for matrix, back in zip(matrices(keys, values), matrices(*got), strict=True):
        axis = 3
        x = grouped(matrix, group)
        lowest = x.min(axis=axis)
        minus_zero = (lowest == 0) & np.signbit(x).any(axis=axis)
        bits, least = rounded(np.where(minus_zero, np.float32(-0.0), lowest), kept, up=False)
        spread = (x.max(axis=axis) - least).astype(np.float32)
        step_bits, step = rounded(spread / np.float32(15), kept, up=True)
        flat = spread < 2.0**-100
        step_bits, step = np.where(flat, 0, step_bits), np.where(flat, np.float32(0), step)
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.where(step > 0, np.float32(1) / step, np.float32(0))
        m, s, inverse = (np.expand_dims(part, axis) for part in (least, step, inverse))
        q = np.rint((x - m) * inverse).astype(np.int64)
        assert q.min() >= 0 and q.max() <= 15
        low, high = np.split(q, 2, axis=axis)
        leasts.append(bits.ravel())
        steps.append(step_bits.ravel())
        codes.append((low | (high << 4)).ravel())

        y = grouped(back, group).astype(np.float64)
        slack = (ROUNDING[shape.dtype] + 2.0**-22) * (np.abs(y) + 15 * s) + 2.0**-100
        assert (np.abs(x.astype(np.float64) - y) <= s / 2 + slack).all()
    parameters = np.concatenate((*leasts, *steps)).astype(np.uint16).view(np.uint8)
    expected = np.concatenate((parameters, np.concatenate(codes).astype(np.uint8)))
    assert np.array_equal(stored[: expected.size], expected)
    assert not stored[expected.size :].any()


@QUICK
@given(st.sampled_from([Fp8(), Int4(group=4)]), DTYPES, ORDERS, st.integers(0, 2**32))
def test_any_bytes_decode_and_fill_the_whole_layer(codec, dtype, order, seed):
    """Garbage (checksums are checked elsewhere) does no harm, and nothing else is touched."""
    shape = LayerShape(2, 4, 8, dtype, order)
    coder = codec.bind(shape)
    stored = np.random.default_rng(seed).integers(0, 256, coder.stored_bytes, np.uint8)
    results = []
    for filling in (0, 255):
        buffer = np.full(coder.layer_bytes + 16, filling, np.uint8)
        coder.decode(stored, buffer[8:-8])
        assert (buffer[:8] == filling).all() and (buffer[-8:] == filling).all()
        results.append(buffer[8:-8].tobytes())
    assert results[0] == results[1]
