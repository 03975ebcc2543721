"""What must hold of a `DeviceCache` with a codec on any device, with the CPU's coder beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace_engine.connector.caches.device_cache import DeviceCache
from headrace_kvstore.blocks.block_layout import BlockLayout
from headrace_kvstore.blocks.checksum import checksum
from headrace_kvstore.blocks.sharding import WHOLE_LAYER, Shard
from headrace_kvstore.codec import CODECS, LayerShape, Order, QuantizationRangeError
from tests.support.device_kernels import layers

BLOCKS, LAYERS = 5, 2


def check_coded_against_host(
    device: str, name: str, shape: LayerShape, held: Shard = WHOLE_LAYER
) -> None:
    """Save under a codec, a block at a time, load into other blocks, and compare with the CPU's
    coder. `held`: which part of each stored layer that is."""
    h, n, d = shape.kv_heads, shape.block_tokens, shape.head_dim
    sizes = (BLOCKS, h, n, 2 * d) if shape.order is Order.HND else (BLOCKS, n, h, 2 * d)
    given = [layers(shape, BLOCKS, seed=layer) for layer in range(LAYERS)]
    there = [one.view(getattr(torch, shape.dtype)).view(sizes).clone().to(device) for one in given]
    caches = {
        f"layers.{i}": one if shape.order is Order.HND else one.transpose(1, 2)
        for i, one in enumerate(there)
    }
    layout, codec = BlockLayout.of_tensors(caches, BLOCKS), CODECS[name]()
    cache = DeviceCache(caches, layout, codec, shape, held, staging_bytes=1)
    cache.warm()
    coder, size = codec.bind(shape), cache.stored_layer_bytes
    ids = np.array([4, 0, 2])
    memory = np.full((len(ids), LAYERS, held.parts, size), 9, np.uint8)
    steps = np.arange(len(ids), dtype=np.uint64) * np.uint64(LAYERS * held.parts * size)
    payloads = memory.ctypes.data + steps
    seeds = np.arange(len(ids) * LAYERS, dtype=np.uint64).reshape(len(ids), LAYERS)
    sums = cache.save(ids, payloads, seeds)

    wanted = np.full_like(memory, 9)
    wanted[:, :, held.first] = 0
    back = np.empty((len(ids), LAYERS, shape.layer_bytes), np.uint8)
    for i, block in enumerate(ids):
        for layer in range(LAYERS):
            stored = wanted[i, layer, held.first, : coder.stored_bytes]
            coder.encode(given[layer][block].numpy(), stored)
            coder.decode(stored, back[i, layer])
    assert (memory == wanted).all()
    places = np.arange(LAYERS, dtype=np.uint64) * np.uint64(held.parts) + np.uint64(held.first)
    rows = payloads[:, None] + places * np.uint64(size)
    assert (sums == checksum(rows, size, seeds)).all()

    into = np.array([1, 3, 0])
    for layer in range(LAYERS):
        found = cache.load(layer, into, payloads, seeds[:, layer : layer + 1])
        assert (found == sums[:, layer : layer + 1]).all()
        now = there[layer].cpu().contiguous().view(torch.uint8).view(BLOCKS, -1).numpy()
        assert (now[into] == back[:, layer]).all()

    there[1].view(BLOCKS, -1)[2, 0] = float("nan")
    with pytest.raises(QuantizationRangeError):
        cache.save(np.array([2]), payloads[:1], seeds[:1])
    cache.close()
