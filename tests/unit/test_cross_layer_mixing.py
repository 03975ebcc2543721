"""What may be done before, after or instead of mixing two layers' KV."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace_engine.rope import Rope
from headrace_prefill.cross_layer.engine.blocks import Mixer
from headrace_prefill.cross_layer.mixing import by_channel, mix

CONFIG = {"num_attention_heads": 1, "head_dim": 16, "rope_theta": 10000.0}
DIM = CONFIG["head_dim"]
sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 9999))


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


@given(sizes, st.integers(0, 100_000))
def test_mixing_rotated_keys_is_rotating_mixed_keys(
    shape: tuple[int, int, int, int], position: int
) -> None:
    heads, _, tokens, seed = shape
    first, last, a, b = draw(seed, *[(tokens, heads, DIM)] * 2, *[(heads, DIM // 2)] * 2)
    a, b = by_channel(a), by_channel(b)

    def turned(keys: Tensor) -> Tensor:
        return Rope.of(CONFIG).shift(keys.float(), position).double()

    torch.testing.assert_close(
        mix(turned(first), turned(last), a, b),
        turned(mix(first, last, a, b)),
        atol=1e-5,
        rtol=1e-5,
    )


def test_weights_that_differ_within_a_pair_do_not_commute_with_the_rotation() -> None:
    keys, weight = draw(0, (1, 1, DIM), (1, DIM))
    rope = Rope.of(CONFIG)
    apart = rope.shift(keys * weight, 5) - rope.shift(keys, 5) * weight
    assert apart.abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=20, deadline=None)
@given(blocks=st.lists(st.integers(0, 9), max_size=12), seed=st.integers(0, 99))
def test_blocks_are_mixed_in_float32_and_rounded_once(
    dtype: torch.dtype, blocks: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    first, last = torch.randn(10, 2, 8, 6).to(dtype), torch.randn(10, 2, 8, 6).to(dtype)
    a, b = torch.randn(2, 8, 6).to(dtype), torch.randn(2, 8, 6).to(dtype)
    mixed = Mixer().mix(first, last, np.array(blocks, np.int64), a, b)
    expected = (first[blocks].float() * a.float() + last[blocks].float() * b.float()).to(dtype)
    torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=1e-6)


def test_the_next_batch_may_be_smaller_or_larger() -> None:
    mixer, cache = Mixer(), torch.arange(40.0).reshape(10, 4)
    one, zero = torch.ones(4), torch.zeros(4)
    for size in (3, 1, 10):
        blocks = np.arange(size)
        assert torch.equal(mixer.mix(cache, cache, blocks, one, zero), cache[:size])
