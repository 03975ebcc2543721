"""What a run's computed tokens say of the drift of its others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace_engine.rope import Rope
from headrace_prefill.blending.kv_correction import PRIOR_ROWS, KvCorrection

LAYERS, HEADS, DIM, FIRST, LENGTH = 3, 2, 8, 100, 50
ROPE = Rope.of({"rope_theta": 100.0, "num_attention_heads": HEADS, "head_dim": DIM})
LAYER = 1


def drift(depths: Tensor) -> KvCorrection:
    return KvCorrection(ROPE, LAYERS, HEADS, DIM, FIRST, depths)


def computed(count: int) -> Tensor:
    """Depths of a run whose first tokens are computed in all layers."""
    depths = torch.zeros(LENGTH, dtype=torch.int64)
    depths[:count] = LAYERS
    return depths


def shared(count: int, by: Tensor) -> Tensor:
    """Keys that are off by `by` at position 0, at the run's first positions."""
    return ROPE.shift(by.expand(count, -1, -1), FIRST + torch.arange(count))


BY_KEY, BY_VALUE = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(1))


def test_what_all_computed_tokens_are_off_by_the_others_get_at_their_own_positions() -> None:
    of, n = drift(computed(40)), 40
    more = of.update(LAYER, torch.arange(n), shared(n, BY_KEY), BY_VALUE.expand(n, -1, -1))
    trusted = n / (n + PRIOR_ROWS)
    wanted = ROPE.shift(BY_KEY.expand(10, -1, -1), FIRST + torch.arange(40, 50))
    torch.testing.assert_close(more[0][40:], trusted * wanted)
    torch.testing.assert_close(more[1][40:], trusted * BY_VALUE.expand(10, -1, -1))
    assert not more[0][:40].any() and not more[1][:40].any()


def test_layers_and_heads_know_nothing_of_each_other() -> None:
    of = drift(computed(40))
    one = shared(40, BY_KEY)
    one[:, 1] = 0
    keys, values = of.update(LAYER, torch.arange(40), one, torch.zeros_like(one))
    assert keys[40:, 0].any() and not keys[:, 1].any() and not values.any()
    zero = torch.zeros_like(one)
    assert not of.update(2, torch.arange(40), zero, zero)[0].any()


def test_tokens_that_are_far_off_count_no_more_than_others() -> None:
    off = BY_VALUE.expand(40, -1, -1).clone()
    off[:4] *= -100
    _, found = drift(computed(40)).update(LAYER, torch.arange(40), torch.zeros_like(off), off)
    found, mean = found[-1], off.mean(0)
    assert (found - BY_VALUE).norm() < 0.5 * BY_VALUE.norm() < (mean - BY_VALUE).norm()


def test_one_token_says_little() -> None:
    _, found = drift(computed(1)).update(
        LAYER, torch.zeros(1, dtype=torch.int64), torch.zeros(1, HEADS, DIM), BY_VALUE[None]
    )
    torch.testing.assert_close(found[-1], BY_VALUE / (1 + PRIOR_ROWS))


@pytest.mark.parametrize("cuts", [[1], [7, 20], [3, 4, 5]])
def test_parts_add_up_to_the_whole(cuts: list[int]) -> None:
    noise = torch.Generator().manual_seed(2)
    keys, values = torch.randn(2, 30, HEADS, DIM, generator=noise)
    whole = drift(computed(30)).update(LAYER, torch.arange(30), keys, values)
    of, total = drift(computed(30)), [torch.zeros(1), torch.zeros(1)]
    for part in torch.tensor_split(torch.arange(30), cuts):
        more = of.update(LAYER, part, keys[part], values[part])
        total = [one + by for one, by in zip(total, more, strict=True)]
    torch.testing.assert_close(tuple(total), whole)


def test_a_token_gets_it_in_the_layers_that_do_not_compute_it() -> None:
    of = drift(torch.tensor([0, 1, 2, 3]))
    off = BY_VALUE.expand(1, -1, -1)
    for layer in range(LAYERS):
        both = of.update(layer, torch.tensor([3]), off, off)
        assert all(
            more.flatten(1).any(1).tolist() == [n <= layer for n in range(4)] for more in both
        )
