"""When what failed is left alone, and when it is tried again."""

from __future__ import annotations

from headrace_kvstore.circuit_breaker import CircuitBreaker


def test_failures_in_a_row_open_the_breaker_and_a_success_between_them_does_not() -> None:
    breaker = CircuitBreaker(2, first_s=1.0)
    breaker.failure(0.0)
    breaker.success()
    breaker.failure(0.0)
    assert breaker.allow(0.0) and breaker.closed
    breaker.failure(0.0)
    assert not breaker.allow(0.9) and breaker.blocked(0.9)


def test_after_the_pause_one_try_goes_through_and_its_success_closes_the_breaker() -> None:
    breaker = CircuitBreaker(1, first_s=1.0)
    breaker.failure(0.0)
    assert not breaker.blocked(1.0)
    assert breaker.allow(1.0)
    assert not breaker.allow(1.0) and breaker.blocked(1.0)
    breaker.success()
    assert breaker.allow(1.0) and breaker.allow(1.0)


def test_each_probe_that_fails_doubles_the_pause_up_to_the_limit() -> None:
    breaker, now_s, pauses = CircuitBreaker(1, first_s=1.0, last_s=3.0), 0.0, []
    breaker.failure(now_s)
    for _ in range(4):
        began_s = now_s
        while not breaker.allow(now_s):
            now_s += 0.5
        pauses.append(now_s - began_s)
        breaker.failure(now_s)
    assert pauses == [1.0, 2.0, 3.0, 3.0]
    assert breaker.opened == 5


def test_a_probe_given_up_leaves_the_next_one_its_turn() -> None:
    breaker = CircuitBreaker(1, first_s=1.0)
    breaker.failure(0.0)
    assert breaker.allow(1.0)
    breaker.neither()
    assert breaker.allow(1.0)


def test_failures_of_what_began_before_it_opened_do_not_prolong_the_pause() -> None:
    breaker = CircuitBreaker(1, first_s=1.0)
    for _ in range(5):
        breaker.failure(0.0)
    assert breaker.opened == 1
    assert breaker.allow(1.0)
