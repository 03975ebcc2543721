"""Which replica answers: the least loaded, ties by where the prefix was seen."""

from __future__ import annotations

from dataclasses import replace

from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.replica_selection import (
    AFFINITY_CHARS,
    affinity_key,
    choose_replica,
)


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
