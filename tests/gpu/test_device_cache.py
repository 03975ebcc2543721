"""The KV store's copies into and out of a GPU's KV cache are those of the host's, byte for byte."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace_kvstore.blocks.sharding import WHOLE_LAYER, Shard

pytestmark = pytest.mark.gpu

BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 6, 4, 16, 256, 3
ORDERS = {"HND": (0, 1, 2, 3), "NHD": (0, 2, 1, 3), "heads first": (1, 0, 2, 3)}


@pytest.mark.parametrize(
    "held", [WHOLE_LAYER, Shard(8, 4, 4)], ids=["whole layers", "a rank's heads"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_blocks_cross_the_bus_unchanged(
    order: tuple[int, ...], dtype: torch.dtype, held: Shard
) -> None:
    from tests.support.devicecache import check_against_host

    shape = (BLOCKS, HEADS, TOKENS, CONTENT)
    inverse = [order.index(axis) for axis in range(4)]
    caches = {
        f"model.layers.{n}.attn": torch.empty([shape[axis] for axis in order], dtype=dtype).permute(
            inverse
        )
        for n in range(LAYERS)
    }
    check_against_host(caches, BLOCKS, "cuda", held)
