"""An engine's cache whose blocks are stored under a codec: what comes back, and what is summed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from headrace_engine.connector.caches.quantized_cache import (
    PAGE_BYTES,
    QuantizedCache,
    layer_shape,
    stored_layer_bytes,
)
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.checksum import checksum
from headrace_kvstore.codec import CODECS, Codec, LayerShape, Order
from headrace_kvstore.nvme.segment import page_memory
from tests.support.tensor import Tensor

LAYERS, BLOCKS = 3, 4
SHAPE = LayerShape(kv_heads=2, block_tokens=32, head_dim=16, dtype="float32", order=Order.VEC)
SEEDS = np.arange(BLOCKS * LAYERS, dtype=np.uint64).reshape(BLOCKS, LAYERS)
BLOCK_IDS = np.array([2, 0, 3, 1])


class Cache:
    """An engine's cache of normal numbers, and memory for its payloads."""

    def __init__(self, given: Codec, fill: int = 0) -> None:
        rng = np.random.default_rng(fill)
        size = (BLOCKS, SHAPE.kv_heads, SHAPE.block_tokens, 2 * SHAPE.head_dim)
        self.data = [rng.normal(size=size).astype(np.float32) for _ in range(LAYERS)]
        tensors = {f"layers.{i}": Tensor(data) for i, data in enumerate(self.data)}
        self.coded = QuantizedCache(BlockLayout.of_tensors(tensors, BLOCKS), given, SHAPE)
        self.memory, start = page_memory(BLOCKS * LAYERS * self.coded.part_bytes)
        step = LAYERS * self.coded.part_bytes
        self.payloads = start + np.arange(BLOCKS, dtype=np.uint64) * np.uint64(step)


@pytest.fixture(params=["fp8", "int4"])
def given(request: pytest.FixtureRequest) -> Codec:
    return CODECS[request.param]()


def test_what_was_saved_is_loaded_within_the_codec_s_error(given: Codec) -> None:
    writer, reader = Cache(given), Cache(given, fill=1)
    saved = writer.coded.save(BLOCK_IDS, writer.payloads, SEEDS)
    for layer in range(LAYERS):
        sums = reader.coded.load(layer, BLOCK_IDS, writer.payloads, SEEDS[:, layer])
        assert (sums == saved[:, layer]).all()
        error = reader.data[layer] - writer.data[layer]
        rms = np.sqrt((error**2).mean() / (writer.data[layer] ** 2).mean())
        assert 0 < rms < 0.15


def test_sums_cover_the_whole_stored_layer(given: Codec) -> None:
    """As whoever moves stored blocks sums them, without knowing a codec."""
    cache = Cache(given)
    saved = cache.coded.save(BLOCK_IDS, cache.payloads, SEEDS)
    size = cache.coded.part_bytes
    at = cache.payloads[:, None] + np.arange(LAYERS, dtype=np.uint64) * np.uint64(size)
    assert (checksum(at, size, SEEDS) == saved).all()


def test_a_flipped_bit_changes_the_sum_and_nothing_breaks(given: Codec) -> None:
    cache = Cache(given)
    saved = cache.coded.save(BLOCK_IDS, cache.payloads, SEEDS)
    cache.memory[7] ^= 1
    sums = cache.coded.load(0, BLOCK_IDS, cache.payloads, SEEDS[:, 0])
    assert (sums != saved[:, 0]).tolist() == [True, False, False, False]


def test_stored_layers_are_whole_pages(given: Codec) -> None:
    size = stored_layer_bytes(given, SHAPE)
    assert size % PAGE_BYTES == 0
    assert given.stored_bytes(SHAPE) <= size < given.stored_bytes(SHAPE) + PAGE_BYTES


def test_a_cache_of_another_shape_is_refused(given: Codec) -> None:
    cache = Cache(given)
    other = LayerShape(1, 32, 16, "float32", Order.VEC)
    with pytest.raises(ValueError, match="are not"):
        QuantizedCache(cache.coded.layout, given, other)


def test_the_shape_comes_from_the_engine_s_own_description() -> None:
    spec = SimpleNamespace(num_kv_heads=2, block_size=32, head_size=16, dtype="torch.float32")
    spec.page_size_bytes = SHAPE.layer_bytes
    assert layer_shape(spec, "cpu/vec") == SHAPE
    assert layer_shape(spec, "cuda").order is Order.HND
    with pytest.raises(ValueError, match="not on cpu/amx; give raw"):
        layer_shape(spec, "cpu/amx")
    spec.page_size_bytes //= 2
    with pytest.raises(ValueError, match="MLA keeps one vector for both"):
        layer_shape(spec, "cuda")
