"""A request's KV hint: which blocks of it are retained, until when, and what is no hint."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from headrace_engine.connector import retention
from headrace_engine.connector.retention import MAX_RETENTION_S, RequestRetention, retention_s
from headrace_engine.connector.scheduler_connector import SchedulerConnector
from headrace_engine.connector.state_groups import StateGroups
from headrace_engine.vllm.llm import with_retention
from headrace_kvstore.identity.private_blocks import private_name
from headrace_kvstore.identity.salts import isolated_salt
from tests.support.clock import Clock
from tests.support.kvscheduling import B, Engine, Pool, Store, hashes, request

NOW_S = 1000.0


def hints(*actions: tuple[str, str, Any]) -> KvHintsEnvelope:
    each = [KvHintAction(f"a{n}", *action) for n, action in enumerate(actions)]
    return KvHintsEnvelope("1", "m", each)


def retain_for(seconds: Any) -> KvHintsEnvelope:
    return hints(("retain", "1", {"seconds": seconds}))


class Retained(list[tuple[list[bytes], float, str]]):
    """What the store is asked to retain."""

    def __call__(self, names: Any, until_s: float, salt: str) -> None:
        self.append((list(names), until_s, salt))


def engine_with(store: Store, req: Any, **options: Any) -> tuple[Engine, Retained]:
    retained = Retained()
    return Engine(store, req, retain=retained, clock=Clock(NOW_S), **options), retained


def computed(engine: Engine, tokens: int) -> None:
    """The engine has computed a request, and the output has come."""
    engine.admit()
    engine.step(tokens, new=True)
    engine.comes_back(tokens)


def end(engine: Engine) -> None:
    engine.scheduler.finished(engine.request, [engine.blocks])


def test_stored_blocks_are_retained_when_the_request_ends() -> None:
    store = Store(held=set(hashes(3)))
    engine, retained = engine_with(
        store, request(3 * B + 1, kv_hints=retain_for(60), cache_salt="acme")
    )
    computed(engine, B + 1)
    assert retained == [], "the time begins at the end"
    end(engine)
    assert retained == [(hashes(3), NOW_S + 60, "acme")]


def test_blocks_that_are_still_to_be_saved_are_retained_once_they_are() -> None:
    engine, retained = engine_with(Store(), request(2 * B, kv_hints=retain_for(60)))
    computed(engine, 2 * B)
    end(engine)
    assert [names for names, *_ in retained] == [hashes(2)], "the store ignores what it lacks"
    [job] = engine.idle().saves
    assert len(retained) == 1
    engine.scheduler.saved([job])
    assert retained[1:] == [(hashes(2), NOW_S + 60, "")]
    engine.scheduler.saved([job])
    assert len(retained) == 2


def test_the_blocks_of_the_answer_are_retained_too() -> None:
    engine, retained = engine_with(Store(), request(2 * B, kv_hints=retain_for(60)))
    computed(engine, 2 * B)
    engine.request.block_hashes = hashes(3)  # the answer has filled a block
    end(engine)
    assert retained[0][0] == hashes(3)


def test_of_two_requests_for_a_block_the_longer_time_counts() -> None:
    engine, retained = engine_with(Store(), request(B, kv_hints=retain_for(60)))
    computed(engine, B)
    end(engine)
    known = engine.scheduler._retention
    assert known is not None
    known.finish(hashes(1), [0], 30.0, "")
    [job] = engine.idle().saves
    engine.scheduler.saved([job])
    assert retained[-1] == (hashes(1), NOW_S + 60, "")


def test_a_request_that_was_preempted_and_left_keeps_what_is_stored() -> None:
    store = Store(held=set(hashes(1)))
    engine, retained = engine_with(store, request(3 * B, kv_hints=retain_for(60)))
    computed(engine, 2 * B)
    engine.request.num_computed_tokens = 0  # it has lost its blocks
    engine.scheduler.finished(engine.request, [[]])
    assert retained == [(hashes(3), NOW_S + 60, "")]


@pytest.mark.parametrize("fields", [{}, {"kv_hints": None}, {"kv_hints": retain_for(0)}])
def test_without_a_hint_nothing_is_retained(fields: dict[str, Any]) -> None:
    engine, retained = engine_with(Store(), request(2 * B, **fields))
    computed(engine, 2 * B)
    end(engine)
    [job] = engine.idle().saves
    engine.scheduler.saved([job])
    assert retained == []


def test_isolated_requests_and_private_blocks_are_not_retained() -> None:
    apart = request(2 * B, kv_hints=retain_for(60), cache_salt=isolated_salt("acme", "sparse"))
    engine, retained = engine_with(Store(), apart)
    computed(engine, 2 * B)
    end(engine)
    assert retained == []
    names = [*hashes(1), private_name(b"x" * 16, 1)]
    engine, retained = engine_with(
        Store(), request(2 * B, kv_hints=retain_for(60), block_hashes=names)
    )
    computed(engine, 2 * B)
    end(engine)
    assert [each for each, *_ in retained] == [hashes(1)]


def test_states_of_recurrent_layers_are_retained_with_the_blocks_before_them() -> None:
    retained, states = Retained(), StateGroups((1,), attention=0)
    scheduler = SchedulerConnector(
        Store(), B, retain=retained, states=states, under_steps=False, clock=Clock(NOW_S)
    )
    ended = request(2 * B, kv_hints=retain_for(60))
    scheduler.bind(Pool())
    scheduler.added(ended)
    scheduler.finished(ended, [[], []])
    first, second = hashes(2)
    assert retained[0][0] == [first, *states.names(first), second, *states.names(second)]


def test_engines_ignore_hints_without_a_store_that_retains() -> None:
    engine = Engine(Store(), request(B, kv_hints=retain_for(60)))
    computed(engine, B)
    end(engine)


def test_too_many_blocks_that_wait_drop_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_WAITING", 3)
    retained = Retained()
    known = RequestRetention(retained, Clock(NOW_S))
    known.finish(hashes(2), [0, 1], 60.0, "")
    known.finish([b"x", b"y"], [0, 1], 60.0, "")
    known.saved([*hashes(2), b"x", b"y"])
    assert retained[2:] == [([hashes(2)[1], b"x", b"y"], NOW_S + 60, "")]


# Hints


def test_the_longest_of_several_actions_counts_and_others_are_ignored() -> None:
    req = request(
        B,
        kv_hints=hints(
            ("retain", "1", {"seconds": 5}),
            ("retain", "1", {"seconds": 9.5, "more": 1}),
            ("retain", "2", {"seconds": 99}),
            ("prefetch", "1", {"seconds": 99}),
        ),
    )
    assert RequestRetention(Retained()).seconds(req) == 9.5


@pytest.mark.parametrize("seconds", [MAX_RETENTION_S, MAX_RETENTION_S + 1, 1e300, 10**400])
def test_a_day_is_the_longest(seconds: float) -> None:
    assert retention_s({"seconds": seconds}) == MAX_RETENTION_S


@pytest.mark.parametrize(
    "payload",
    [
        *({}, {"seconds": None}, {"seconds": "60"}, {"seconds": True}, {"seconds": -1}),
        *({"seconds": float("nan")}, {"seconds": [60]}, {"Seconds": 60}, None, [60], 60),
    ],
)
def test_a_payload_that_cannot_be_read_is_ignored_and_logged_once(
    payload: Any, caplog: pytest.LogCaptureFixture
) -> None:
    known = RequestRetention(Retained())
    bad = ("retain", "1", payload)
    with caplog.at_level(logging.WARNING):
        assert known.seconds(request(B, kv_hints=hints(bad, ("retain", "1", {"seconds": 7})))) == 7
        assert known.seconds(request(B, kv_hints=hints(bad))) == 0
    assert [record.getMessage()[:20] for record in caplog.records] == ["KV hints are ignored"]


@pytest.mark.parametrize("envelope", [5, "retain", KvHintsEnvelope("1", "m", [5])])
def test_what_is_no_envelope_is_ignored(envelope: Any) -> None:
    assert RequestRetention(Retained()).seconds(request(B, kv_hints=envelope)) == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(payload=JSON | st.fixed_dictionaries({"seconds": JSON}))
def test_no_payload_raises_and_all_times_are_within_a_day(payload: Any) -> None:
    seconds = retention_s(payload)
    assert seconds is None or 0 <= seconds <= MAX_RETENTION_S


def test_a_frontends_hint_is_what_the_engine_reads() -> None:
    assert with_retention({"priority": 1}, 0.0, "r") == {"priority": 1}
    options = with_retention({"priority": 1}, 60.0, "r")
    assert options["priority"] == 1
    carrying = request(B, kv_hints=options["kv_hints"])
    assert RequestRetention(Retained()).seconds(carrying) == 60
    both = with_retention({"kv_hints": hints(("prefetch", "1", {}))}, 60.0, "r")["kv_hints"]
    assert [action.action_type for action in both.actions] == ["prefetch", "retain"]
    assert both.message_id == "m"
