"""A request's way through the router: plan, reports, end."""

import json
import random

import pytest

from headrace.router import (
    Geometry,
    Plan,
    PlanRequest,
    PrefillReport,
    Router,
    RouterSettings,
)
from headrace_engine.kv_groups import BlockUse
from headrace_engine.step_time import StepTime
from tests.support.clock import Clock

BLOCK = 16


def router(
    clock: Clock, policy: str = "cost", has_prefix_cache: bool = True, **settings: float
) -> Router:
    return Router(
        RouterSettings(policy=policy, **settings),  # type: ignore[arg-type]
        Geometry(BLOCK, 100, 1000, 1000, has_prefix_cache=has_prefix_cache),
        clock,
        random.Random(0),
        prefill="prefill:smollm2",
    )


def prompt(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def plan(r: Router, request_id: str, tokens: list[int], **kw: str) -> Plan:
    return r.plan(PlanRequest(request_id, tokens, **kw))


def report(call_s: float = 0.5, cached: int = 0, computed: int = 100) -> PrefillReport:
    return PrefillReport(call_s, 0.0, 0.4, cached, computed)


def test_policy_local_prefills_locally(clock: Clock) -> None:
    p = plan(router(clock, "local"), "a", prompt(100))
    assert (p.kind, p.prefill, p.timeout_s) == ("local", None, 0.0)
    assert p.reasons[0] == "policy is local"


def test_policy_remote_prefills_remotely(clock: Clock) -> None:
    p = plan(router(clock, "remote"), "a", prompt(2))
    assert (p.kind, p.prefill) == ("remote", "prefill:smollm2")
    assert p.timeout_s > 0
    assert p.reasons[0] == "policy is remote"


def test_a_request_that_must_stay_local_stays_whatever_the_policy(clock: Clock) -> None:
    p = plan(router(clock, "remote"), "a", prompt(100), local_only="prompt logprobs")
    assert p.kind == "local"
    assert p.reasons[0] == "local only: prompt logprobs"


def test_without_a_prefill_deployment_all_is_local(clock: Clock) -> None:
    r = Router(RouterSettings(policy="remote"), Geometry(16, 1, 9, 9), clock, prefill=None)
    assert plan(r, "a", prompt(100)).kind == "local"


def test_an_open_breaker_sends_even_policy_remote_local(clock: Clock) -> None:
    r = router(clock, "remote")
    r.prefill_down("replica died")
    p = plan(r, "a", prompt(100))
    assert p.kind == "local"
    assert "replica died" in p.reasons[0]
    r.prefill_up()
    assert plan(r, "b", prompt(100)).kind == "remote"


def test_every_plan_carries_the_whole_formula(clock: Clock) -> None:
    assert plan(router(clock), "a", prompt(100)).reasons[-1].startswith("local 0.0")


def test_the_predicted_ttft_leaves_out_what_others_lose(clock: Clock) -> None:
    r = router(clock, "local")
    plan(r, "stream", prompt(10))
    r.first_token("stream", 0.1, 0)
    p = plan(r, "a", prompt(500, 900))
    assert p.predicted["local.stall"] > 0
    assert p.predicted_ttft_s == pytest.approx(p.predicted["local.compute"])


def test_an_empty_prompt_is_priced_as_one_token(clock: Clock) -> None:
    p = plan(router(clock), "a", [])
    assert (p.kind, p.prompt_tokens) == ("local", 0)


def test_a_plan_reserves_at_once_so_the_next_sees_it(clock: Clock) -> None:
    r = router(clock, "local")
    first = plan(r, "a", prompt(400))
    second = plan(r, "b", prompt(400, 5000))
    assert first.predicted["local.queue"] == 0.0
    assert second.predicted["local.queue"] == pytest.approx(first.predicted["local.compute"])


def test_a_burst_of_long_prompts_spills_over_to_prefill(clock: Clock) -> None:
    r = router(clock)
    r._explore_at_s = clock.now_s + 60.0
    kinds = [plan(r, str(i), prompt(600, 1000 * i)).kind for i in range(6)]
    assert kinds[0] == "local"
    assert {"local", "remote"} == set(kinds)


def test_the_same_prompt_again_is_cached_but_for_its_last_block(clock: Clock) -> None:
    r = router(clock, "local")
    plan(r, "a", prompt(64))
    again = plan(r, "b", prompt(64))
    assert again.cached_decode_tokens == 48  # the engine computes at least one token
    assert plan(r, "c", prompt(65)).cached_decode_tokens == 64


def test_an_engine_without_a_prefix_cache_computes_each_prompt_again(clock: Clock) -> None:
    made = router(clock, "local", has_prefix_cache=False)
    made.set_cache_groups(BlockUse(), False)
    for name in ("a", "b"):
        assert plan(made, name, prompt(100)).cached_decode_tokens == 0
        made.first_token(name, 0.5, 0)
        made.finished(name, [7] * 64)


def test_a_prefill_replica_tells_that_it_has_no_prefix_cache(clock: Clock) -> None:
    made = router(clock, "remote")
    plan(made, "a", prompt(100))
    made.prefill_done("a", PrefillReport(0.5, 0.0, 0.4, 0, 100, has_prefix_cache=False))
    made.first_token("a", 0.6, 100)
    again = plan(made, "b", prompt(100))
    assert (again.cached_prefill_tokens, again.cached_decode_tokens) == (0, 96)


def test_another_salt_shares_nothing(clock: Clock) -> None:
    r = router(clock, "local")
    plan(r, "a", prompt(64))
    assert plan(r, "b", prompt(64), salt="tenant").cached_decode_tokens == 0


def test_a_remote_prefill_is_cached_at_prefill_at_once_and_at_decode_with_its_first_token(
    clock: Clock,
) -> None:
    r = router(clock, "remote")
    plan(r, "a", prompt(65))
    second = plan(r, "b", prompt(65))
    assert (second.cached_prefill_tokens, second.cached_decode_tokens) == (64, 0)
    r.prefill_done("a", report())
    r.first_token("a", 0.6, 64)
    assert plan(r, "c", prompt(65)).cached_decode_tokens == 64


def test_an_engine_that_cached_less_than_predicted_corrects_the_index(clock: Clock) -> None:
    r = router(clock, "local")
    shared, other = prompt(64), prompt(32) + prompt(200, 900)
    plan(r, "a", [*shared, 1])
    r.first_token("a", 0.1, 0)
    r.finished("a")
    assert plan(r, "b", other).cached_decode_tokens == 32
    r.first_token("b", 0.1, 16)
    r.finished("b")
    # What b has computed itself is there again.
    assert plan(r, "c", [*shared, 1]).cached_decode_tokens == 64
    assert plan(r, "d", [*other, 1]).cached_decode_tokens == 224


def test_a_request_aborted_before_its_first_token_leaves_nothing_cached(clock: Clock) -> None:
    r = router(clock, "local")
    plan(r, "a", prompt(65))
    r.finished("a")
    assert plan(r, "b", prompt(65)).cached_decode_tokens == 0


def test_the_answer_is_cached_for_the_next_turn(clock: Clock) -> None:
    r = router(clock, "local")
    plan(r, "a", prompt(30))
    r.first_token("a", 0.1, 0)
    r.finished("a", output_token_ids=prompt(35, 500))
    turn = [*prompt(30), *prompt(35, 500), 7, 8, 9]
    assert plan(r, "b", turn).cached_decode_tokens == 64


def test_the_last_output_tokens_kv_was_never_computed(clock: Clock) -> None:
    r = router(clock, "local")
    plan(r, "a", prompt(30))
    r.first_token("a", 0.1, 0)
    r.finished("a", output_token_ids=prompt(2, 500))
    turn = [*prompt(30), *prompt(2, 500), 7, 8, 9]
    assert plan(r, "b", turn).cached_decode_tokens == 16


def test_a_failed_remote_prefill_is_done_locally_and_opens_the_breaker(clock: Clock) -> None:
    r = router(clock, "remote")
    plan(r, "a", prompt(100))
    fallback = r.remote_failed("a", "timed out after 4.0 s")
    assert (fallback.kind, fallback.timeout_s) == ("local", 0.0)
    assert "timed out after 4.0 s" in fallback.reasons[0]
    assert r.explain("a") == fallback
    assert r.targets[""].load.waiting_tokens == 0
    assert r.decode_load.waiting_tokens == 100
    assert plan(r, "b", prompt(100)).kind == "local"
    assert r.snapshot()["plans"]["fell_back"] == 1


def test_a_failure_that_arrives_after_the_end_reserves_nothing(clock: Clock) -> None:
    r = router(clock, "remote")
    plan(r, "a", prompt(100))
    r.finished("a")
    assert r.remote_failed("a", "late").kind == "local"
    assert r.decode_load.waiting_tokens == 0


def test_a_failure_of_an_unknown_request_is_an_error(clock: Clock) -> None:
    with pytest.raises(KeyError):
        router(clock).remote_failed("never", "why")


def test_reports_about_unknown_requests_are_harmless(clock: Clock) -> None:
    r = router(clock)
    r.prefill_done("never", report())
    r.first_token("never", 1.0, 5)
    r.finished("never")
    assert r.snapshot()["active"] == 0


def test_a_dead_prefill_engine_has_lost_its_cache(clock: Clock) -> None:
    r = router(clock, "remote")
    plan(r, "a", prompt(65))
    r.prefill_down("replica died")
    r.prefill_up()
    assert plan(r, "b", prompt(65)).cached_prefill_tokens == 0


def test_the_call_overhead_is_what_queue_and_compute_do_not_explain(clock: Clock) -> None:
    r = router(clock, "remote")
    for i in range(200):
        plan(r, str(i), prompt(100, 200 * i))
        r.prefill_done(str(i), PrefillReport(0.515, 0.010, 0.500, 0, 100))
        r.first_token(str(i), 0.6, 99)
        r.finished(str(i))
    assert r.costs.call.seconds() == pytest.approx(0.005, abs=0.002)


def test_the_handoff_is_what_call_transfer_and_decode_do_not_explain(clock: Clock) -> None:
    r = router(clock, "remote")
    for i in range(200):
        p = plan(r, str(i), prompt(100, 200 * i)).predicted
        known = p["remote.transfer"] + p["remote.decode_queue"] + p["remote.decode"]
        r.prefill_done(str(i), report(call_s=0.5))
        r.first_token(str(i), 0.5 + known + 0.04, 99)
        r.finished(str(i))
    assert r.costs.handoff.seconds() == pytest.approx(0.04, abs=0.002)


def test_a_cold_prefill_side_gets_time_for_its_handshake_and_teaches_no_overhead(
    clock: Clock,
) -> None:
    r = router(clock, "remote")
    cold = plan(r, "a", prompt(100))
    assert cold.timeout_s == r.settings.timeout_cold_s
    r.prefill_done("a", report(call_s=9.0))
    r.first_token("a", 12.0, 99)
    assert r.costs.call.samples == r.costs.handoff.samples == 0
    warm = plan(r, "b", prompt(100, 500))
    assert warm.timeout_s < cold.timeout_s
    r.prefill_done("b", report())
    r.first_token("b", 1.0, 99)
    assert r.costs.call.samples == r.costs.handoff.samples == 1


def test_a_prompt_with_media_teaches_no_overhead_of_the_call(clock: Clock) -> None:
    r = router(clock, "remote")
    for name, media in (("a", False), ("b", True), ("c", False)):
        plan(r, name, prompt(100))
        r.prefill_done(name, PrefillReport(0.9, 0.0, 0.1, 0, 100, has_media=media))
        r.first_token(name, 1.0, 99)
    assert r.costs.call.samples == 1, "the first was cold"


def test_after_a_failure_the_prefill_side_is_cold_again(clock: Clock) -> None:
    r = router(clock, "remote")
    plan(r, "a", prompt(100))
    r.first_token("a", 1.0, 99)
    assert plan(r, "b", prompt(100, 500)).timeout_s < r.settings.timeout_cold_s
    r.remote_failed("b", "connection lost")
    r.prefill_up()
    assert plan(r, "c", prompt(100, 900)).timeout_s == r.settings.timeout_cold_s


def test_a_queue_that_others_make_is_learned_and_fades_with_age(clock: Clock) -> None:
    r = router(clock, "remote")
    for i in range(100):
        plan(r, str(i), prompt(100, 200 * i))
        r.prefill_done(str(i), PrefillReport(1.3, 0.8, 0.4, 0, 100))
        r.finished(str(i))
    queued = plan(r, "now", prompt(100, 90_000)).predicted["remote.queue"]
    assert queued == pytest.approx(0.8, rel=0.05)
    r.finished("now")
    clock.now_s += 60.0
    later = plan(r, "later", prompt(100, 90_000)).predicted["remote.queue"]
    assert later == pytest.approx(queued / 2, rel=0.05)


def test_an_engine_without_steps_tells_nothing(clock: Clock) -> None:
    r, fit = router(clock, "remote"), StepTime()
    fit.observe(100, 0, 0, 0, 0, 0.1)
    r.prefill_step_times(fit)
    r.prefill_step_times(StepTime())
    assert r.costs.prefill_step is fit


def test_remote_is_measured_once_and_not_again_before_its_time(clock: Clock) -> None:
    r = router(clock)
    kinds = []
    for i in range(5):
        kinds.append(plan(r, str(i), prompt(900, 1000 * i)).kind)
        r.finished(str(i))
    assert kinds == ["remote", "local", "local", "local", "local"]
    clock.now_s += 200.0
    assert plan(r, "later", prompt(900, 50_000)).kind == "remote"


def test_local_prefills_keep_the_local_models_fresh(clock: Clock) -> None:
    r = router(clock)
    clock.now_s += 100.0
    r.local_step(1)
    assert r.snapshot()["measured_s_ago"] == 160.0
    r.local_step(50)
    assert r.snapshot()["measured_s_ago"] == 0.0


def test_planning_an_id_again_replaces_the_first_plan(clock: Clock) -> None:
    r = router(clock, "local")
    plan(r, "a", prompt(100))
    plan(r, "a", prompt(50, 5000))
    assert (r.decode_load.waiting_tokens, r.decode_load.waiting_requests) == (50, 1)


def test_the_last_thousand_plans_can_be_explained(clock: Clock) -> None:
    r = router(clock, "local")
    for i in range(1001):
        plan(r, str(i), [1, 2, 3])
        r.finished(str(i))
    assert r.explain("0") is None
    found = r.explain("1000")
    assert found is not None
    assert found.to_dict()["kind"] == "local"


def test_transfers_are_counted_and_fitted(clock: Clock) -> None:
    r = router(clock)
    r.observe_transfer(1000, 0.5)
    r.observe_transfer(1000, float("nan"))
    assert r.snapshot()["transfers"] == {"count": 1, "bytes": 1000, "seconds": 0.5}


def test_plans_and_snapshot_are_json(clock: Clock) -> None:
    r = router(clock)
    for document in (plan(r, "a", prompt(100)).to_dict(), r.snapshot()):
        assert json.loads(json.dumps(document, allow_nan=False)).keys() == document.keys()
