"""Whether a slow tier's KV is loaded or computed: the models, the choice, and the way back."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from headrace_engine.connector.load_price import PROBE_SHARE, LoadPrice, TierRun
from headrace_engine.step_time import StepTime, pairs_of

B, LAYERS = 128, 32


def engine(
    token_s: float = 1e-3, pair_s: float = 1e-7, nvme_s: float | None = None, fixed_s: float = 0.0
) -> LoadPrice:
    """A price that has seen prompts of many lengths, and loads of two sizes."""
    price = LoadPrice(B, LAYERS, StepTime())
    for first in (0, 2000, 0, 5000, 0):
        for tokens in (64, 128, 250, 500, 1000, 2000, 4000, 7000):
            work = pairs_of(first, first + tokens)
            price.computed(tokens, 0, 0, 0, work, 0.02 + token_s * tokens + pair_s * work)
    for blocks in (2, 40):
        if nvme_s is not None:
            price.loaded("nvme", blocks, fixed_s + nvme_s * blocks)
    return price


def test_pairs_are_counted() -> None:
    assert pairs_of(0, 4) == 1 + 2 + 3 + 4
    assert pairs_of(3, 5) == 4 + 5


class TestChoice:
    def test_a_fast_tier_is_taken_whole(self) -> None:
        choice = engine(nvme_s=1e-3).choose(0, [TierRun("nvme", 46)], 6000)
        assert choice.blocks == 46

    def test_it_may_take_as_long_as_computing_its_blocks(self) -> None:
        price = engine(nvme_s=1e-3)
        limit_s = price.choose(2, [TierRun("nvme", 10)], 6000).limit_s
        assert limit_s == pytest.approx(1.28 + 1e-7 * pairs_of(2 * B, 12 * B), rel=0.05)

    def test_a_tier_slower_than_computing_is_left(self) -> None:
        assert engine(nvme_s=1.0).choose(0, [TierRun("nvme", 4)], 6000).blocks == 4
        assert engine(nvme_s=1.0).choose(0, [TierRun("nvme", 4)], 4 * B + 1).blocks == 0

    def test_deep_blocks_are_worth_loading_where_shallow_ones_are_not(self) -> None:
        """128 tokens take 0.13 s at the root, and 0.22 s behind 7,000 others."""
        price = engine(nvme_s=0.18)
        assert price.choose(0, [TierRun("nvme", 1)], B + 1).blocks == 0
        assert price.choose(55, [TierRun("nvme", 1)], 56 * B + 1).blocks == 1

    def test_loading_under_the_rest_of_the_prompt_is_nearly_free(self) -> None:
        price = engine(nvme_s=0.14)
        assert price.choose(0, [TierRun("nvme", 4)], 4 * B + 1).blocks == 0
        assert price.choose(0, [TierRun("nvme", 4)], 4 * B + 2000).blocks == 4

    def test_a_fixed_cost_is_spread_over_many_blocks(self) -> None:
        price = engine(nvme_s=1e-3, fixed_s=1.0)
        assert price.choose(0, [TierRun("nvme", 2)], 2 * B + 1).blocks == 0
        assert price.choose(0, [TierRun("nvme", 40)], 40 * B + 1).blocks == 40

    def test_a_slow_medium_behind_a_fast_one_is_cut_off(self) -> None:
        price = engine(nvme_s=1e-3)
        price.loaded("object", 10, 60.0)
        assert price.choose(0, [TierRun("nvme", 20), TierRun("object", 10)], 31 * B).blocks == 20

    def test_a_slow_medium_before_a_fast_one_is_borne_where_it_pays(self) -> None:
        price = engine(nvme_s=1e-3)
        price.loaded("object", 1, 1.0)
        assert price.choose(0, [TierRun("object", 1), TierRun("nvme", 40)], 42 * B).blocks == 41
        assert price.choose(0, [TierRun("object", 1), TierRun("nvme", 2)], 4 * B).blocks == 0

    def test_a_tier_that_nobody_measured_is_tried(self) -> None:
        choice = engine().choose(0, [TierRun("nvme", 46)], 6000)
        assert choice.blocks == 46 and choice.limit_s < math.inf

    def test_a_block_costs_the_mean_of_those_asked_for(self) -> None:
        price = engine(token_s=1e-3, pair_s=1e-6)
        each = [price.block_s(first, 1) for first in (10, 11)]
        assert price.block_s(10, 2) == pytest.approx(np.mean(each), rel=0.1)
        assert each[0] < each[1]
        assert LoadPrice(B, LAYERS, StepTime()).block_s(0, 1) is None

    def test_an_engine_that_never_computed_loads(self) -> None:
        price = LoadPrice(B, LAYERS, StepTime())
        choice = price.choose(0, [TierRun("nvme", 46)], 6000)
        assert (choice.blocks, choice.limit_s) == (46, math.inf)

    def test_what_takes_no_time_to_compute_is_not_loaded(self) -> None:
        """No load would end within that time."""
        free = SimpleNamespace(samples=1, added_s=lambda tokens, pairs: 0.0)
        choice = LoadPrice(B, LAYERS, free).choose(0, [TierRun("nvme", 4)], 6000)  # type: ignore[arg-type]
        assert (choice.blocks, choice.limit_s) == (0, 0.0)

    def test_nothing_offered_is_nothing_loaded(self) -> None:
        assert engine().choose(0, [], 6000).blocks == 0


class TestWayBack:
    def test_a_tier_that_lost_is_tried_with_one_block_once_that_is_paid_for(self) -> None:
        price = engine(nvme_s=10.0)
        chosen = [price.choose(0, [TierRun("nvme", 8)], 8 * B + 1).blocks for _ in range(40)]
        assert 1 in chosen
        tries = [n for n, blocks in enumerate(chosen) if blocks]
        declined_s = price.compute_s(0, 8 * B)
        one_s = price.compute_s(0, B)
        assert declined_s is not None and one_s is not None
        assert tries[1] - tries[0] >= one_s / (PROBE_SHARE * declined_s) - 1

    def test_a_tier_that_recovered_is_taken_after_one_try(self) -> None:
        price = engine(nvme_s=10.0)
        price.loaded("nvme", 1, 5e-3)
        assert price.choose(0, [TierRun("nvme", 46)], 6000).blocks == 46

    def test_a_tier_that_became_slow_is_left_after_one_load(self) -> None:
        price = engine(nvme_s=1e-3)
        price.loaded("nvme", 46, 100 * 46e-3)
        assert (
            price.choose(0, [TierRun("nvme", 1)], B + 1).blocks == 1
        )  # 100 times slower, still less
        price.loaded("nvme", 46, 1000 * 46e-3)
        assert price.choose(0, [TierRun("nvme", 4)], 4 * B + 1).blocks == 0

    def test_a_hiccup_changes_little(self) -> None:
        price = engine(nvme_s=1e-3)
        price.loaded("nvme", 40, 3 * 40e-3)
        load_s = price.load_s("nvme", 40)
        assert load_s is not None and load_s < 2.2 * 40e-3
