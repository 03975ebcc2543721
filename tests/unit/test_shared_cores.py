"""What the engines of one machine lose to each other, and how plans reckon with it."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from headrace.router import Geometry, PlanRequest, Router, RouterSettings
from headrace.router.decode_replica.engine_load import EngineLoad
from headrace.router.decode_replica.shared_cores import SharedCores
from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.place import place
from headrace.router.placement.pricing import shared_s
from headrace.router.placement.request import PlacementRequest
from headrace.router.plan import PrefillReport
from tests.support.clock import Clock


def price(
    share: float, running: int = 0, prefill_queue_s: float = 0.0, *, apart: bool = False
) -> Mapping[str, float]:
    """Of 1,000 tokens, with two engines on one node or on two."""
    view = ClusterView(16, 1.0)
    view.add("d", "decode", view.node("a"))
    view.add("p", "prefill", view.node("b" if apart else "a"))
    view.engines[0]["share"], view.engines[0]["running"] = share, running
    view.engines[1]["queue_s"] = prefill_queue_s
    return place(view, PlacementRequest("x", 1000)).predicted


def learned(share: float, steps: int = 40) -> SharedCores:
    shared, rng = SharedCores(), random.Random(0)
    for _ in range(steps):
        overlap = rng.choice((0.3, 0.7, 1.0))
        shared.observe(overlap, 0.03, 0.03 / (1.0 - share * overlap))
    return shared


def test_engines_share_nothing_until_a_step_shows_it() -> None:
    shared = SharedCores()
    assert shared.share == 0.0
    assert shared.alone_s(0.05, 1.0) == 0.05
    assert shared_s(1.0, shared.share, 1.0) == 1.0


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_the_lost_share_is_read_from_the_steps(share: float) -> None:
    assert learned(share).share == pytest.approx(share, abs=0.03)


def test_steps_beside_no_prefill_teach_nothing() -> None:
    shared = SharedCores()
    shared.observe(0.0, 0.03, 0.09)
    assert shared.to_dict()["samples"] == 0


def test_an_engine_that_is_faster_beside_a_prefill_has_lost_nothing() -> None:
    shared = SharedCores()
    for _ in range(50):
        shared.observe(1.0, 0.03, 0.02)
    assert shared.share == 0.0


def test_the_share_stays_below_one_whatever_is_measured() -> None:
    shared = SharedCores()
    for _ in range(200):
        shared.observe(0.5, 1e-9, 1e6)
    assert 0.5 < shared.share < 1.0
    assert shared_s(1.0, shared.share, 1e9) < 100.0


def test_work_is_stretched_while_the_other_engine_is_busy_and_no_longer() -> None:
    shared = learned(0.5)
    assert shared_s(1.0, shared.share, 0.0) == 1.0
    assert shared_s(1.0, shared.share, 0.5) == pytest.approx(1.25, rel=0.05)
    assert shared_s(1.0, shared.share, 60.0) == pytest.approx(2.0, rel=0.1)


def test_the_busy_share_counts_prefills_within_the_last_seconds() -> None:
    load = EngineLoad()
    load.reserve("a", 100, 10.0)
    load.reserve("b", 100, 10.5)
    load.release("a", 11.0)
    load.release("b", 12.0)
    load.reserve("c", 100, 14.0)
    assert load.busy_share(1.0, 12.0) == 1.0
    assert load.busy_share(2.0, 13.0) == 0.5
    assert load.busy_share(1.0, 13.5) == 0.0
    assert load.busy_share(4.0, 15.0) == pytest.approx(0.5)
    assert load.busy_share(0.0, 15.0) == 0.0


def test_a_remote_prefill_costs_the_streams_what_they_lose_beside_it() -> None:
    before, after = price(0.0, running=4), price(0.5, running=4)
    lost = 4 * 0.5 * after["remote.compute"]
    assert after["remote.stall"] - before["remote.stall"] == pytest.approx(lost)
    assert after["local.total"] == before["local.total"]
    assert price(0.5) == price(0.0), "nobody runs"


def test_a_local_prefill_takes_longer_beside_the_prefills_that_are_under_way() -> None:
    compute, beside = (price(share, prefill_queue_s=0.4)["local.compute"] for share in (0.0, 0.5))
    assert beside == pytest.approx(compute + 0.4 * 0.5)


def test_engines_of_two_nodes_share_nothing() -> None:
    apart = price(0.5, 4, 0.4, apart=True)
    assert apart["local.compute"] == price(0.0, 4)["local.compute"]
    assert apart["remote.stall"] == price(0.0, 4, apart=True)["remote.stall"]


def test_a_router_learns_the_share_and_what_its_steps_take_alone(clock: Clock) -> None:
    router = Router(RouterSettings(policy="remote"), Geometry(16, 100, 1000, 1000), clock)

    def steps(seconds: float) -> None:
        for _ in range(60):
            clock.now_s += seconds
            alone_s = router.step_alone_s((0, 2), seconds)
            router.costs.decode_step.observe(0, 2, 0, 0, 0, alone_s)

    for number in range(6):
        steps(0.03)
        router.plan(PlanRequest(f"r{number}", list(range(100))))
        steps(0.05)
        router.prefill_done(f"r{number}", PrefillReport(3.0, 0.0, 2.9, 0, 100))
    assert router.costs.shared.share == pytest.approx(0.4, abs=0.05)
    assert router.costs.decode_step.seconds(0, 2) == pytest.approx(0.03, rel=0.1)
    assert router.snapshot()["fits"]["shared_cores"]["lost_share"] > 0.3
