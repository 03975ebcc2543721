"""What came of plans: hits reached against reachable, traffic."""

from __future__ import annotations

import pytest

from headrace.replica.plan_outcomes import TRAFFIC_REQUESTS, PlanOutcomes
from headrace.router.plan import Plan
from headrace.router.replica_planner.cost_models import CostModels
from tests.support.clock import Clock


def plan(kind: str = "local", **changes: object) -> Plan:
    """1,000 tokens, 600 of them reachable; predicted are 2 s, of which others lose 0.5."""
    predicted = {f"{kind}.compute": 1.5, f"{kind}.stall": 0.5, f"{kind}.total": 2.0}
    fields: dict[str, object] = {
        "request_id": "r",
        "prefill": None if kind == "local" else "prefill",
        "prompt_tokens": 1_000,
        "cached_decode_tokens": 0,
        "cached_prefill_tokens": 0,
        "reachable_tokens": 600,
        "predicted": predicted,
    }
    return Plan(**{**fields, **changes})  # type: ignore[arg-type]


def outcomes(clock: Clock | None = None) -> PlanOutcomes:
    return PlanOutcomes(CostModels(), 2048, 1_000, clock or Clock())


def test_a_local_prefill_reached_what_its_engine_did_not_compute() -> None:
    mine = outcomes()
    mine.first_token(plan(), 1.0, 400)
    told = mine.snapshot()
    assert (told["prompt_tokens"], told["reachable_tokens"], told["reached_tokens"]) == (
        *(1_000, 600, 400),
    )
    assert mine.of("r") == {"ttft_s": 1.0, "cached_tokens": 400}


def test_a_remote_prefill_reached_what_the_prefill_engine_did_not_compute() -> None:
    """All of the prompt but its last token comes to the decode engine from elsewhere."""
    mine = outcomes()
    mine.record_prefill("r", 700)
    mine.first_token(plan("remote"), 1.0, 999)
    assert mine.snapshot()["reached_tokens"] == 300


def test_traffic_is_the_last_requests_that_were_answered() -> None:
    clock = Clock()
    mine = outcomes(clock)
    mine.finished(plan(), 10)
    assert mine.snapshot()["traffic"] == {"requests": 0}
    for at in range(TRAFFIC_REQUESTS + 50):
        clock.now_s = 0.5 * at
        mine.first_token(plan(), 1.0, 600)
        mine.finished(plan(), 20)
    traffic = mine.snapshot()["traffic"]
    assert traffic["requests"] == TRAFFIC_REQUESTS
    assert traffic["rate"] == pytest.approx(2.0)
    assert traffic["answer_tokens"] == 20
    assert traffic["computed_tokens"] == 400
    assert traffic["local_s_square"] == pytest.approx(traffic["local_s"] ** 2)
    assert traffic["remote_s"] > traffic["local_s"] > 0 and traffic["move_s"] > 0


def test_a_request_that_failed_remotely_counts_as_what_it_became() -> None:
    mine = outcomes()
    mine.record_prefill("r", 700)
    mine.first_token(plan("local"), 1.0, 100)
    assert mine.snapshot()["reached_tokens"] == 100
