"""The Triton kernel for mixed KV, in Triton's interpreter, is the plain mixture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace_prefill.cross_layer.mixing import mix

MODULE = "headrace_prefill.cross_layer.engine.triton_mixing"
BLOCKS, TOKENS, HEADS, DIM = 7, 16, 3, 32


@pytest.fixture
def mix_blocks() -> Iterator[Any]:
    """The function, its kernel compiled for the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, MODULE, raising=False)
        from headrace_prefill.cross_layer.engine.triton_mixing import mix_blocks

        yield mix_blocks
    sys.modules.pop(MODULE, None)


def noise(dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_mixed_in_float32_and_rounded_once(dtype: torch.dtype, mix_blocks: Any) -> None:
    shape = BLOCKS, TOKENS, HEADS, DIM
    first, last = noise(dtype, 1, *shape), noise(dtype, 2, *shape)
    a, b = noise(dtype, 3, HEADS, DIM), noise(dtype, 4, HEADS, DIM)
    blocks = torch.tensor([5, 0, 5, 6], dtype=torch.int32)
    expected = mix(*(x.float() for x in (first[blocks], last[blocks], a, b)))
    if dtype == torch.bfloat16:  # which the interpreter cuts off, where a GPU rounds to the nearest
        expected = (expected.view(torch.int32) & ~0xFFFF).view(torch.float32)
    found = mix_blocks(first, last, blocks, a, b)
    torch.testing.assert_close(found, expected.to(dtype), atol=1e-6, rtol=1e-6)


def test_weights_may_be_in_a_kernels_own_order_of_a_block(mix_blocks: Any) -> None:
    first, last = (noise(torch.float32, n, BLOCKS, HEADS, 5, 7) for n in (1, 2))
    a, b = (noise(torch.float32, n, HEADS, 5, 7) for n in (3, 4))
    blocks = torch.tensor([2, 1])
    expected = first[blocks] * a + last[blocks] * b
    torch.testing.assert_close(mix_blocks(first, last, blocks, a, b), expected)


def test_k_and_v_side_by_side_in_one_cache_are_read_with_its_strides(mix_blocks: Any) -> None:
    both = noise(torch.float32, 1, BLOCKS, 2, TOKENS, HEADS, DIM)
    a, b = (noise(torch.float32, n, HEADS, DIM) for n in (3, 4))
    keys, values = both.unbind(1)
    blocks = torch.tensor([4])
    torch.testing.assert_close(
        mix_blocks(keys, values, blocks, a, b), mix(keys[blocks], values[blocks], a, b)
    )


def test_no_blocks_are_no_output(mix_blocks: Any) -> None:
    cache, weight = noise(torch.float32, 1, BLOCKS, TOKENS, HEADS, DIM), torch.ones(HEADS, DIM)
    found = mix_blocks(cache, cache, torch.tensor([], dtype=torch.int32), weight, weight)
    assert found.shape == (0, TOKENS, HEADS, DIM)


def test_weights_of_another_shape_are_refused(mix_blocks: Any) -> None:
    cache, weight = noise(torch.float32, 1, BLOCKS, TOKENS, HEADS, DIM), torch.ones(DIM, HEADS)
    with pytest.raises(ValueError, match="weights must have the shape"):
        mix_blocks(cache, cache, torch.tensor([1]), weight, weight)
