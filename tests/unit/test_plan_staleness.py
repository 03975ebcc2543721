"""A plan that came with a request: when it is carried out, and that it then counts like the
router's own."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from headrace.router import Geometry, Plan, PlanRequest, PrefillReport, Router, RouterSettings
from headrace.router.plan import Run
from tests.support.clock import Clock
from tests.support.plans import TOKENS, gateway_plan

GEOMETRY = Geometry(16, 100, decode_blocks=1000, prefill_blocks=1000)
LOCAL, REMOTE = gateway_plan("local"), gateway_plan("remote")


@pytest.fixture
def router(clock: Clock) -> Router:
    made = Router(RouterSettings(), GEOMETRY, clock, random.Random(0), replica="d1")
    made.prefill_members({"x", "y"})
    return made


def request(name: str = "r", tokens: int = TOKENS, **more: Any) -> PlanRequest:
    return PlanRequest(name, range(tokens), **more)


def test_a_plan_for_this_replica_and_prompt_is_carried_out(router: Router) -> None:
    for given in (LOCAL, REMOTE):
        assert router.stale_reason(given, request()) is None
        mine = router.adopt(given, request(given.kind))
        assert replace(mine, timeout_s=given.timeout_s) == replace(
            given, request_id=given.kind, plan_id="g-1"
        )
        assert router.explain(given.kind) == mine
        told = mine.to_dict()
        assert (told["made_by"], told["plan_id"]) == ("gateway", "g-1")
    plans = router.snapshot()["plans"]
    assert (plans["adopted"], plans["local"], plans["remote"], plans["stale"]) == (2, 1, 1, 0)


def test_a_prefill_replica_that_was_never_asked_gets_the_time_that_the_first_call_takes(
    router: Router,
) -> None:
    assert router.adopt(REMOTE, request("a")).timeout_s == router.settings.timeout_cold_s
    router.prefill_done("a", PrefillReport(0.5, 0.0, 0.4, 0, TOKENS, "x"))
    router.first_token("a", 1.0, 0)
    assert router.adopt(REMOTE, request("b")).timeout_s == REMOTE.timeout_s


def test_a_plan_of_the_routers_own_says_so(router: Router) -> None:
    assert router.plan(request()).to_dict()["made_by"] == "replica"


@pytest.mark.parametrize(
    ("given", "asked", "why"),
    [
        (replace(LOCAL, decode="d2"), request(), "it is for d2"),
        (replace(LOCAL, decode=""), request(), "it is for no replica"),
        (LOCAL, request(tokens=TOKENS + 1), "it is for 100 tokens, and the prompt has 101"),
        (REMOTE, request(local_only="n > 1"), "the prompt must be prefilled here: n > 1"),
        (replace(REMOTE, replica="z"), request(), "prefill replica z is not known here"),
        (replace(REMOTE, replica=""), request(), "prefill replica of any name is not known here"),
        (replace(LOCAL, runs=()), request(), "its parts do not make a whole"),
        (replace(LOCAL, runs=(Run("compute", 101),)), request(), "its parts do not make a whole"),
        (replace(REMOTE, fallback=()), request(), "its parts do not make a whole"),
        (replace(REMOTE, timeout_s=0.0), request(), "its parts do not make a whole"),
        (replace(LOCAL, timeout_s=1.0), request(), "its parts do not make a whole"),
        (replace(REMOTE, predicted={}), request(), "its parts do not make a whole"),
        (replace(LOCAL, cached_decode_tokens=101), request(), "its parts do not make a whole"),
    ],
)
def test_a_plan_that_does_not_fit_is_stale(
    router: Router, given: Plan, asked: PlanRequest, why: str
) -> None:
    assert router.stale_reason(given, asked) == why


def test_a_local_plan_serves_a_prompt_that_must_stay(router: Router) -> None:
    assert router.stale_reason(LOCAL, request(local_only="n > 1")) is None


def test_a_plan_of_another_kind_than_the_forced_one_is_stale(router: Router) -> None:
    router.settings = replace(router.settings, policy="remote")
    assert router.stale_reason(LOCAL, request()) == "policy is remote"
    assert router.stale_reason(REMOTE, request()) is None


def test_a_prefill_replica_that_fails_is_not_asked_by_plan(router: Router, clock: Clock) -> None:
    router.adopt(REMOTE, request())
    router.remote_failed("r", "timed out")
    assert router.stale_reason(REMOTE, request("s")) == "prefill replica x fails: timed out"
    clock.now_s += router.settings.retry_s  # half-open: whose trial it is, the replica decides
    assert router.stale_reason(REMOTE, request("s")) is not None
    router.prefill_up("x")
    assert router.stale_reason(REMOTE, request("s")) is None


def test_in_place_of_a_stale_plan_the_router_makes_its_own_and_says_why(router: Router) -> None:
    plan = router.plan(request(), "it is for d2")
    assert plan.reasons[0] == "the gateway's plan is stale: it is for d2"
    assert (plan.decode, plan.plan_id) == ("d1", "")
    assert router.snapshot()["plans"]["stale"] == 1


@pytest.mark.parametrize("given", [LOCAL, REMOTE])
def test_what_an_adopted_plan_uses_is_reserved_like_the_routers_own(
    router: Router, clock: Clock, given: Plan
) -> None:
    own = Router(RouterSettings(policy=given.kind), GEOMETRY, clock, random.Random(0), replica="d1")
    own.prefill_members({"x"})
    mine, theirs = router.adopt(given, request()), own.plan(request())
    assert (mine.kind, mine.runs) == (theirs.kind, theirs.runs)
    for one in (router, own):
        queued = one.decode_load, one.targets["x"].load
        expected = [TOKENS, 0] if given.kind == "local" else [0, TOKENS]
        assert [load.waiting_tokens for load in queued] == expected
        if given.kind == "remote":
            one.prefill_done("r", PrefillReport(0.5, 0.0, 0.4, 0, TOKENS, "x"))
        one.first_token("r", 1.0, 0)
        assert one.decode_load.running == 1
        one.finished("r", [1, 2])
        assert one.snapshot()["active"] == one.decode_load.running == 0
    assert router.snapshot()["load"] == own.snapshot()["load"]
    assert len(router.decode_index) == len(own.decode_index)


def test_an_adopted_plan_that_fails_falls_back_like_the_routers_own(router: Router) -> None:
    router.adopt(REMOTE, request())
    instead = router.remote_failed("r", "timed out")
    assert (instead.kind, instead.runs) == ("local", REMOTE.fallback)
    assert router.decode_load.waiting_tokens == TOKENS
    assert router.snapshot()["plans"]["fell_back"] == 1


def test_a_plan_that_measures_a_side_has_it_measured(router: Router, clock: Clock) -> None:
    router.adopt(replace(REMOTE, explores=True), request())
    assert router.targets["x"].to_dict(clock.now_s)["measured_s_ago"] == 0.0
    assert router.snapshot()["plans"]["explored"] == 1


# What gateways are told


def test_a_report_names_the_plans_of_the_last_two_seconds_by_the_gateways_ids(
    router: Router, clock: Clock
) -> None:
    for number in range(300):
        router.record_received(replace(LOCAL, request_id=f"g-{number}"))
    assert router.report_fields()["heard"] == tuple(f"g-{n}" for n in range(44, 300))
    clock.now_s += 2.1
    router.record_received(REMOTE)
    assert router.report_fields()["heard"] == ("g-1",)


def test_a_report_counts_the_tokens_that_are_still_to_compute(router: Router, clock: Clock) -> None:
    assert (router.report_fields()["queued_tokens"], router.report_fields()["queued_pairs"]) == (
        0,
        0,
    )
    for name in ("a", "b"):
        router.adopt(LOCAL, request(name))
    told = router.report_fields()
    assert told["queued_tokens"] == 2 * TOKENS
    everything, behind = router.decode_load._times(router.costs.decode_step, 2048)
    clock.now_s += (everything - behind) / 2
    half = router.report_fields()
    assert half["queued_tokens"] == pytest.approx(1.5 * TOKENS, abs=1)
    assert half["queued_pairs"] == pytest.approx(0.75 * told["queued_pairs"])
    clock.now_s += 60.0  # the first is overdue, the second still costs in full
    assert router.report_fields()["queued_tokens"] == TOKENS


def test_a_report_tells_what_was_measured(router: Router, clock: Clock) -> None:
    told = router.report_fields()
    assert told["loads"] == {}
    for size in (10**6, 10**7) * 50:
        router.observe_transfer(size, 0.01 + size / 1e9)
        router.observe_load("nvme", size, size / 1e8)
    told = router.report_fields()
    fixed_s, byte_s, error = told["transfer"]
    assert (fixed_s, byte_s) == pytest.approx((0.01, 1e-9), rel=0.2) and 0 <= error < 0.5
    assert told["loads"].keys() == {"nvme"}
    assert told["loads"]["nvme"][1] == pytest.approx(1e-8, rel=0.1)
    assert len(told["call"]) == len(told["handoff"]) == 2
