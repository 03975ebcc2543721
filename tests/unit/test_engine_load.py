"""What lies ahead on an engine, and when the prefill side may be asked."""

import pytest

from headrace.router.replica_planner.engine_load import EngineLoad
from headrace.router.replica_planner.prefill_breaker import PrefillBreaker
from headrace_engine.step_time import StepTime

MODEL = StepTime()


def queue(load: EngineLoad, now_s: float = 0.0) -> float:
    return load.queue_s(MODEL, 2048, now_s)


def test_an_empty_engine_has_no_queue() -> None:
    assert queue(EngineLoad()) == 0.0


def test_the_queue_is_the_step_model_over_all_that_is_ahead() -> None:
    load = EngineLoad()
    load.reserve("a", 300, 0.0)
    load.reserve("b", 200, 0.0)
    assert queue(load) == pytest.approx(MODEL.seconds(500, 0))


def test_what_the_first_prefill_has_had_is_taken_off() -> None:
    load = EngineLoad()
    load.reserve("a", 1000, 10.0)
    assert queue(load, 10.5) == pytest.approx(MODEL.seconds(1000, 0) - 0.5)


def test_an_overdue_prefill_takes_nothing_off_those_behind_it() -> None:
    load = EngineLoad()
    load.reserve("a", 1000, 0.0)
    load.reserve("b", 200, 0.0)
    assert queue(load, 100.0) == pytest.approx(MODEL.seconds(200, 0))


def test_the_next_in_line_starts_when_the_first_is_released() -> None:
    load = EngineLoad()
    load.reserve("a", 1000, 0.0)
    load.reserve("b", 200, 0.0)
    load.release("a", 5.0)
    assert queue(load, 5.0) == pytest.approx(MODEL.seconds(200, 0))


def test_running_decodes_slow_the_queue() -> None:
    load = EngineLoad()
    load.start("x")
    load.reserve("a", 100, 0.0)
    assert queue(load) == pytest.approx(MODEL.seconds(100, 1))


def test_what_tokens_attend_to_slows_the_queue() -> None:
    model, load = StepTime(), EngineLoad()
    for tokens in (100, 200, 400) * 20:
        for pairs in (0, 100_000):
            model.observe(tokens, 2, 0, 0, pairs, 0.02 + 0.001 * tokens + 1e-6 * pairs)
    load.start("x", 5000)
    load.reserve("a", 100, 0.0, pairs=50_000)
    load.reserve("b", 200, 0.0, pairs=70_000)
    assert load.queue_s(model, 2048, 0.0) == model.seconds(300, 1, 0, 5000, 120_000)
    load.release("a", 0.0)
    assert load.queue_s(model, 2048, 0.0) == model.seconds(200, 1, 0, 5000, 70_000)
    load.stop("x")
    assert load.running_context == 0


def test_releasing_twice_or_unknown_is_harmless() -> None:
    load = EngineLoad()
    load.reserve("a", 100, 0.0)
    load.release("a", 0.0)
    load.release("a", 0.0)
    load.release("never", 0.0)
    load.stop("never")
    assert load.to_dict() == {"waiting_tokens": 0, "waiting_requests": 0, "running": 0}


def test_a_second_booking_replaces_the_first() -> None:
    load = EngineLoad()
    load.reserve("a", 100, 0.0)
    load.reserve("a", 30, 0.0)
    assert (load.waiting_tokens, load.waiting_requests) == (30, 1)


@pytest.fixture
def breaker() -> PrefillBreaker:
    return PrefillBreaker(retry_s=5.0, retry_max_s=15.0)


def fail(breaker: PrefillBreaker, request_id: str, now_s: float) -> None:
    breaker.on_sent(request_id, now_s)
    breaker.on_failure(request_id, "timed out", now_s)


def test_one_failed_request_opens_with_its_reason(breaker: PrefillBreaker) -> None:
    assert breaker.refusal(0.0) is None
    fail(breaker, "a", 0.0)
    assert breaker.state(1.0) == "open"
    assert breaker.refusal(1.0) == "prefill is unavailable for 1.0 s: timed out"


def test_an_answered_probe_closes_after_one_failure(breaker: PrefillBreaker) -> None:
    fail(breaker, "a", 0.0)
    breaker.mark_up()
    assert breaker.state(0.1) == "closed"


def test_after_the_wait_exactly_one_trial_may_go(breaker: PrefillBreaker) -> None:
    fail(breaker, "a", 0.0)
    assert breaker.state(4.9) == "open"
    assert breaker.state(5.0) == "half-open"
    assert breaker.refusal(5.0) is None
    breaker.on_sent("trial", 5.0)
    assert breaker.refusal(5.0) == "a trial request is under way after: timed out"


def test_a_trial_that_succeeds_closes(breaker: PrefillBreaker) -> None:
    fail(breaker, "a", 0.0)
    breaker.on_sent("trial", 5.0)
    breaker.on_success("trial")
    assert breaker.state(5.0) == "closed"


def test_a_trial_that_fails_opens_for_twice_as_long_up_to_the_limit(
    breaker: PrefillBreaker,
) -> None:
    fail(breaker, "a", 0.0)
    fail(breaker, "b", 5.0)
    assert breaker.state(14.9) == "open"
    assert breaker.state(15.0) == "half-open"
    fail(breaker, "c", 15.0)
    assert breaker.state(29.9) == "open"
    assert breaker.state(30.0) == "half-open"


def test_a_trial_that_ends_without_a_verdict_allows_another(breaker: PrefillBreaker) -> None:
    fail(breaker, "a", 0.0)
    breaker.on_sent("trial", 5.0)
    breaker.on_end("trial")
    assert breaker.refusal(5.0) is None


def test_a_side_that_answers_probes_but_fails_again_must_earn_it_back(
    breaker: PrefillBreaker,
) -> None:
    fail(breaker, "a", 0.0)
    breaker.mark_up()
    fail(breaker, "b", 1.0)
    breaker.mark_up()
    assert breaker.state(2.0) == "open"
    breaker.on_sent("trial", 11.0)
    breaker.on_success("trial")
    assert breaker.state(11.0) == "closed"


def test_a_success_between_two_failures_forgives_the_first(breaker: PrefillBreaker) -> None:
    fail(breaker, "a", 0.0)
    breaker.mark_up()
    breaker.on_sent("b", 1.0)
    breaker.on_success("b")
    fail(breaker, "c", 2.0)
    breaker.mark_up()
    assert breaker.state(2.0) == "closed"


def test_many_requests_that_one_death_fails_are_one_failure(breaker: PrefillBreaker) -> None:
    for r in "abcdef":
        breaker.on_sent(r, 0.0)
    for r in "abcdef":
        breaker.on_failure(r, "connection lost", 1.0)
    breaker.mark_up()
    assert breaker.state(1.0) == "closed"
    assert breaker.failures == 6


def test_a_late_failure_from_before_the_closing_does_not_open(breaker: PrefillBreaker) -> None:
    breaker.on_sent("late", 0.0)
    fail(breaker, "a", 0.0)
    breaker.mark_up()
    breaker.on_failure("late", "timed out", 1.0)
    assert breaker.state(1.0) == "closed"


def test_probes_answered_while_closed_do_not_excuse_requests_on_their_way(
    breaker: PrefillBreaker,
) -> None:
    breaker.on_sent("a", 0.0)
    breaker.mark_up()
    breaker.on_failure("a", "timed out", 1.0)
    assert breaker.state(1.0) == "open"


def test_a_side_that_is_down_gets_no_trial_until_it_is_up(breaker: PrefillBreaker) -> None:
    breaker.mark_down("replica died", 0.0)
    assert breaker.state(1000.0) == "open"
    breaker.mark_up()
    assert breaker.refusal(1000.0) is None


def test_failures_while_down_keep_the_reason_of_the_death(breaker: PrefillBreaker) -> None:
    breaker.on_sent("a", 0.0)
    breaker.mark_down("replica died", 1.0)
    breaker.on_failure("a", "connection lost", 2.0)
    assert breaker.reason == "replica died"
    breaker.mark_up()
    assert breaker.state(2.0) == "closed"
