"""Rates of the admission queue, and costs of requests, learned from those before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.admission.queue_rates import DECAY_S, QueueRates
from headrace.gateway.admission.request_costs import Cost, RequestCosts


def test_the_rate_is_what_was_sent_while_somebody_waited() -> None:
    rates, now_s = QueueRates(one_tenant=True), 0.0
    rates.set_waiting(now_s, waiting=True)
    for _ in range(400):
        now_s += 0.05
        rates.record_sent("", 0.2, now_s)
        rates.set_waiting(now_s, waiting=True)
    assert rates.rate == pytest.approx((4.0 * DECAY_S + 1.0) / (DECAY_S + 1.0), rel=0.05)
    before = rates.rate
    rates.set_waiting(now_s, waiting=False)
    rates.set_waiting(now_s + 60.0, waiting=True)
    assert rates.rate == before


def taking(turns: int = 400, **rates_of: float) -> tuple[QueueRates, float]:
    """Rates after tenants have taken so much a second, while somebody waited."""
    rates, now_s = QueueRates(), 0.0
    rates.set_waiting(now_s, waiting=True)
    for _ in range(turns):
        now_s += 0.05
        for tenant, each in rates_of.items():
            rates.record_sent(tenant, 0.05 * each, now_s)
        rates.set_waiting(now_s, waiting=True)
    return rates, now_s


def test_a_tenant_can_count_on_its_fair_part_less_one_for_the_next_to_come() -> None:
    rates, now_s = taking(a=1.0, b=1.0)
    assert rates.rate_of("a", now_s) == pytest.approx(rates.rate / 3, rel=0.1)
    assert rates.rate_of("new", now_s) == pytest.approx(rates.rate / 4, rel=0.1)


def test_a_tenant_can_count_on_what_others_leave() -> None:
    rates, now_s = taking(a=3.0, b=0.2)
    assert rates.rate_of("a", now_s) == pytest.approx((rates.rate - 0.2) * 2 / 3, rel=0.1)
    alone, now_s = taking(a=3.0)
    assert alone.rate_of("a", now_s) == pytest.approx(alone.rate / 2, rel=0.1)


def test_tenants_that_have_just_begun_count_in_full() -> None:
    rates, now_s = taking(10, a=1.0, b=1.0, c=1.0)
    assert rates.rate_of("a", now_s) <= 1.1 * rates.rate / 3


def test_one_tenant_can_count_on_all() -> None:
    rates = QueueRates(one_tenant=True)
    rates.prior = 4.0
    assert rates.rate_of("", 0.0) == rates.rate == 4.0


@settings(max_examples=100)
@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=8))
def test_promised_parts_never_exceed_the_rate_and_nobody_has_less_than_an_equal_one(
    taken: list[float],
) -> None:
    rates, now_s = taking(400, **{f"t{at}": each for at, each in enumerate(taken)})
    count = len(taken)
    for at in range(count):
        part = rates.rate_of(f"t{at}", now_s)
        assert rates.rate / (count + 2) * 0.9 <= part <= rates.rate


def test_what_a_byte_takes_is_learned_for_each_size() -> None:
    costs = RequestCosts()
    for _ in range(100):
        costs.record_prefill("one", 1000, 0.01)
        costs.record_prefill("one", 50_000, 2.0)
    assert costs.predict("one", 900, 1.0).prefill_s == pytest.approx(0.009, rel=0.01)
    assert costs.predict("one", 60_000, 1.0).prefill_s == pytest.approx(2.4, rel=0.01)
    # A size that was not seen yet: as the next smaller one.
    assert costs.predict("one", 10_000, 1.0).prefill_s == pytest.approx(0.1, rel=0.01)
    assert costs.predict("one", 200_000, 1.0).prefill_s == pytest.approx(8.0, rel=0.01)


def test_costs_follow_each_tenant_s_own_requests() -> None:
    costs = RequestCosts()
    for _ in range(100):
        costs.record_prefill("long", 1000, 2.0)
        costs.record_answer("long", 8.0)
        costs.record_prefill("short", 1000, 0.1)
        costs.record_answer("short", 1.0)
    assert costs.predict("long", 1000, 4.0) == pytest.approx(Cost(2.0, 2.0), rel=0.05)
    assert costs.predict("short", 500, 4.0) == pytest.approx(Cost(0.05, 0.25), rel=0.05)
    new = costs.predict("new", 1000, 1.0)
    assert 0.1 < new.prefill_s < 2.0
