"""Admission: who goes, who waits, who is refused, by what is predicted."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.admission.admission_controller import (
    LATE,
    MAX_WAIT_FACTOR,
    AdmissionController,
    Refusal,
    Ticket,
)
from headrace.gateway.admission.capacity import MIN_LEAD_S, Capacity
from headrace.gateway.admission.slo_classes import (
    DEFAULT,
    SloClass,
    SloClassError,
    SloClasses,
)
from headrace_engine.prefill_admission import MAX_STRETCH

QUICK = SloClass("quick", ttft_target_s=2.0)
URGENT = SloClass("urgent", ttft_target_s=2.0, priority=1)
BATCH = SloClass("batch", background=True, max_wait_s=100.0)


def capacity(streams: int = 1000, wait_s: float = 0.0, *, is_idle: bool = False) -> Capacity:
    return Capacity([wait_s], streams=streams, engines=1, is_idle=is_idle)


CLOSED = Capacity()


def sent(verdict: Ticket | Refusal) -> Ticket:
    assert isinstance(verdict, Ticket)
    return verdict


# ---- who goes, who waits --------------------------------------------------------------------


def test_while_there_is_room_requests_go_as_they_come() -> None:
    core = AdmissionController()
    ticket = sent(core.arrive("a", QUICK, 10, 0.0, capacity()))
    assert (ticket.is_waiting, ticket.sent_s, len(core)) == (False, 0.0, 0)


def test_without_room_a_request_waits_and_goes_when_there_is() -> None:
    core = AdmissionController(one_tenant=True)
    ticket = sent(core.arrive("a", QUICK, 10, 0.0, CLOSED))
    assert ticket.is_waiting and core.next(0.1, CLOSED) is None
    assert core.next(0.2, capacity()) is ticket
    assert (ticket.is_waiting, ticket.sent_s, len(core)) == (False, 0.2, 0)
    assert core.next(0.3, capacity()) is None


def test_nobody_passes_those_that_wait_for_room_that_has_just_come() -> None:
    core = AdmissionController(one_tenant=True)
    first = sent(core.arrive("a", DEFAULT, 10, 0.0, CLOSED))
    second = sent(core.arrive("a", DEFAULT, 10, 0.1, capacity()))
    assert second.is_waiting and core.next(0.1, capacity()) is first


def test_a_request_is_sent_only_as_far_as_engines_and_streams_go() -> None:
    core = AdmissionController()
    there = capacity(streams=2)
    tickets = [core.arrive("a", DEFAULT, 1, 0.0, there) for _ in range(3)]
    assert [sent(each).is_waiting for each in tickets] == [False, False, True]
    assert not capacity(wait_s=MIN_LEAD_S).has_room and capacity(wait_s=MIN_LEAD_S * 0.99).has_room


# ---- who is refused -------------------------------------------------------------------------


def test_a_request_is_refused_once_its_tenant_s_queue_takes_longer_than_its_target() -> None:
    core = AdmissionController(one_tenant=True)
    core.set_engines(priced=False, engines=2)  # one request a second costs 1: two a second
    verdicts = [core.arrive("a", QUICK, 1, 0.0, CLOSED) for _ in range(7)]
    assert [isinstance(each, Refusal) for each in verdicts] == [False] * 5 + [True] * 2
    assert len(core) == 5


def test_retry_after_is_how_much_too_late_it_would_have_been() -> None:
    core = AdmissionController(one_tenant=True)
    core.set_engines(priced=False, engines=1)
    for _ in range(3):
        sent(core.arrive("a", QUICK, 1, 0.0, CLOSED))
    refused = core.arrive("a", QUICK, 1, 0.0, CLOSED)
    assert refused == Refusal("late", wait_s=3.0, retry_after_s=1.0)


def test_the_queue_holds_only_so_many() -> None:
    core = AdmissionController(max_waiting=2)
    verdicts = [core.arrive("a", DEFAULT, 1, 0.0, CLOSED) for _ in range(3)]
    assert isinstance(verdicts[2], Refusal) and verdicts[2].why == "full"


def test_nobody_is_refused_for_a_prompt_that_is_too_long_while_nobody_waits() -> None:
    core = AdmissionController()
    core.set_engines(priced=True, engines=1)
    for _ in range(100):
        core.costs.record_prefill("a", 1, 1.0)
    ticket = sent(core.arrive("a", QUICK, 100, 0.0, capacity()))
    assert ticket.cost.prefill_s > QUICK.patience_s and not ticket.is_waiting
    assert isinstance(core.arrive("a", QUICK, 100, 0.0, CLOSED), Refusal)


def test_a_request_of_higher_priority_passes_its_tenant_s_others_as_far_as_they_stay_in_time() -> (
    None
):
    core = AdmissionController(one_tenant=True)
    core.set_engines(priced=False, engines=2)
    low = [sent(core.arrive("a", QUICK, 1, 0.0, CLOSED)) for _ in range(3)]
    urgent = sent(core.arrive("a", URGENT, 1, 0.0, CLOSED))
    sent(core.arrive("a", URGENT, 1, 0.0, CLOSED))
    # A third one would have the last of the others come after its target.
    assert isinstance(core.arrive("a", URGENT, 1, 0.0, CLOSED), Refusal)
    assert core.next(0.1, capacity()) is urgent
    core.next(0.1, capacity())
    assert core.next(0.1, capacity()) is low[0]


def test_a_tenant_s_queue_does_not_make_another_s_request_late() -> None:
    core = AdmissionController()
    core.set_engines(priced=False, engines=4)
    verdicts = [core.arrive("heavy", QUICK, 1, 0.0, CLOSED) for _ in range(20)]
    assert isinstance(verdicts[-1], Refusal)
    light = sent(core.arrive("light", QUICK, 1, 0.0, CLOSED))
    core.next(0.1, capacity())
    assert core.next(0.1, capacity()) is light


def test_what_waits_in_vain_is_given_up_at_its_target_and_a_tenth() -> None:
    core = AdmissionController()
    ticket = sent(core.arrive("a", QUICK, 1, 0.0, CLOSED))
    assert core.pop_expired(QUICK.patience_s * (LATE - 0.01)) is None
    assert core.pop_expired(QUICK.patience_s * (LATE + 0.01)) is ticket
    assert (len(core), core.counts.expired, ticket.is_waiting) == (0, 1, False)


def test_doubt_grows_with_broken_promises_and_makes_refusals_earlier() -> None:
    core = AdmissionController(one_tenant=True)
    for number in range(100):
        core.arrive("a", QUICK, 1, 3.0 * number, CLOSED)
        assert core.pop_expired(3.0 * number + 2.5) is not None
    assert core.wait_safety_factor == MAX_WAIT_FACTOR
    for number in range(1000):
        core.arrive("a", QUICK, 1, 1000.0 + number, CLOSED)
        core.next(1000.0 + number, capacity())
    assert core.wait_safety_factor == 1.0


def test_engines_that_take_longer_than_predicted_get_less_and_are_promised_less() -> None:
    core = AdmissionController(one_tenant=True)
    core.set_engines(priced=True, engines=1)

    def sends(first_s: float) -> Ticket:
        ticket = sent(core.arrive("a", QUICK, 1, 0.0, capacity()))
        core.record_plan(ticket, 0.5)
        core.record_first_token(ticket, first_s)
        core.record_end(ticket, 0.0, 1.0)
        return ticket

    for _ in range(100):
        sends(0.5)
    assert core.prefill_safety_factor == 1.0
    for _ in range(100):
        sends(0.5 * 6)
    assert core.prefill_safety_factor == pytest.approx(6.0, abs=0.5), "95 % of promises are kept"
    place = capacity()
    sent(core.arrive("a", QUICK, 1, 0.0, place))
    assert place.waits_s[0] >= 0.5 * 5, "the engine is taken for so much longer"


# ---- who is due first -----------------------------------------------------------------------


def priced() -> AdmissionController:
    core = AdmissionController(one_tenant=True)
    core.set_engines(priced=True, engines=100)
    return core


def waits(core: AdmissionController, slo: SloClass, at_s: float, prefill_s: float) -> Ticket:
    ticket = sent(core.arrive("a", slo, 1000, at_s, CLOSED))
    core.set_prefill(ticket, prefill_s)
    return ticket


def test_without_a_target_a_short_prompt_passes_a_long_one() -> None:
    core = priced()
    long, short = waits(core, DEFAULT, 0.0, 1.0), waits(core, DEFAULT, 50.0, 0.05)
    assert [core.next(51.0, capacity()) for _ in range(2)] == [short, long]


def test_a_long_prompt_is_passed_by_those_that_come_within_a_multiple_of_its_own_time() -> None:
    core = priced()
    long = waits(core, DEFAULT, 0.0, 0.1)
    before = waits(core, DEFAULT, MAX_STRETCH * 0.1 - 0.2, 0.001)
    after = waits(core, DEFAULT, MAX_STRETCH * 0.1, 0.001)
    assert [core.next(11.0, capacity()) for _ in range(3)] == [before, long, after]


def test_no_prompt_is_due_later_than_it_must_be_sent() -> None:
    core = priced()
    long = waits(core, DEFAULT, 0.0, 60.0)
    assert long.due_s == long.latest_s == DEFAULT.max_wait_s - 60.0
    assert long.expires_s > long.latest_s


def test_with_a_target_the_one_that_must_be_sent_first_goes_first() -> None:
    core = priced()
    short, long = waits(core, QUICK, 0.0, 0.1), waits(core, QUICK, 0.1, 1.0)
    assert [core.next(0.2, capacity()) for _ in range(2)] == [long, short]


def test_a_prompt_whose_time_becomes_known_expires_accordingly() -> None:
    core = priced()
    ticket = sent(core.arrive("a", QUICK, 1000, 0.0, CLOSED))
    at_first_s = ticket.expires_s
    core.set_prefill(ticket, 1.5)
    assert ticket.expires_s == pytest.approx(0.5 + 0.1 * QUICK.patience_s)
    assert core.pop_expired(ticket.expires_s - 0.01) is None
    core.set_prefill(ticket, 0.0)
    assert core.pop_expired(at_first_s - 0.01) is None and core.pop_expired(2.3) is ticket


def test_nobody_is_refused_for_a_prompt_that_is_late_anyway() -> None:
    core = priced()
    hopeless = waits(core, QUICK, 0.0, 5.0)
    assert hopeless.latest_s == 0.0
    assert isinstance(core.arrive("a", QUICK, 1000, 0.01, CLOSED), Ticket)


def test_what_a_sent_prompt_takes_is_not_set_any_more() -> None:
    core = priced()
    ticket = waits(core, DEFAULT, 0.0, 1.0)
    assert core.next(0.1, capacity()) is ticket
    before = ticket.cost
    core.set_prefill(ticket, 9.0)
    assert ticket.cost == before and not len(core)


# ---- background -----------------------------------------------------------------------------


def test_a_background_request_goes_only_while_nobody_waits_and_engines_are_idle() -> None:
    core = AdmissionController()
    batch = sent(core.arrive("a", BATCH, 1, 0.0, capacity()))
    assert batch.is_waiting
    other = sent(core.arrive("b", QUICK, 1, 0.0, CLOSED))
    assert core.next(0.1, capacity(is_idle=True)) is other
    assert core.next(0.1, capacity()) is None
    assert core.next(0.1, capacity(is_idle=True)) is batch


def test_a_background_request_takes_nothing_of_its_tenant_s_share() -> None:
    core = AdmissionController()
    for _ in range(50):
        sent(core.arrive("a", BATCH, 1, 0.0, capacity(is_idle=True)))
        assert core.next(0.0, capacity(is_idle=True)) is None
    for tenant in "aabb":
        core.arrive(tenant, DEFAULT, 1, 0.0, CLOSED)
    order = [sent(core.next(0.1, capacity()) or CLOSED).tenant for _ in range(4)]  # type: ignore[arg-type]
    assert order == ["a", "b", "a", "b"]


# ---- what is charged ------------------------------------------------------------------------


def test_what_a_request_took_is_charged_once_it_is_known() -> None:
    core = AdmissionController()
    core.set_engines(priced=True, engines=1)
    first = sent(core.arrive("a", DEFAULT, 1000, 0.0, capacity()))
    core.record_plan(first, 5.0)
    core.record_end(first, 20.0, 4.0)
    assert core.charged_s["a"] == pytest.approx(first.cost_s) and first.cost_s == pytest.approx(
        10.0
    )
    for tenant in "aabb":
        core.arrive(tenant, DEFAULT, 1, 0.0, CLOSED)
    assert (core.next(0.1, capacity()) or first).tenant == "b"


def test_what_a_tenant_has_from_another_gateway_counts_here() -> None:
    core = AdmissionController()
    for tenant in "aaabbb":
        core.arrive(tenant, DEFAULT, 1, 0.0, CLOSED)
    core.record_peer_usage("a", 2.5)
    order = "".join((core.next(0.1, capacity()) or Ticket("?", 1.0)).tenant for _ in range(5))
    assert order == "bbbaa" or order == "bbaba"


# ---- the prediction holds -------------------------------------------------------------------


@dataclass
class Server:
    """One engine that takes what is sent as long as it was predicted to."""

    free_s: float = 0.0

    def capacity(self, now_s: float) -> Capacity:
        return Capacity([max(0.0, self.free_s - now_s)], lead_s=0.1, streams=9999, engines=1)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0.0, 0.2), st.sampled_from("abc"), st.sampled_from([QUICK, URGENT])),
        min_size=20,
        max_size=150,
    )
)
def test_who_is_admitted_goes_in_time_whoever_comes_later(
    arrivals: list[tuple[float, str, SloClass]],
) -> None:
    """An engine that needs 0.1 s a request, up to three tenants, loads up to and above all."""
    core, server, now_s, at_s = AdmissionController(), Server(), 0.0, 0.0
    core.set_engines(priced=False, engines=10)
    waits: dict[Ticket, float] = {}
    coming = []
    for gap_s, tenant, slo in arrivals:
        at_s += gap_s
        coming.append((at_s, tenant, slo))
    heapq.heapify(events := [(at, n) for n, (at, _, _) in enumerate(coming)])

    def turn() -> None:
        while (ticket := core.next(now_s, there := server.capacity(now_s))) is not None:
            server.free_s = max(server.free_s, now_s) + 0.1
            waits[ticket] = now_s - ticket.arrived_s
            assert there.streams == 9998

    tick = 0.0
    while events or len(core):
        at_event = events[0][0] if events else math.inf
        now_s = min(at_event, tick)
        if now_s == tick:
            turn()
            tick += 0.02
            continue
        _, number = heapq.heappop(events)
        _, tenant, slo = coming[number]
        there = server.capacity(now_s)
        verdict = core.arrive(tenant, slo, 1, now_s, there)
        if isinstance(verdict, Ticket) and not verdict.is_waiting:
            server.free_s = max(server.free_s, now_s) + 0.1
        turn()
    for ticket, waited_s in waits.items():
        most_s = ticket.slo.patience_s * LATE + 0.1 + 0.02
        assert waited_s <= most_s, "one may be under way, and turns are 0.02 s apart"


# ---- classes --------------------------------------------------------------------------------

CLASSES = SloClasses({"quick": QUICK, "batch": BATCH}, default="quick")


def test_the_header_wins_then_the_body_then_the_key_then_the_default() -> None:
    body = {"vllm_xargs": {"slo": "batch"}}
    assert CLASSES.choose(b"quick", body).name == "quick"
    assert CLASSES.choose(None, body, "quick").name == "batch"
    assert CLASSES.choose(None, {}, "batch").name == "batch"
    assert CLASSES.choose(None, {}) is QUICK
    assert SloClasses().choose(None, {}) is DEFAULT


@pytest.mark.parametrize(
    ("header", "body"),
    [(b"gold", {}), (b"", {}), (b"\xff", {}), (None, {"vllm_xargs": {"slo": 1}})],
)
def test_a_class_that_there_is_not_is_an_error(
    header: bytes | None, body: dict[str, object]
) -> None:
    with pytest.raises(SloClassError):
        CLASSES.choose(header, body)


def test_a_key_may_be_held_to_classes() -> None:
    with pytest.raises(SloClassError, match="This key may name: batch"):
        CLASSES.choose(b"quick", {}, "batch", {"batch"})
