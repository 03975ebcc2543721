"""The scheduler's side of the store's connector: what is loaded, what is saved, and when."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from headrace_engine.connector.load_price import LoadPrice
from headrace_engine.connector.save_queue import JOB_BLOCKS
from headrace_engine.connector.scheduler_connector import SchedulerConnector, medium_of
from headrace_engine.connector.store_work import (
    BlockLoad,
    BlockSave,
    StepShape,
    StoreWork,
    step_shape,
)
from headrace_engine.step_time import StepTime, pairs_of
from tests.support.clock import Clock
from tests.support.kvscheduling import B, Engine, Store, Tiers, hashes, request, saved


@pytest.mark.parametrize(
    ("tokens", "held", "local", "offered"),
    [
        (5 * B, 0, 0, 0),
        (5 * B, 3, 0, 3),
        (5 * B, 5, 0, 4),  # one token must be left to compute
        (5 * B + 1, 5, 0, 5),
        (5 * B, 4, 2, 2),  # the engine's own cache has the first two
        (5 * B, 2, 3, 0),
        (B - 1, 0, 0, 0),
    ],
)
def test_the_longest_run_behind_the_local_hit_is_offered(
    tokens: int, held: int, local: int, offered: int
) -> None:
    store = Store(held=set(hashes(held)))
    scheduler = SchedulerConnector(store, B)
    assert scheduler.matched(request(tokens), local * B) == offered * B


@pytest.mark.parametrize(("window", "offered"), [(0, 5), (1, 5), (16, 5), (17, 4), (999, 0)])
def test_a_prompts_last_tokens_are_computed_where_a_codec_should_not_touch_them(
    window: int, offered: int
) -> None:
    scheduler = SchedulerConnector(Store(held=set(hashes(6))), B, window_tokens=window)
    assert scheduler.matched(request(6 * B), 0) == offered * B


def test_being_asked_changes_nothing() -> None:
    engine = Engine(Store(held=set(hashes(3))), request(5 * B))
    assert [engine.scheduler.matched(engine.request, 0) for _ in range(3)] == [3 * B] * 3
    assert engine.idle() == StoreWork()


def test_an_admitted_request_loads_what_it_was_offered() -> None:
    store = Store(held=set(hashes(4)))
    engine = Engine(store, request(6 * B))
    assert engine.admit(local=B) == 3 * B
    work = engine.step(2 * B, new=True)
    assert work.load == BlockLoad([[11, 12, 13]], hashes(4)[1:])
    assert store.leased == hashes(4)[1:]
    assert engine.step(1).load == BlockLoad()


def test_blocks_that_no_tier_supplies_are_misses_once_a_request() -> None:
    store = Store(held=set(hashes(2)))
    engine = Engine(store, request(6 * B + 1))
    for _ in range(3):
        engine.scheduler.matched(engine.request, 0)
    assert store.misses == 0  # vLLM may ask any number of times
    engine.admit()
    assert store.misses == 4
    engine.scheduler.allocated(engine.request, [engine.blocks], 0)  # after an asynchronous load
    assert store.misses == 4
    engine = Engine(Store(), request(3 * B + 1))
    assert engine.admit() == 0
    assert engine.scheduler._index.misses == 3  # type: ignore[attr-defined]


def test_vllm_may_take_less_than_was_offered() -> None:
    store = Store(held=set(hashes(4)))
    engine = Engine(store, request(6 * B))
    assert engine.scheduler.matched(engine.request, 0) == 4 * B
    engine.scheduler.allocated(engine.request, [engine.blocks], 2 * B)
    assert engine.step(4 * B, new=True).load.blocks == [[10, 11]]


def test_who_skips_the_prefix_cache_skips_the_store() -> None:
    scheduler = SchedulerConnector(Store(held=set(hashes(3))), B)
    assert scheduler.matched(request(5 * B, skip_reading_prefix_cache=True), 0) == 0


def test_full_blocks_are_saved_once_their_step_has_come_back() -> None:
    engine = Engine(Store(), request(4 * B + 3, cache_salt="acme"))
    engine.admit()
    assert saved(engine.step(4 * B + 3, new=True)) == []
    engine.comes_back(4 * B + 3)
    [save] = engine.step(1).saves.values()
    assert save == BlockSave(
        blocks=[[10, 11, 12, 13]],
        hashes=hashes(4),
        parents=[b"", *hashes(3)],
        depths=[0, 1, 2, 3],
        tenant="acme",
        compute_s=save.compute_s,
    )
    engine.comes_back(1)
    assert saved(engine.step(1)) == []


def test_what_is_still_in_flight_is_not_saved() -> None:
    engine = Engine(Store(), request(4 * B))
    engine.admit()
    engine.step(2 * B, new=True)
    assert saved(engine.step(2 * B)) == []
    engine.comes_back(2 * B)
    assert saved(engine.step(1)) == [10, 11]


def test_a_hit_on_blocks_that_another_request_computes_now_is_not_saved_yet() -> None:
    engine = Engine(Store(), request(4 * B))
    engine.admit(local=2 * B)
    assert saved(engine.step(2 * B, new=True)) == []


def test_the_last_blocks_are_saved_when_the_request_ends() -> None:
    engine = Engine(Store(), request(2 * B))
    engine.admit()
    engine.step(2 * B, new=True)
    engine.comes_back(2 * B)
    engine.scheduler.finished(engine.request, [engine.blocks])
    assert engine.scheduler.busy
    assert saved(engine.idle()) == [10, 11]


def test_a_request_that_ends_before_its_first_step_is_back_saves_nothing() -> None:
    engine = Engine(Store(), request(2 * B))
    engine.admit()
    engine.step(2 * B, new=True)
    engine.scheduler.finished(engine.request, [engine.blocks])
    assert engine.idle().saves == {} and not engine.scheduler.busy


def test_a_preempted_request_begins_anew() -> None:
    engine = Engine(Store(), request(4 * B))
    engine.admit()
    engine.step(2 * B, new=True)
    engine.comes_back(2 * B)
    engine.request.num_computed_tokens = 0
    engine.blocks = [50 + i for i in range(5)]
    assert saved(engine.step(2 * B, resumed=True)) == []
    engine.comes_back(2 * B)
    assert saved(engine.step(1)) == [50, 51]


def test_blocks_are_held_until_their_copy_ends() -> None:
    engine = Engine(Store(), request(3 * B))
    engine.admit()
    engine.step(3 * B, new=True)
    engine.comes_back(3 * B)
    [job] = engine.step(1).saves
    assert engine.pool.held == [10, 11, 12] and engine.scheduler.busy
    engine.scheduler.saved([job, job])
    assert engine.pool.held == [] and not engine.scheduler.busy


def test_a_copy_that_all_workers_have_ended_is_told_with_its_blocks() -> None:
    told: list[list[bytes]] = []
    engine = Engine(Store(), request(3 * B), ended=told.append)
    engine.admit()
    engine.step(3 * B, new=True)
    engine.comes_back(3 * B)
    [(job, save)] = engine.step(1).saves.items()
    assert told == []
    engine.scheduler.saved([job, job])
    assert told == [save.hashes]


def test_what_the_store_holds_is_not_copied() -> None:
    engine = Engine(Store(held={b"101"}), request(4 * B))
    engine.admit()
    engine.step(4 * B, new=True)
    engine.comes_back(4 * B)
    [save] = engine.step(1).saves.values()
    assert (save.blocks, save.parents) == ([[10, 12, 13]], [b"", b"101", b"102"])


def test_what_is_being_copied_is_not_copied_twice() -> None:
    engine = Engine(Store(), request(3 * B))
    engine.admit()
    engine.step(3 * B, new=True)
    engine.comes_back(3 * B)
    [job] = engine.step(1).saves
    twin = request(3 * B, request_id="twin", num_computed_tokens=3 * B)
    engine.scheduler.added(twin)
    engine.scheduler._requests["twin"].scheduled = 3 * B
    engine.scheduler.finished(twin, [[20, 21, 22]])
    assert engine.idle().saves == {}
    engine.scheduler.saved([job])
    assert not engine.scheduler.busy


def test_either_direction_can_be_switched_off() -> None:
    store = Store(held=set(hashes(1)))
    deaf = Engine(store, request(4 * B), load=False)
    assert deaf.admit() == 0
    mute = Engine(store, request(4 * B), save=False)
    assert mute.admit() == B
    mute.step(3 * B, new=True)
    mute.comes_back(3 * B)
    assert mute.step(1).saves == {}


def test_a_pending_answer_costs_no_look_up_of_the_prompts_blocks() -> None:
    tiers, looked = Tiers(*hashes(4)), []

    class Counted(Store):
        def leading(self, hashes: Sequence[bytes]) -> int:
            looked.append(len(hashes))
            return super().leading(hashes)

    engine = Engine(Counted(), request(6 * B), slow=tiers)
    assert [engine.scheduler.matched(engine.request, 0) for _ in range(50)] == [None] * 50
    assert len(looked) == 1
    tiers.ready = True
    assert engine.scheduler.matched(engine.request, 0) == 4 * B


def test_places_are_asked_for_again_before_their_lease_ends(clock: Clock) -> None:
    tiers = Tiers(*hashes(4))
    engine = Engine(Store(), request(6 * B), slow=tiers, clock=clock)
    tiers.ready = True
    for waits in range(3):
        for _ in range(3):
            assert engine.scheduler.matched(engine.request, 0) == 4 * B
            clock.now_s += 4.0
        assert len(tiers.asked) == 1 + waits
        clock.now_s += 4.0
    asked_s = clock.now_s
    assert engine.scheduler.matched(engine.request, 0) == 4 * B
    clock.now_s += 5.0
    engine.scheduler.allocated(engine.request, [engine.blocks], 4 * B)
    assert engine.idle().load.until_s == [asked_s + tiers.lease_s]


def test_while_it_is_asked_again_the_request_waits(clock: Clock) -> None:
    tiers = Tiers(*hashes(4))
    engine = Engine(Store(), request(6 * B), slow=tiers, clock=clock)
    tiers.ready = True
    assert engine.scheduler.matched(engine.request, 0) == 4 * B
    clock.now_s += 20.0
    tiers.ready, tiers.held = False, hashes(2)
    assert engine.scheduler.matched(engine.request, 0) is None
    tiers.ready = True
    assert engine.scheduler.matched(engine.request, 0) == 2 * B, "what was reclaimed is not loaded"


def test_a_tier_that_has_nothing_is_not_asked_again(clock: Clock) -> None:
    tiers = Tiers()
    engine = Engine(Store(), request(6 * B), slow=tiers, clock=clock)
    tiers.ready = True
    for _ in range(3):
        assert engine.scheduler.matched(engine.request, 0) == 0
        clock.now_s += 100.0
    assert len(tiers.asked) == 1


def test_slower_tiers_are_asked_once_and_waited_for() -> None:
    tiers = Tiers(*hashes(4)[2:])
    engine = Engine(Store(held=set(hashes(2))), request(6 * B), slow=tiers)
    assert [engine.scheduler.matched(engine.request, 0) for _ in range(3)] == [None] * 3
    assert tiers.asked == [("r", hashes(5)[2:])]
    tiers.ready = True
    assert engine.scheduler.matched(engine.request, 0) == 4 * B


def test_what_dram_holds_is_asked_of_nobody_else() -> None:
    tiers = Tiers()
    engine = Engine(Store(held=set(hashes(5))), request(6 * B), slow=tiers)
    assert engine.scheduler.matched(engine.request, 0) == 5 * B
    assert tiers.asked == []


def test_the_worker_is_told_where_slower_tiers_hold_a_block() -> None:
    tiers = Tiers(*hashes(4)[2:])
    tiers.ready = True
    engine = Engine(Store(held=set(hashes(2))), request(6 * B), slow=tiers)
    assert engine.admit() == 4 * B
    load = engine.step(2 * B, new=True).load
    assert load.hashes == hashes(4)
    assert load.places == {b"102": "place of 102", b"103": "place of 103"}


def test_a_gap_ends_what_slower_tiers_supply() -> None:
    tiers = Tiers(hashes(5)[2], hashes(5)[4])
    tiers.ready = True
    engine = Engine(Store(held=set(hashes(2))), request(6 * B), slow=tiers)
    assert engine.scheduler.matched(engine.request, 0) == 3 * B


def test_a_block_that_came_to_dram_meanwhile_counts_as_well() -> None:
    tiers = Tiers(*hashes(4)[2:])
    store = Store(held=set(hashes(2)))
    engine = Engine(store, request(6 * B), slow=tiers)
    assert engine.scheduler.matched(engine.request, 0) is None
    store.held.add(hashes(4)[2])
    tiers.ready = True
    assert engine.scheduler.matched(engine.request, 0) == 4 * B


def test_blocks_that_came_to_dram_behind_those_in_files_count_as_well() -> None:
    tiers = Tiers(*hashes(3)[2:])
    store = Store(held=set(hashes(2)))
    engine = Engine(store, request(6 * B), slow=tiers)
    assert engine.scheduler.matched(engine.request, 0) is None
    store.held |= set(hashes(5)[3:])  # pulled from a peer meanwhile
    tiers.ready = True
    assert engine.scheduler.matched(engine.request, 0) == 5 * B


def test_a_long_prompt_asks_for_no_more_than_staging_holds() -> None:
    tiers = Tiers()
    engine = Engine(Store(), request(20 * B), slow=tiers, most_slow=3)
    engine.scheduler.matched(engine.request, 0)
    assert tiers.asked == [("r", hashes(3))]


def test_a_request_that_ends_while_tiers_are_asked_leaves_nothing() -> None:
    tiers = Tiers()
    engine = Engine(Store(), request(4 * B), slow=tiers)
    engine.scheduler.matched(engine.request, 0)
    engine.scheduler.finished(engine.request, [engine.blocks])
    assert not (engine.scheduler._asked or engine.scheduler._taken or engine.scheduler._offered)


def priced(compute_s: float, load_s: float | None) -> LoadPrice:
    """Of an engine that takes `compute_s` a token, and of a medium that takes `load_s` a block."""
    price = LoadPrice(B, 4, StepTime())
    for tokens in (1, 16, 32, 64, 128, 1000) * 5:
        price.computed(tokens, 0, 0, 0, pairs_of(0, tokens), (1 + tokens) * compute_s)
    if load_s is not None:
        price.loaded("nvme", 1, load_s)
    return price


def offer(price: LoadPrice) -> Engine:
    """Two blocks in DRAM, the next two in a file."""
    tiers = Tiers(*hashes(4)[2:])
    tiers.ready = True
    return Engine(Store(held=set(hashes(2))), request(6 * B), slow=tiers, price=price)


def test_a_tier_that_is_faster_than_computing_is_taken_and_given_as_long_as_computing() -> None:
    engine = offer(priced(compute_s=0.01, load_s=0.001))
    assert engine.admit() == 4 * B
    load = engine.step(2 * B, new=True).load
    assert len(load.places) == 2
    assert load.limits_s == [pytest.approx(2 * B * 0.01, rel=0.1)]


def test_a_tier_that_is_slower_than_computing_is_left() -> None:
    engine = offer(priced(compute_s=0.01, load_s=10.0))
    assert engine.admit() == 2 * B
    load = engine.step(4 * B, new=True).load
    assert (load.places, load.limits_s) == ({}, [])
    assert engine.scheduler.counts == {"declined_nvme": 2}


@pytest.mark.parametrize("priced_engine", [True, False])
def test_slower_tiers_hear_what_computing_a_block_takes_where_that_decides(
    priced_engine: bool,
) -> None:
    tiers = Tiers()
    price = priced(compute_s=0.01, load_s=None) if priced_engine else None
    engine = Engine(Store(held=set(hashes(2))), request(6 * B), slow=tiers, price=price)
    assert engine.scheduler.matched(engine.request, 0) is None
    assert tiers.compute_s == [pytest.approx(0.01 * B, rel=0.1) if priced_engine else 0.0]


def test_the_decision_stands_however_often_vllm_asks() -> None:
    price = priced(compute_s=0.01, load_s=10.0)
    engine = offer(price)
    assert [engine.scheduler.matched(engine.request, 0) for _ in range(200)] == [2 * B] * 200


def test_a_step_with_a_prompt_tells_what_it_computes_and_one_without_nothing() -> None:
    engine = offer(priced(0.01, 0.001))
    engine.admit()
    work = engine.step(2 * B, new=True)
    assert work.shape == StepShape(2 * B, 0, 0, 0, pairs_of(4 * B, 6 * B))
    assert engine.step(1).shape is None


def test_rows_and_their_drafts_are_no_prompt() -> None:
    new = SimpleNamespace(req_id="prompt", num_computed_tokens=10)
    cached = SimpleNamespace(req_ids=["row", "drafts"], num_computed_tokens=[100, 50])
    output = SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"prompt": 20, "row": 1, "drafts": 4},
        scheduled_spec_decode_tokens={"drafts": [1, 2, 3]},
    )
    assert step_shape(output) == StepShape(20, 2, 3, 101 + 51, pairs_of(10, 30))


def test_a_place_says_its_medium_or_is_in_a_file() -> None:
    assert medium_of(SimpleNamespace(medium="remote")) == "remote"
    assert medium_of("place") == "nvme"


def test_blocks_are_saved_and_loaded_under_names_that_are_no_prompts() -> None:
    store, names = Store(), [b"a", b"b", b"c"]
    engine = Engine(
        store,
        request(4 * B),
        costs=SimpleNamespace(compute_s=lambda first, end: float(end - first)),
    )
    scheduler = engine.scheduler
    assert scheduler.lacking(names) == [True] * 3
    scheduler.save([7, 9, 8], names, "technique:x:", 6 * B)
    assert engine.pool.held == [7, 8, 9] and scheduler.busy
    [save] = engine.idle().saves.values()
    assert save == BlockSave(
        [[7, 9, 8]], names, [b"", b"a", b"b"], [0, 1, 2], "technique:x:", 2.0 * B
    )
    scheduler.save([17, 19, 18], names, "", 6 * B)
    store.held.update(names)
    scheduler.saved([0, 1])
    assert engine.pool.held == [] and not scheduler.busy
    scheduler.save([17, 19, 18], names, "", 6 * B)
    assert not scheduler.busy, "they are there"
    scheduler.load("r", [5, 6], names[:2])
    assert (
        engine.idle().ahead == {"r": BlockLoad([[5, 6]], names[:2])} and store.leased == names[:2]
    )


def test_not_too_many_of_them_are_saved_at_once() -> None:
    engine = Engine(Store(), request(4 * B))
    many = [b"%d" % n for n in range(JOB_BLOCKS - 1)]
    engine.scheduler.save([*range(len(many))], many, "", B)
    engine.scheduler.save([900], [b"x"], "", B)  # a small cache takes as many all the same
    assert len(engine.pool.held) == JOB_BLOCKS
    engine.scheduler.save([901], [b"y"], "", B)
    assert 901 not in engine.pool.held and engine.scheduler.counts["save_busy"] == 1


@pytest.mark.parametrize("off", ["load", "save"])
def test_a_direction_that_is_off_is_off_for_them(off: str) -> None:
    engine = Engine(Store(held={b"a"}), request(4 * B), **{off: False})
    engine.scheduler.save([7], [b"b"], "", B)
    assert engine.scheduler.lacking([b"a"]) == [off == "load"] and engine.scheduler.busy == (
        off == "load"
    )
