"""Several prefill replicas: each has its own load, cache and breaker, and the cheapest is named."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from headrace.router import Geometry, Plan, PlanRequest, PrefillReport, Router, RouterSettings
from headrace.router.placement.place import place
from headrace.router.placement.request import PlacementRequest
from headrace.router.replica_planner.prefill_targets import ANY
from headrace_engine.step_time import StepTime
from headrace_kvstore.lookup.availability import AvailableRun
from tests.support.clock import Clock

BLOCK = 16


def router(clock: Clock, replicas: Iterable[str] = ("x", "y"), seed: int = 0) -> Router:
    made = Router(
        RouterSettings(policy="remote"),
        Geometry(BLOCK, 100, decode_blocks=1000, prefill_blocks=1000),
        clock,
        random.Random(seed),
    )
    made.prefill_members(set(replicas))
    return made


def plan(r: Router, request_id: str, first: int = 0, tokens: int = 100) -> Plan:
    return r.plan(PlanRequest(request_id, range(first, first + tokens)))


def done(r: Router, request_id: str, replica: str, cached: int = 0) -> None:
    r.prefill_done(request_id, PrefillReport(0.5, 0.0, 0.4, cached, 100 - cached, replica))


def test_until_replicas_are_known_ray_serve_chooses(clock: Clock) -> None:
    r = Router(RouterSettings(policy="remote"), Geometry(BLOCK, 100, 9, 9), clock)
    assert (plan(r, "a").kind, plan(r, "b").replica) == ("remote", ANY)


def test_a_remote_plan_names_its_replica_and_a_local_one_none(clock: Clock) -> None:
    r = router(clock)
    assert plan(r, "a").replica in {"x", "y"}
    assert r.plan(PlanRequest("b", range(9), local_only="logprobs")).replica == ""


def test_work_under_way_makes_a_replica_dearer(clock: Clock) -> None:
    r = router(clock)
    first = plan(r, "a").replica
    assert plan(r, "b", first=500).replica != first


def test_a_replica_whose_steps_take_longer_is_dearer(clock: Clock) -> None:
    r = router(clock)
    for replica, slower in (("x", 5.0), ("y", 1.0)):
        fit = StepTime()
        for _ in range(30):
            fit.observe(100, 0, 0, 0, 0, 0.1 * slower)
        r.prefill_step_times(fit, replica)
        r.targets[replica].measured_s = clock.now_s
    assert plan(r, "a").replica == "y"
    assert plan(r, "b", first=500).replica == "y", "a queue of one is shorter than a step of x"


def test_a_replica_that_has_not_told_its_steps_counts_as_fast_as_the_last_one_that_did(
    clock: Clock,
) -> None:
    r, fit = router(clock), StepTime()
    for _ in range(30):
        fit.observe(100, 0, 0, 0, 0, 3.0)
    r.prefill_step_times(fit, "x")
    planned = [plan(r, name).predicted["remote.compute"] for name in "ab"]
    assert planned == pytest.approx([3.0, 3.0], rel=0.1)


def test_a_cached_prefix_makes_a_replica_cheaper(clock: Clock) -> None:
    r = router(clock)
    first = plan(r, "a").replica
    done(r, "a", first)
    r.first_token("a", 1.0, 0)
    again = plan(r, "b")
    assert (again.replica, again.cached_prefill_tokens) == (first, 96)


def test_decode_replicas_agree_on_the_replica_for_a_prefix(clock: Clock) -> None:
    for first in range(0, 2000, 100):
        assert len({plan(router(clock, seed=n), "a", first).replica for n in range(3)}) == 1
    chosen = {plan(router(clock), "a", first).replica for first in range(0, 2000, 100)}
    assert chosen == {"x", "y"}


def test_a_failure_opens_the_breaker_of_the_replica_that_failed_only(clock: Clock) -> None:
    r = router(clock)
    failed = plan(r, "a").replica
    [other] = {"x", "y"} - {failed}
    assert r.remote_failed("a", "timed out").kind == "local"
    assert r.targets.suspects(clock()) == [failed]
    for n in range(5):
        again = plan(r, f"b{n}", first=300 * n)
        assert (again.kind, again.replica) == ("remote", other)


def test_prompts_go_local_when_every_replica_has_failed(clock: Clock) -> None:
    r = router(clock)
    for name in ("a", "b"):
        plan(r, name)
        r.remote_failed(name, "timed out")
    last = plan(r, "c")
    assert last.kind == "local" and "timed out" in last.reasons[0]


def test_a_replica_that_answers_probes_is_asked_again(clock: Clock) -> None:
    r = router(clock, ["x"])
    plan(r, "a")
    r.remote_failed("a", "timed out")
    assert plan(r, "b").kind == "local"
    r.prefill_up("x")
    assert plan(r, "c").replica == "x"


def test_a_replica_that_is_gone_takes_its_state_with_it(clock: Clock) -> None:
    r = router(clock, ["x"])
    plan(r, "a")
    r.remote_failed("a", "connection lost")
    r.prefill_members({"y"})
    assert plan(r, "b").replica == "y"
    r.prefill_members({"x", "y"})
    assert r.targets.suspects(clock()) == []


def test_without_a_replica_prompts_go_local_and_the_plan_says_why(clock: Clock) -> None:
    p = plan(router(clock, []), "a")
    assert (p.kind, p.reasons[0]) == ("local", "no prefill replica runs")


def test_what_is_under_way_at_a_replica_that_drains_ends_as_usual(clock: Clock) -> None:
    r = router(clock, ["x"])
    plan(r, "a")
    side = r.targets["x"]
    r.prefill_members({"y"})
    done(r, "a", "x")
    r.first_token("a", 1.0, 0)
    r.finished("a")
    assert side.load.waiting_requests == 0 and r.snapshot()["active"] == 0


def test_the_verdict_is_on_the_replica_that_did_the_work(clock: Clock) -> None:
    r = router(clock)
    planned = plan(r, "a").replica
    [other] = {"x", "y"} - {planned}
    done(r, "a", other)
    r.remote_failed("a", "no KV")
    assert r.targets.suspects(clock()) == [other]


def test_only_replicas_of_the_same_machine_load_from_its_store(clock: Clock) -> None:
    r = router(clock)
    for name, shares in (("x", True), ("y", False)):
        r.prefill_done("?", PrefillReport(0.5, 0.0, 0.4, 0, 100, name, shares))
    stored = [AvailableRun("dram", 96)]
    p = r.plan(PlanRequest("a", range(100), stored=stored))
    assert (p.replica, p.loaded_tokens) == ("x", 96)


def test_a_plan_tells_how_many_tokens_its_engine_must_compute(clock: Clock) -> None:
    r = router(clock, ["x"])
    assert plan(r, "a").compute_tokens == 100
    done(r, "a", "x")
    r.first_token("a", 1.0, 0)
    assert plan(r, "b").compute_tokens == 100 - 96
    assert r.remote_failed("b", "timed out").compute_tokens == 100 - 96


def test_two_replicas_spread_short_prompts_each_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts below a block have no prefix; with one random sequence all replicas would choose the
    same prefill replica, and measure the dearer kind at the same moment."""
    drawn: list[list[int]] = []

    def note(view: Any, request: PlacementRequest, *_: object) -> Plan:
        if request.request_id:
            drawn[-1].append(request.affinity)
        return place(view, request)

    monkeypatch.setattr("headrace.router.replica_planner.router.place", note)
    for _ in range(2):
        router = Router(RouterSettings(), Geometry(BLOCK, 100, 9, 9), Clock())
        drawn.append([])
        for n in range(3):
            router.plan(PlanRequest(f"{n}", [1, 2, 3]))
    assert not set(drawn[0]) & set(drawn[1])
