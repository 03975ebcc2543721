"""Codecs: what they take, what they refuse, and stored formats that never change silently."""

import hashlib

import numpy as np
import pytest

from headrace_kvstore.codec import (
    CODECS,
    Fp8,
    Int4,
    LayerShape,
    Order,
    QuantizationRangeError,
    Raw,
    tag,
)
from tests.support.kv import from_layer, to_layer

SMOLLM2 = LayerShape(3, 128, 64, "bfloat16", Order.VEC)
LOSSY = [Fp8(), Int4()]


def there_and_back(one, shape, keys, values):
    """K and V after encode and decode, as float32."""
    coder = one.bind(shape)
    layer, stored = to_layer(shape, keys, values), np.empty(coder.stored_bytes, np.uint8)
    coder.encode(layer, stored)
    result = np.empty_like(layer)
    coder.decode(stored, result)
    return from_layer(shape, result)


def normal(shape, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    size = (shape.kv_heads, shape.block_tokens, shape.head_dim)
    return [(scale * rng.normal(size=size)).astype(np.float32) for _ in range(2)]


class TestShape:
    def test_layer_bytes_are_those_of_k_and_v(self):
        assert SMOLLM2.layer_bytes == 2 * 3 * 128 * 64 * 2 == 98_304

    def test_an_order_may_be_given_by_name(self):
        assert LayerShape(1, 2, 2, "float16", "nhd").order is Order.NHD

    @pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, -4)])
    def test_sizes_below_one_are_refused(self, wrong):
        with pytest.raises(ValueError, match="needs heads, tokens and channels"):
            LayerShape(*wrong, "float32", Order.HND)

    def test_unknown_dtype_and_order_are_refused(self):
        with pytest.raises(ValueError, match="int3"):
            LayerShape(1, 1, 1, "int3", Order.HND)
        with pytest.raises(ValueError, match="spiral"):
            LayerShape(1, 1, 1, "float32", "spiral")

    @pytest.mark.parametrize("order", list(Order))
    def test_halves_find_each_key_and_value_where_the_engine_keeps_it(self, order):
        shape = LayerShape(2, 4, 6, "float32", order)
        keys = np.arange(48, dtype=np.float32).reshape(2, 4, 6)
        found = shape.halves(to_layer(shape, keys, 100 + keys).view(np.float32))
        assert np.array_equal(found, (keys, 100 + keys))


class TestRegistry:
    def test_every_codec_is_made_by_its_name(self):
        assert {name: made().name for name, made in CODECS.items()} == {n: n for n in CODECS}

    def test_the_tag_tells_parameters_apart(self):
        assert tag(Raw()) == "raw"
        assert tag(Fp8()) == "fp8"
        assert tag(Int4(group=64)) == "int4:group=64,window_tokens=128"

    def test_lossy_codecs_say_so(self):
        assert [one.lossy for one in (Raw(), *LOSSY)] == [False, True, True]


class TestSizes:
    @pytest.mark.parametrize(
        ("one", "stored"),
        [
            (Raw(), 98_304),
            (Fp8(), 49_152 + 3 * (64 + 128)),
            (Int4(), 24_576 + 4 * 49_152 // 32),
            (Int4(group=64), 24_576 + 4 * 49_152 // 64),
        ],
    )
    def test_stored_bytes_of_a_real_layer(self, one, stored):
        assert one.stored_bytes(SMOLLM2) == stored

    @pytest.mark.parametrize("one", LOSSY)
    def test_stored_bytes_are_whole_cache_lines_and_the_rest_is_zero(self, one):
        shape = LayerShape(1, 4, 8, "float16", Order.NHD)
        stored = np.full(one.stored_bytes(shape), 255, np.uint8)
        one.bind(shape).encode(to_layer(shape, *normal(shape)), stored)
        assert stored.size % 64 == 0
        assert stored[-4:].tolist() == [0, 0, 0, 0]

    def test_a_group_larger_than_the_block_takes_the_whole_block(self):
        shape = LayerShape(8, 16, 128, "bfloat16", Order.NHD)
        half = 8 * 16 * 128
        assert Int4(group=32).stored_bytes(shape) == half + 4 * (half // 16 + half // 32)

    @pytest.mark.parametrize("sizes", [(1, 48, 64), (1, 64, 80), (1, 7, 64), (1, 64, 3)])
    def test_sizes_that_groups_do_not_divide_are_refused(self, sizes):
        with pytest.raises(ValueError, match="cannot part"):
            Int4(group=32).stored_bytes(LayerShape(*sizes, "float16", Order.HND))

    @pytest.mark.parametrize("one", LOSSY)
    def test_a_quantised_cache_is_raw_only(self, one):
        quantised = LayerShape(1, 32, 64, "uint8", Order.HND)
        with pytest.raises(ValueError, match="uint8"):
            one.bind(quantised)
        assert Raw().stored_bytes(quantised) == quantised.layer_bytes


class TestBuffers:
    @pytest.mark.parametrize("one", LOSSY)
    def test_wrong_size_type_shape_and_stride_are_refused(self, one):
        coder = one.bind(SMOLLM2)
        layer, stored = (np.zeros(n, np.uint8) for n in (coder.layer_bytes, coder.stored_bytes))
        for bad in (layer[1:], layer.view(np.int8), layer.reshape(2, -1), np.repeat(layer, 2)[::2]):
            with pytest.raises(ValueError, match="layer"):
                coder.encode(bad, stored)
            with pytest.raises(ValueError, match="layer"):
                coder.decode(stored, bad)
        for bad in (stored[1:], stored.view(np.int8), np.repeat(stored, 2)[::2]):
            with pytest.raises(ValueError, match="stored"):
                coder.encode(layer, bad)
            with pytest.raises(ValueError, match="stored"):
                coder.decode(bad, layer)

    @pytest.mark.parametrize("one", LOSSY)
    def test_a_layer_that_begins_within_an_element_is_refused(self, one):
        coder = one.bind(SMOLLM2)
        layer = np.zeros(coder.layer_bytes + 1, np.uint8)[1:]
        with pytest.raises(ValueError, match="within an element"):
            coder.encode(layer, np.zeros(coder.stored_bytes, np.uint8))


@pytest.mark.parametrize("one", LOSSY, ids=lambda one: one.name)
class TestValues:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("order", [Order.VEC, Order.NHD])
    def test_values_that_are_not_finite_are_refused_wherever_they_stand(
        self, one, dtype, value, order
    ):
        shape = LayerShape(2, 32, 32, dtype, order)
        for plane in range(2):
            parts = normal(shape)
            parts[plane][1, 31, 31] = value
            with pytest.raises(QuantizationRangeError):
                there_and_back(one, shape, *parts)

    @pytest.mark.parametrize(
        ("dtype", "limit"), [("bfloat16", 2.0**126), ("float16", 2.0**15), ("float32", 2.0**126)]
    )
    def test_the_largest_values_come_back_finite_and_larger_ones_are_refused(
        self, one, dtype, limit
    ):
        shape = LayerShape(1, 32, 32, dtype, Order.VEC)
        parts = normal(shape)
        below = limit * (1 - 2.0**-8)
        parts[0][0, :2, 0] = below, -below
        keys, _ = there_and_back(one, shape, *parts)
        assert np.isfinite(keys).all()
        assert np.allclose(keys[0, :2, 0], [below, -below], rtol=0.07)
        for sign in (1, -1):
            parts[0][0, 0, 0] = sign * limit
            with pytest.raises(QuantizationRangeError):
                there_and_back(one, shape, *parts)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_zeros_come_back_as_zeros(self, one, dtype):
        shape = LayerShape(1, 32, 32, dtype, Order.HND)
        zeros = np.zeros((1, 32, 32), np.float32)
        assert not np.any(there_and_back(one, shape, zeros, zeros))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_a_key_channel_of_great_magnitude_does_not_spoil_its_neighbours(self, one, dtype):
        shape = LayerShape(1, 32, 64, dtype, Order.VEC)
        keys, values = normal(shape)
        keys[:, :, 5] = 200 + keys[:, :, 5]
        got, _ = there_and_back(one, shape, keys, values)
        quiet = np.delete(got - keys, 5, axis=2)
        assert np.sqrt((quiet**2).mean()) < 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("order", [Order.VEC, Order.NHD])
def test_int4_gives_constant_groups_back_exactly(dtype, order):
    shape = LayerShape(2, 32, 32, dtype, order)
    keys = np.broadcast_to(np.arange(-16, 16, dtype=np.float32), (2, 32, 32))
    values = keys.swapaxes(1, 2) * 0.125
    got = there_and_back(Int4(), shape, keys, values)
    assert np.array_equal(got[0], keys) and np.array_equal(got[1], values)


def test_fp8_keeps_every_e4m3_number_exactly():
    numbers = np.array([m * 2.0**e for e in range(-9, 6) for m in range(8, 16)], np.float32)[:112]
    signed = np.concatenate((numbers, -numbers, np.zeros(32, np.float32))).reshape(1, 1, 256)
    shape = LayerShape(1, 1, 256, "bfloat16", Order.HND)
    keys, values = there_and_back(Fp8(), shape, signed, signed)
    assert np.array_equal(values, signed) and np.array_equal(keys, signed)


GOLDEN = {
    ("fp8", "bfloat16"): "6fd5e2e1adcf5f54",
    ("fp8", "float16"): "3e0fd0be9018a111",
    ("fp8", "float32"): "3e0fd0be9018a111",
    ("int4", "bfloat16"): "73967c2b387eedc1",
    ("int4", "float16"): "2302c15ca7ce2498",
    ("int4", "float32"): "5cb33bed2fbccd1d",
}
"""The same bytes whatever the engine's order."""


@pytest.mark.parametrize(("name", "dtype"), GOLDEN)
@pytest.mark.parametrize("order", ["vec", "hnd", "nhd"])
def test_stored_formats_are_those_of_version_1(name, dtype, order):
    """If this fails, the format has changed: raise the codec's version and renew the digests."""
    one = CODECS[name]()
    shape = LayerShape(2, 32, 64, dtype, order)
    steps = np.arange(2 * 32 * 64, dtype=np.int64).reshape(2, 32, 64)
    keys = ((steps * 7919) % 1021 - 510).astype(np.float32) / 64
    values = ((steps * 104_729) % 2039 - 1019).astype(np.float32) / 1024
    stored = np.empty(one.stored_bytes(shape), np.uint8)
    one.bind(shape).encode(to_layer(shape, keys, values), stored)
    assert one.version == 1
    assert hashlib.blake2b(stored.tobytes(), digest_size=8).hexdigest() == GOLDEN[name, dtype]
