"""The pure half of offload: working sets, prices of misses, footprints, the scheduler's ledger."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_decode.attention.offload.decision import (
    AttentionMode,
    OffloadCandidate,
    RunningRequest,
    ServingOption,
    StepCosts,
    admitted_count,
    cheapest_option,
    choose_offloads,
    wait_s,
)
from headrace_decode.attention.offload.footprint import Footprint, footprint
from headrace_decode.attention.offload.ledger import Ledger
from headrace_decode.sparse.offload.working_set import Moves, WorkingSet
from headrace_lab.sparse.miss_substitution import substitute_misses

HEADS, PAGES = 2, 30


def consistent(one: WorkingSet, layer: int = 0) -> None:
    """A page has one slot, and a slot holds one page."""
    inside = one.pages_in(layer)
    every = np.tile(np.arange(PAGES), (HEADS, 1))
    slots = one.slots_of(layer, every)
    for head in range(HEADS):
        held = inside[head][inside[head] >= 0]
        assert len(set(held.tolist())) == len(held)
        assert sorted(held.tolist()) == np.flatnonzero(slots[head] >= 0).tolist()
        assert (inside[head][slots[head][held]] == held).all()


def scores_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((HEADS, PAGES)).astype(np.float32)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1000), st.integers(1, PAGES)), max_size=20))
def test_slots_and_pages_agree_whatever_is_asked_for(steps: list[tuple[bool, int, int]]) -> None:
    one = WorkingSet(1, HEADS, 6, PAGES)
    contents = np.full((HEADS, 6), -1)
    for ahead, seed, n in steps:
        one.record_scores(0, scores_of(seed)[:, :n])
        rng = np.random.default_rng(seed)
        chosen = np.sort([rng.permutation(PAGES)[:6] for _ in range(HEADS)], 1)
        moves = one.ahead(0, n, 6) if ahead else one.demand(0, chosen, n)
        contents[moves.heads, moves.slots] = moves.pages
        consistent(one)
        assert (contents == one.pages_in(0)).all(), "moves say all that changes"
        if not ahead:
            assert ((one.slots_of(0, chosen) >= 0) | (chosen >= n)).all()


def test_what_is_there_does_not_move_again() -> None:
    one, chosen = WorkingSet(1, HEADS, 6, PAGES), np.array([[0, 3, 7], [1, 3, 9]])
    assert len(one.demand(0, chosen, PAGES).pages) == 6
    assert len(one.demand(0, chosen, PAGES).pages) == 0
    assert one.demand(0, chosen + 1, PAGES).pages.tolist() == [1, 4, 8, 2, 4, 10]


def test_pages_of_least_worth_make_room_and_chosen_ones_stay() -> None:
    one, scores = WorkingSet(1, 1, 3, PAGES), np.zeros((1, PAGES), np.float32)
    scores[0, 1:4] = 0.1, 0.3, 0.2
    one.record_scores(0, scores)
    one.demand(0, np.array([[1, 2, 3]]), PAGES)
    one.demand(0, np.array([[5]]), PAGES)
    assert sorted(one.pages_in(0)[0]) == [2, 3, 5]
    one.demand(0, np.array([[3, 6]]), PAGES)
    assert sorted(one.pages_in(0)[0]) == [2, 3, 6], "5 has drawn no attention"


def test_the_sink_keeps_its_slot_whatever_it_draws() -> None:
    one = WorkingSet(1, 1, 3, PAGES, sinks=1)
    one.record_scores(0, np.linspace(0, 1, PAGES, dtype=np.float32)[None])
    one.demand(0, np.array([[0, 1, 2]]), PAGES)
    one.ahead(0, PAGES, 3)
    assert sorted(one.pages_in(0)[0]) == [0, PAGES - 2, PAGES - 1]


def test_pages_of_most_worth_come_ahead_and_only_they_move() -> None:
    one, scores = WorkingSet(1, HEADS, 4, PAGES), scores_of(1)
    one.record_scores(0, scores)
    one.demand(0, np.array([[0], [0]]), PAGES)
    one.ahead(0, PAGES, 4)
    best = np.sort(np.argsort(-scores, axis=1)[:, :4], axis=1)
    assert (np.sort(one.pages_in(0), axis=1) == best).all()
    assert len(one.ahead(0, PAGES, 4).pages) == 0
    one.record_scores(0, scores * 0)
    assert len(one.ahead(0, PAGES, 4).pages) == 0, "all fade alike"


def test_there_is_room_until_each_slot_has_a_page() -> None:
    one = WorkingSet(2, HEADS, 4, PAGES)
    one.record_scores(0, scores_of(1))
    one.demand(0, np.array([[0], [0]]), PAGES)
    assert one.has_room(0) and one.has_room(1)
    one.ahead(0, PAGES, 4)
    assert (one.has_room(0), one.has_room(1)) == (False, True)


def test_no_more_move_ahead_than_may() -> None:
    one = WorkingSet(1, HEADS, 4, PAGES)
    one.record_scores(0, scores_of(1))
    moves = one.ahead(0, PAGES, 1)
    assert moves.heads.tolist() == [0, 1]
    assert moves.pages.tolist() == scores_of(1).argmax(1).tolist()
    assert len(one.ahead(0, PAGES, 0).pages) == 0


def test_moves_that_did_not_happen_are_taken_back() -> None:
    one = WorkingSet(1, HEADS, 4, PAGES)
    moves = one.demand(0, np.array([[3, 4], [3, 5]]), PAGES)
    one.undo(0, Moves(*(part[:1] for part in moves)))
    consistent(one)
    assert one.slots_of(0, np.array([[3], [3]])).tolist() == [[-1], [0]]


def test_more_pages_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="more pages are chosen"):
        WorkingSet(1, HEADS, 2, PAGES).demand(0, np.array([[0, 1, 2], [0, 1, 2]]), PAGES)


CHOSEN = np.array([[0, 2, 5, 9]])
SCORES = np.array([[0.3, 0.02, 0.2, 0.05, 0.06, 0.1, 0.01, 0.01, 0.15, 0.1]], np.float32)


def there(*pages: int) -> np.ndarray:
    slots = np.full((1, 10), -1, np.int32)
    slots[0, list(pages)] = np.arange(len(pages))
    return slots


def test_without_slack_nothing_is_left_out() -> None:
    assert substitute_misses(SCORES, CHOSEN, there(3, 4), 1, 1, 0.0) is CHOSEN


def test_the_least_losses_are_taken_within_the_slack() -> None:
    # 0.3 of 1 is not chosen. Leaving 5 out for 4 loses 0.04, 2 for 3 loses 0.15 more.
    found = substitute_misses(SCORES, CHOSEN, there(0, 3, 4, 9), 1, 1, 0.15)
    assert found.tolist() == [[0, 2, 4, 9]]
    assert (
        substitute_misses(SCORES, CHOSEN, there(0, 3, 4, 9), 1, 1, 0.12).tolist() == CHOSEN.tolist()
    )
    everything = substitute_misses(SCORES, CHOSEN, there(0, 3, 4, 9), 1, 1, 0.7)
    assert everything.tolist() == [[0, 3, 4, 9]]


def test_the_sink_and_the_newest_are_never_left_out() -> None:
    assert substitute_misses(SCORES, CHOSEN, there(2, 5, 8), 1, 1, 9.0).tolist() == CHOSEN.tolist()


@given(st.integers(0, 200), st.floats(0.001, 2.0))
def test_no_more_attention_is_lost_than_may_be(seed: int, slack: float) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.dirichlet(np.ones(PAGES), HEADS).astype(np.float32)
    chosen = np.sort(np.argsort(-scores, 1)[:, :8], 1)
    slots = rng.integers(-1, 1, (HEADS, PAGES)).astype(np.int32)
    found = substitute_misses(scores, chosen, slots, 1, 1, slack)
    before, after = (np.take_along_axis(scores, one, 1).sum(1) for one in (chosen, found))
    assert (before - after <= slack * (1 - before) + 1e-5).all()
    assert (np.diff(found, axis=1) > 0).all() and found.shape == chosen.shape


def test_a_footprint_does_not_grow_with_the_context_of_a_dense_request() -> None:
    short, long = (footprint(n, None, 32, 128, 1024) for n in (10_000, 1_000_000))
    assert short.slots == long.slots == 0 and short.window == long.window == 8 + 2
    assert long.host == -(-1_000_000 // 128)


def test_a_sparse_requests_slots_hold_what_a_step_chooses() -> None:
    one = footprint(32_768, 103, 32, 128, 1024)
    assert one.slots * 4 >= 1.1 * 103 and one.blocks < 256 // 3


PLANNED = Footprint(slots=4, window=3, host=10)


def test_host_memory_is_promised_at_admission_and_given_back_once() -> None:
    ledger = Ledger(25)
    for name in "ab":
        ledger.plan(name, PLANNED)
        assert ledger.has_room(PLANNED)
        ledger.admit(name)
    assert not ledger.has_room(PLANNED) and ledger.free_host_blocks == 5
    ledger.leave("a")
    ledger.leave("a")
    assert ledger.free_host_blocks == 15 and ledger.planned("a") == PLANNED, "it comes back"
    ledger.remove("a")
    ledger.remove("b")
    ledger.remove("never seen")
    assert ledger.free_host_blocks == 25 and ledger.planned("a") is None


def test_only_blocks_that_the_worker_has_copied_are_cold() -> None:
    ledger = Ledger(25)
    ledger.plan("a", PLANNED)
    ledger.admit("a")
    assert ledger.cold_blocks("a", 1000, 128) == 0, "the worker does not know it yet"
    ledger.worker_knows("a", 4)
    assert ledger.cold_blocks("a", 1000, 128) == 4
    ledger.worker_knows("a", 8)
    assert [ledger.cold_blocks("a", n, 128) for n in (1000, 640, 639, 100)] == [6, 4, 3, 0]
    ledger.leave("a")
    assert ledger.cold_blocks("a", 1000, 128) == 0
    assert ledger.cold_blocks("another", 1000, 128) == 0


CACHED, OFFLOADED = ServingOption(blocks=64, step_s=0.001), ServingOption(blocks=16, step_s=0.002)


def chosen(
    free: int, running: list[RunningRequest], queue: list[int], ways: tuple[ServingOption, ...] = ()
) -> ServingOption:
    ways = ways or (CACHED, OFFLOADED)
    return ways[cheapest_option(ways, 100, 0.02, free, running, queue)]


def test_with_room_and_nobody_behind_a_request_stays_in_the_cache() -> None:
    assert chosen(100, [], []) is CACHED
    assert chosen(100, [RunningRequest(60, 5.0)], []) is CACHED


def test_a_request_that_would_wait_long_is_offloaded_and_one_that_waits_little_is_not() -> None:
    assert chosen(20, [RunningRequest(60, 5.0)], []) is OFFLOADED
    assert chosen(20, [RunningRequest(60, 0.05)], []) is CACHED
    assert chosen(5, [RunningRequest(60, 0.05)], []) is CACHED, "either waits"


def test_a_request_that_others_would_wait_for_is_offloaded() -> None:
    assert chosen(100, [], [16] * 2) is CACHED, "there is room for all"
    assert chosen(100, [], [16] * 4) is OFFLOADED


def test_a_request_too_long_for_the_cache_is_offloaded() -> None:
    assert chosen(100, [], [], (ServingOption(1000, 0.001), OFFLOADED)) is OFFLOADED


def test_the_price_of_offload_decides() -> None:
    dear = ServingOption(16, 1.0)
    assert chosen(100, [], [16] * 4, (CACHED, dear)) is CACHED
    assert chosen(20, [RunningRequest(60, 5.0)], [], (CACHED, dear)) is CACHED


LONG, SHORT = OffloadCandidate(10, longer_s=4.0), OffloadCandidate(6, longer_s=0.6)


def test_nobody_leaves_the_cache_while_the_first_of_the_queue_fits() -> None:
    assert choose_offloads([LONG, SHORT], 5, [], [5, 50]) == []
    assert choose_offloads([LONG, SHORT], 5, [], []) == []


def test_those_leave_the_cache_first_that_cost_least_for_a_block_and_no_more_than_let_one_in() -> (
    None
):
    running = [RunningRequest(20, 100.0)]
    assert choose_offloads([LONG, SHORT], 5, running, [11]) == [1]
    assert choose_offloads([LONG, SHORT], 5, running, [12]) == [1, 0]
    assert choose_offloads([LONG, SHORT], 5, running, [22]) == [], "that would not let it in"


def test_nobody_leaves_the_cache_for_less_than_it_costs_all_others() -> None:
    two = [RunningRequest(20, 2.0), RunningRequest(20, 9.0)]
    assert choose_offloads([SHORT], 0, two, [6]) == [0], "2 s are saved, and 1.8 s lost"
    assert choose_offloads([SHORT], 0, [RunningRequest(20, 1.7), two[1]], [6]) == []
    assert choose_offloads([SHORT], 0, [RunningRequest(20, 1.3), two[1]], [3, 3]) == [0], (
        "two get in"
    )


def test_blocks_come_free_as_requests_end() -> None:
    running = [RunningRequest(10, 3.0), RunningRequest(5, 1.0)]
    assert [wait_s(n, 4, running) for n in (4, 9, 10, 19, 20)] == [0.0, 1.0, 3.0, 3.0, math.inf]
    assert [admitted_count([4, 4, 1], n) for n in (-1, 3, 4, 8, 9)] == [0, 0, 1, 2, 3]


def test_steps_tell_what_a_mode_costs() -> None:
    costs, rng, true = StepCosts(), np.random.default_rng(0), (0.03, 0.002, 4e-6, 1e-6, 2e-6, 9e-6)
    for _ in range(400):
        rows = int(rng.integers(1, 9))
        context = rng.multinomial(rows, [0.25] * 4) * 5000.0
        costs.observe(rows, context.tolist(), float(np.dot(true, [1, rows, *context])))
    for mode in AttentionMode:
        expected = 0.002 + true[2 + mode] * 8000
        assert costs.added_s(mode, 8000) == pytest.approx(expected, rel=0.1)
    assert not costs.observe(0, [0.0] * 4, 1.0)


def test_an_offloaded_row_never_counts_as_cheaper_than_one_in_the_cache() -> None:
    costs = StepCosts()
    for seconds, mode in ((0.05, AttentionMode.SPARSE), (0.03, AttentionMode.OFFLOADED)):
        context = [0.0] * len(AttentionMode)
        context[mode] = 5000.0
        for _ in range(100):
            costs.observe(1, context, seconds)
    in_cache, offloaded = (
        costs.added_s(mode, 5000) for mode in (AttentionMode.SPARSE, AttentionMode.OFFLOADED)
    )
    assert offloaded == in_cache
    ways = [ServingOption(40, in_cache), ServingOption(10, offloaded)]
    assert cheapest_option(ways, 80, 0.03, 40, [], []) == 0, "the cache has room"
