"""What is learned about returns: conversations, survival model, best rate ahead."""

from __future__ import annotations

import numpy as np

from headrace_kvstore.policy.hazard import (
    AGE_EDGES_S,
    AGES,
    CELLS,
    best_rate,
    fit,
    prior_base,
)
from headrace_kvstore.policy.history import (
    BLOCK,
    PROMPT,
    age_bin,
    cell_of,
    count_all,
    record_prompt,
)


class History:
    def __init__(self, prompts: int = 8, blocks: int = 64) -> None:
        self.prompts = np.zeros(prompts, PROMPT)
        self.blocks = np.zeros(blocks, BLOCK)
        self.next = np.ones(1, np.int64)
        self.events = np.zeros((CELLS, AGES))
        self.exposure_s = np.zeros((CELLS, AGES))

    def note(self, chain: list[int], now_s: float) -> int:
        keys = np.array(chain, np.uint64)
        arrays = (self.prompts, self.blocks, self.next, self.events, self.exposure_s)
        return int(record_prompt(keys, now_s, *arrays))


def test_a_prompt_that_extends_the_last_one_is_its_next_turn() -> None:
    h = History()
    first = h.note([1, 2], 0.0)
    assert h.note([1, 2, 3], 40.0) == first
    assert h.prompts[first]["turn"] == 1
    assert h.events.sum() == 1
    assert h.events[cell_of(-1.0, 0, 2, 2), age_bin(40.0)] == 1
    assert h.exposure_s.sum() == 40.0


def test_a_prompt_that_leaves_the_last_one_is_a_conversation_of_its_own() -> None:
    h = History()
    first = h.note([1, 2, 3, 13], 0.0)
    assert h.note([1, 2, 4, 14], 10.0) != first
    assert h.note([1, 2, 3, 13, 5], 20.0) == first


def test_an_unknown_prompt_is_a_conversation_and_an_empty_one_is_none() -> None:
    h = History()
    assert h.note([1], 0.0) != h.note([2], 0.0)
    assert h.note([], 0.0) == 0


def test_waiting_counts_for_prompts_that_never_return() -> None:
    h = History()
    h.note([1, 2], 0.0)
    count_all(h.prompts, 100.0, h.exposure_s)
    count_all(h.prompts, 100.0, h.exposure_s)
    assert np.isclose(h.exposure_s.sum(), 100.0)
    assert np.allclose(h.exposure_s.sum(0)[:3], np.diff(AGE_EDGES_S)[:3])


def test_a_conversation_is_of_the_class_of_its_usual_gap() -> None:
    h = History(blocks=1024)
    for agent in (True, False):
        now_s, keys = 0.0, [1 + agent]
        first = h.note(keys, now_s)
        for gap_s in (2.5, 3.0, 100.0, 3.5, 2.5) if agent else (100.0, 140.0, 90.0):
            now_s += gap_s
            keys = [*keys, 10 * keys[-1] + agent]
            assert h.note(keys, now_s) == first
        turn = len(keys) - 1
        assert h.prompts[first]["cell"] == cell_of(5.8 if agent else 108.0, turn, 1, turn + 1)


def test_a_forgotten_conversation_starts_anew() -> None:
    h = History(prompts=2)
    first = h.note([1], 0.0)
    h.note([2], 1.0)
    h.note([3], 2.0)
    assert h.note([1], 3.0) != first
    assert h.events.sum() == 0


def test_a_clock_that_jumps_back_is_no_time() -> None:
    h = History()
    h.note([1], 100.0)
    h.note([1], 50.0)
    assert h.exposure_s.sum() == 0.0
    assert h.events[:, 0].sum() == 1


def test_age_bins_start_at_their_edges() -> None:
    assert age_bin(0.0) == 0
    assert age_bin(0.49) == 0
    assert age_bin(0.5) == 1
    assert age_bin(8.0) == 9
    assert age_bin(1e9) == AGES - 1


def test_cells_stay_in_range() -> None:
    seen = {
        cell_of(pace, turn, fresh, blocks)
        for pace in (-1.0, 0.0, 0.9, 1.0, 1e12)
        for turn in (0, 1, 2, 3, 5, 9, 10**6)
        for fresh in (0, 1, 2, 8, 10**6)
        for blocks in (1, 4, 128, 10**6)
    }
    assert min(seen) >= 0
    assert max(seen) == CELLS - 1


def test_nothing_seen_gives_the_prior() -> None:
    nothing = np.zeros((CELLS, AGES))
    assert np.allclose(fit(nothing, nothing), prior_base())


def test_the_fit_finds_the_factors_that_made_the_data() -> None:
    exposure_s = np.zeros((CELLS, AGES))
    chats, scans = cell_of(-1.0, 0, 4, 4), cell_of(-1.0, 0, 40, 40)
    exposure_s[[chats, scans], :10] = 1e6
    events = np.zeros((CELLS, AGES))
    events[chats, :10], events[scans, :10] = 4e3, 1e2
    hazard = fit(events, exposure_s)
    assert np.allclose(hazard[chats, :10], 4e-3, rtol=0.05)
    assert np.allclose(hazard[scans, :10], 1e-4, rtol=0.1)


def test_ages_never_reached_go_on_from_the_last_ones() -> None:
    exposure_s, events = np.zeros((CELLS, AGES)), np.zeros((CELLS, AGES))
    exposure_s[:, :12] = 1e5  # and none returned
    hazard = fit(events, exposure_s)
    assert (hazard[:, 12:] < 0.01 * prior_base()[12:]).all()


def test_the_best_rate_is_the_hazard_where_that_falls() -> None:
    hazard = np.tile(0.1 / (1.0 + AGE_EDGES_S[:-1]), (2, 1))
    assert np.allclose(best_rate(hazard), hazard)


def test_the_best_rate_sees_a_peak_to_come() -> None:
    hazard = np.full((1, AGES), 1e-6)
    peak = age_bin(50.0)
    hazard[0, peak] = 0.05  # 45 to 64 s
    rate = best_rate(hazard)[0]
    assert rate[0] > 100 * hazard[0, 0]
    assert (np.diff(rate[: peak + 1]) > 0).all()
    assert np.isclose(rate[peak + 1], 1e-6)
