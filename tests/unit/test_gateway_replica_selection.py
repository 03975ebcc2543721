"""Which replica answers: the least loaded, ties by where the prefix was seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.replica_selection import (
    AFFINITY_CHARS,
    TOKENS_MAX,
    affinity_key,
    choose_replica,
    draftable_tokens,
)
from headrace.router.token_cost import TokenPrices
from headrace_decode.speculative.tenant_policies import TenantPolicy, Tenants


def replica(name: str, waiting: int = 0, running: int = 0) -> ReplicaInfo:
    return ReplicaInfo(name, f"http://{name}", running, waiting)


THREE = [replica("a"), replica("b"), replica("c")]
KEYS = [b"key %d" % number for number in range(300)]


def choices(replicas: list[ReplicaInfo], down: frozenset[str] = frozenset()) -> list[str]:
    picked = [choose_replica(replicas, {}, down, key) for key in KEYS]
    return [one.replica_id for one in picked if one is not None]


def test_no_replica_is_no_choice() -> None:
    assert choose_replica([], {}, (), b"") is None


def test_replicas_that_are_down_are_never_chosen() -> None:
    assert choose_replica([replica("a")], {}, {"a"}, b"") is None
    assert choose_replica([replica("a"), replica("b", waiting=9)], {}, {"a"}, b"") == replica(
        "b", waiting=9
    )


def test_a_prefill_replica_stands_in_only_while_no_decode_replica_is_ready() -> None:
    spare = replace(replica("p"), is_fallback=True)
    assert choices([spare, replica("a", waiting=50)]) == ["a"] * len(KEYS)
    assert choices([spare, replica("a")], frozenset("a")) == ["p"] * len(KEYS)


def test_fewest_requests_in_flight_wins() -> None:
    chosen = choose_replica(THREE, {"a": 2, "b": 1, "c": 2}, (), b"any")
    assert chosen is not None and chosen.replica_id == "b"


def test_reported_waiting_counts_like_in_flight() -> None:
    chosen = choose_replica([replica("a", waiting=3), replica("b")], {"b": 2}, (), b"any")
    assert chosen is not None and chosen.replica_id == "b"
    chosen = choose_replica([replica("a", waiting=1), replica("b")], {"b": 2}, (), b"any")
    assert chosen is not None and chosen.replica_id == "a"


def test_reported_running_requests_count_likewise() -> None:
    chosen = choose_replica([replica("a", running=50), replica("b", waiting=1)], {}, (), b"any")
    assert chosen is not None and chosen.replica_id == "b"


def test_a_request_on_the_port_counts_before_the_engine_has_it() -> None:
    busy = ReplicaInfo("a", "http://a", in_flight=2)
    chosen = choose_replica([busy, replica("b", running=1)], {}, (), b"any")
    assert chosen is not None and chosen.replica_id == "b"


def test_what_this_gateway_sent_is_not_counted_twice() -> None:
    """`a` reported 5 requests, of which 4 were this gateway's; 2 of those have ended since."""
    reported = [
        ReplicaInfo("a", "http://a", in_flight=5),
        ReplicaInfo("b", "http://b", in_flight=4),
    ]
    chosen = choose_replica(reported, {"a": 2}, (), b"any", others={"a": 1, "b": 4})
    assert chosen is not None and chosen.replica_id == "a"


def test_ties_stay_where_the_prefix_is_whatever_the_order_of_the_list() -> None:
    assert choices(THREE) == choices(THREE[::-1])


def test_ties_spread_different_prefixes_over_all_replicas() -> None:
    chosen = choices(THREE)
    assert all(chosen.count(name) > len(KEYS) / 5 for name in "abc")


def test_losing_a_replica_moves_only_its_own_prefixes() -> None:
    before, after = choices(THREE), choices(THREE, down=frozenset("b"))
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"b"}


def test_affinity_is_the_beginning_of_the_prompt() -> None:
    long = "x" * AFFINITY_CHARS
    assert affinity_key({"prompt": long + "a"}) == affinity_key({"prompt": long + "b"})
    assert affinity_key({"prompt": "a"}) != affinity_key({"prompt": "b"})


def test_a_conversation_keeps_its_affinity_once_it_is_long_enough() -> None:
    system = {"role": "system", "content": "s" * AFFINITY_CHARS}
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert affinity_key({"messages": [system]}) == affinity_key({"messages": [system, *turns]})


def test_affinity_takes_token_ids_and_parts_of_content() -> None:
    assert affinity_key({"prompt": [1, 2, 3]}) != affinity_key({"prompt": [1, 2, 4]})
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert b"hello" in affinity_key({"messages": parts})


def test_affinity_bears_any_nonsense() -> None:
    for nonsense in (None, 1, {}, [None], [[]], [{"content": None}], {"a": 1}):
        assert isinstance(affinity_key({"messages": nonsense}), bytes)
        assert isinstance(affinity_key({"prompt": nonsense}), bytes)
    assert affinity_key({}) == b""
    assert len(affinity_key({"prompt": list(range(10**5))})) < 10 * AFFINITY_CHARS


# A request that can be drafted for


def told(waiting: int = 0, running: int = 0, *, step_s: float = 0.02) -> ReplicaInfo:
    prices = TokenPrices([step_s, step_s * 1.5, step_s * 2], [8, 8, 8], 900.0, 500.0, 0.05)
    return ReplicaInfo(f"{step_s} {running} {waiting}", "", running, waiting, 0.0, prices)


def test_it_goes_where_tokens_are_cheap_and_others_where_the_load_is_least() -> None:
    slow, fast = told(step_s=0.1), told(running=1)
    in_flight = {fast.replica_id: 1}
    assert choose_replica([slow, fast], in_flight, (), b"any", 100) == fast
    assert choose_replica([slow, fast], in_flight, (), b"any", 0) == slow


def test_what_this_gateway_has_sent_there_makes_a_replica_dearer_at_once() -> None:
    one, other = told(step_s=0.02), told(step_s=0.021)
    assert choose_replica([one, other], {other.replica_id: 4}, (), b"any", 100) == one
    assert choose_replica([one, other], {one.replica_id: 4}, (), b"any", 100) == other


def test_with_equal_prices_load_and_prefix_decide_as_ever() -> None:
    a, b = (
        ReplicaInfo(name, "", prices=TokenPrices([0.02], [8], 9.0, 5.0, 0.1)) for name in ("a", "b")
    )
    for key in KEYS:
        assert choose_replica([a, b], {}, (), key, 100) == choose_replica([a, b], {}, (), key)
        assert choose_replica([a, b], {"a": 1}, (), key, 100) == b


def test_a_cheap_replica_that_is_down_is_not_chosen() -> None:
    slow, fast = told(step_s=0.1), told()
    assert choose_replica([slow, fast], {}, {fast.replica_id}, b"any", 100) == slow


def test_one_replica_is_chosen_whatever_it_costs() -> None:
    assert choose_replica([told(waiting=99)], {}, (), b"any", 100) == told(waiting=99)


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        ({"prompt": "a"}, TOKENS_MAX),
        ({"prompt": "a", "max_tokens": 7}, 7),
        ({"messages": [], "max_completion_tokens": 5, "max_tokens": 7}, 5),
        ({"prompt": "a", "seed": 0}, 0),
        ({"prompt": "a", "seed": None}, TOKENS_MAX),
        ({"prompt": "a", "vllm_xargs": {"headrace_draft": 0}}, 0),
        ({"prompt": "a", "vllm_xargs": {"headrace_draft": 1}}, TOKENS_MAX),
        ({"prompt": "a", "vllm_xargs": "nonsense", "max_tokens": "many"}, TOKENS_MAX),
        ({"prompt": "a", "max_tokens": -5}, 0),
        ({"prompt": "a", "max_tokens": 1 << 80}, 1 << 80),
    ],
)
def test_seeds_and_opt_outs_are_not_drafted_for(request_: dict[str, Any], tokens: int) -> None:
    assert draftable_tokens(request_) == tokens


def test_a_tenant_that_is_not_drafted_for_may_be_answered_anywhere() -> None:
    tenants = Tenants({"*": TenantPolicy(draft=False), "a": TenantPolicy()})
    assert draftable_tokens({"max_tokens": 9, "cache_salt": "a"}, tenants) == 9
    assert draftable_tokens({"max_tokens": 9, "cache_salt": "b"}, tenants) == 0
    assert draftable_tokens({"max_tokens": 9}, tenants) == 0


def test_a_replicas_answer_tells_its_prices_or_none() -> None:
    answer = {"replica_id": "a", "url": "http://a", "running": 1, "waiting": 2, "kv_usage": 0.5}
    assert ReplicaInfo.of({**answer, "prices": None}).prices is None
    told = {"step_s": [0.1], "draft_tokens": [4], "error": 0.1}
    assert ReplicaInfo.of({**answer, "prices": told}).prices == TokenPrices([0.1], [4], error=0.1)
    assert ReplicaInfo.of(answer).kv_usage == 0.5
