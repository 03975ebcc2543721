"""Start-time fair queueing: whose turn it is, against a model that does the same naively."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.admission import fair_queue
from headrace.gateway.admission.fair_queue import MAX_AHEAD_S, FairQueue, QueuedRequest


def drain(queue: FairQueue, number: int) -> str:
    return "".join(queue.pop().tenant for _ in range(number))


def test_tenants_take_turns_however_many_requests_one_has() -> None:
    queue = FairQueue()
    for tenant in "aaaaaabb":
        queue.push(QueuedRequest(tenant, 1.0))
    assert drain(queue, 8) == "ababaaaa"


def test_a_tenant_whose_requests_take_longer_has_fewer_turns() -> None:
    queue = FairQueue()
    for _ in range(6):
        queue.push(QueuedRequest("a", 2.0))
        queue.push(QueuedRequest("b", 1.0))
    assert drain(queue, 6).count("b") == 4


def test_a_tenant_that_was_idle_gets_its_share_and_nothing_for_the_time_before() -> None:
    queue = FairQueue()
    for _ in range(20):
        queue.push(QueuedRequest("a", 1.0))
    assert drain(queue, 8) == "aaaaaaaa"
    for _ in range(8):
        queue.push(QueuedRequest("b", 1.0))
    assert drain(queue, 8).count("b") == 4


def test_what_passed_while_nobody_waited_is_owed_for_one_request_at_most() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.charge_unqueued("a", 1.0)
    for tenant in "ab" * 4:
        queue.push(QueuedRequest(tenant, 1.0))
    assert drain(queue, 8) == "babababa"


def test_among_its_own_a_tenant_s_order_is_priority_then_deadline_then_arrival() -> None:
    queue = FairQueue()
    told = [(0, 5.0), (0, 3.0), (1, 9.0), (0, 3.0)]
    waiting = [QueuedRequest("a", 1.0, *each) for each in told]
    assert [queue.position_of(each) or queue.push(each) for each in waiting] == [
        None,
        None,
        None,
        2,
    ]
    queue.push(waiting[3])
    assert [waiting.index(queue.pop()) for _ in told] == [2, 1, 3, 0]


def test_a_correction_counts_at_once() -> None:
    queue = FairQueue()
    for tenant in "aabb":
        queue.push(QueuedRequest(tenant, 1.0))
    assert drain(queue, 1) == "a"
    queue.charge("a", 5.0)
    assert drain(queue, 3) == "bba"


def test_no_counter_is_ever_further_ahead_than_its_bound() -> None:
    queue = FairQueue()
    queue.push(QueuedRequest("a", 1.0))
    queue.push(QueuedRequest("b", 1.0))
    for _ in range(100):
        queue.charge("a", MAX_AHEAD_S)
    for _ in range(int(MAX_AHEAD_S) + 2):
        queue.push(QueuedRequest("b", 1.0))
    assert "a" in drain(queue, int(MAX_AHEAD_S) + 2)


def test_a_request_that_is_not_wanted_any_more_is_charged_to_nobody() -> None:
    queue = FairQueue()
    waiting = [QueuedRequest("a", 1.0), QueuedRequest("a", 1.0)]
    for each in waiting:
        queue.push(each)
    queue.remove(waiting[0])
    assert (len(queue), queue.cost_s, queue.pop()) == (1, 1.0, waiting[1])
    with pytest.raises(LookupError):
        queue.pop()


def test_counters_of_tenants_that_went_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_TENANTS", 10)
    queue = FairQueue()
    queue.push(QueuedRequest("waits", 1.0))
    for number in range(100):
        queue.charge(f"t{number}", 1.0)
    assert len(queue._ends) == 10 and len(queue._heap) < 70


COST = st.floats(0.01, 1.0)
EVENT = st.one_of(
    st.tuples(st.just("push"), st.sampled_from("abcd"), COST),
    st.tuples(st.just("pop"), st.just(""), COST),
    st.tuples(st.just("remove"), st.sampled_from("abcd"), COST),
)


class Model:
    """The rule in its plainest form: a list, and a counter for every tenant that ever came."""

    def __init__(self) -> None:
        self.virtual_s, self.counters = 0.0, dict[str, float]()
        self.waiting: list[QueuedRequest] = []

    def push(self, each: QueuedRequest) -> None:
        if not any(other.tenant == each.tenant for other in self.waiting):
            self.counters[each.tenant] = max(self.virtual_s, self.counters.get(each.tenant, 0.0))
        self.waiting.append(each)

    def least(self) -> float:
        return min(self.counters[each.tenant] for each in self.waiting)

    def pop(self, tenant: str) -> QueuedRequest:
        found = next(each for each in self.waiting if each.tenant == tenant)
        self.virtual_s = self.counters[tenant]
        self.counters[tenant] += found.cost_s
        self.waiting.remove(found)
        return found


@settings(max_examples=200)
@given(st.lists(EVENT, max_size=80))
def test_it_does_what_the_plain_rule_does(events: list[tuple[str, str, float]]) -> None:
    queue, model = FairQueue(), Model()
    for kind, tenant, cost_s in events:
        own = [each for each in model.waiting if each.tenant == tenant]
        if kind == "push":
            each = QueuedRequest(tenant, cost_s)
            queue.push(each)
            model.push(each)
        elif kind == "remove" and own:
            queue.remove(own[-1])
            model.waiting.remove(own[-1])
        elif kind == "pop" and model.waiting:
            least = model.least()
            each = queue.pop()
            assert model.counters[each.tenant] == pytest.approx(least)
            assert model.pop(each.tenant) is each
        assert len(queue) == len(model.waiting)
        assert queue.cost_s == pytest.approx(sum(each.cost_s for each in model.waiting), abs=1e-9)
        assert (queue.first() is None) == (not model.waiting)


@settings(max_examples=200)
@given(st.lists(COST, min_size=60, max_size=60), st.integers(0, 20))
def test_tenants_that_both_wait_get_alike_to_within_a_request_of_each(
    costs: list[float], alone: int
) -> None:
    """Theorem 1 of Goyal, Vin and Cheng, at every moment from when both wait."""
    queue = FairQueue()
    for cost_s in costs[:40]:
        queue.push(QueuedRequest("a", cost_s))
    for _ in range(min(alone, 20)):
        queue.pop()
    for cost_s in costs[40:]:
        queue.push(QueuedRequest("b", cost_s))
    had = defaultdict[str, float](float)
    while len(queue.requests_of("a")) and len(queue.requests_of("b")):
        each = queue.pop()
        had[each.tenant] += each.cost_s
        assert abs(had["a"] - had["b"]) <= max(costs[:40]) + max(costs[40:]) + 1e-9


@settings(max_examples=100)
@given(st.lists(COST, min_size=1, max_size=30), st.integers(1, 5))
def test_nobody_starves_however_many_requests_others_keep_sending(
    costs: list[float], others: int
) -> None:
    queue, had = FairQueue(), 0.0
    queue.push(QueuedRequest("light", 0.5))
    for number in range(1000):
        for other in range(others):
            queue.push(QueuedRequest(f"heavy{other}", costs[number % len(costs)]))
        each = queue.pop()
        if each.tenant == "light":
            break
        had += each.cost_s
    assert had <= others * 2 * max(costs) + 1e-9
