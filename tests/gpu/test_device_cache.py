"""The KV store's copies into and out of a GPU's KV cache are those of the host's, byte for byte."""

from __future__ import annotations

import pytest
import torch

from tests.support.devicecache import check_against_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 6, 4, 16, 256, 3


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["HND", "NHD"])
def test_blocks_cross_the_bus_unchanged(order: tuple[int, ...]) -> None:
    shape = (BLOCKS, HEADS, TOKENS, CONTENT)
    inverse = [order.index(axis) for axis in range(4)]
    caches = {
        f"model.layers.{n}.attn": torch.empty(
            [shape[axis] for axis in order], dtype=torch.bfloat16
        ).permute(inverse)
        for n in range(LAYERS)
    }
    check_against_host(caches, BLOCKS, "cuda")
