"""What replicas share as members of an app: draining, counting requests, orders, who is there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.serving.drain_timeouts import ENGINE_END_S, drain_options, grace_s
from headrace_engine.serving.inflight import InFlight
from headrace_engine.serving.members import Members
from headrace_engine.serving.model_values import prefix
from headrace_engine.serving.settings_override import (
    FIELDS,
    AppliedOverrides,
    Override,
    OverrideStore,
)

# Draining


def test_a_replica_drains_as_long_as_it_is_configured_to() -> None:
    options = drain_options(120.0)
    assert grace_s(*options.values()) == pytest.approx(120.0)


def test_serve_kills_nobody_who_still_may_drain() -> None:
    options = drain_options(30.0)
    loop_s = options["graceful_shutdown_wait_loop_s"]
    assert options["graceful_shutdown_timeout_s"] >= 2 * loop_s + 30.0 + ENGINE_END_S


def test_a_time_limit_of_serve_that_leaves_no_time_to_drain_gives_none() -> None:
    assert grace_s(5.0, 2.0) == 0.0


# Requests in flight


class Held:
    """ASGI: answers when told to."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.entered: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered.append(scope["path"])
        if scope["path"] != "/health":
            await self.let_go.wait()


def ask(app: InFlight, path: str, kind: str = "http") -> asyncio.Task[None]:
    async def nothing(*_: Any) -> None: ...

    return asyncio.ensure_future(app({"type": kind, "path": path}, nothing, nothing))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_count_from_their_beginning_to_their_end() -> None:
    app = InFlight(held := Held())
    tasks = [ask(app, "/a"), ask(app, "/b")]
    await settle()
    assert app.count == 2
    held.let_go.set()
    await asyncio.gather(*tasks)
    assert app.count == 0


async def test_above_the_limit_requests_wait_in_order_and_count() -> None:
    app = InFlight(held := Held(), lambda: 1)
    tasks = [ask(app, path) for path in ("/a", "/b", "/c")]
    await settle()
    assert held.entered == ["/a"] and app.count == 3
    held.let_go.set()
    await asyncio.gather(*tasks)
    assert held.entered == ["/a", "/b", "/c"] and app.count == 0


async def test_a_limit_that_is_raised_holds_from_the_next_request_on() -> None:
    limit = [1]
    app = InFlight(held := Held(), lambda: limit[0])
    tasks = [ask(app, "/a"), ask(app, "/b")]
    await settle()
    limit[0] = 3
    tasks.append(ask(app, "/c"))
    await settle()
    assert set(held.entered) == {"/a", "/b", "/c"}
    held.let_go.set()
    await asyncio.gather(*tasks)


async def test_one_that_gives_up_waiting_leaves_no_trace() -> None:
    app = InFlight(held := Held(), lambda: 1)
    first, second, third = (ask(app, path) for path in ("/a", "/b", "/c"))
    await settle()
    second.cancel()
    await settle()
    assert app.count == 2
    held.let_go.set()
    await asyncio.gather(first, third)
    assert held.entered == ["/a", "/c"] and app.count == 0


async def test_one_that_gives_up_as_its_turn_comes_passes_the_turn_on() -> None:
    app = InFlight(held := Held(), lambda: 1)
    first, second, third = (ask(app, path) for path in ("/a", "/b", "/c"))
    await settle()
    first.cancel()
    await asyncio.sleep(0)  # the first has left, the second has its turn and does not know it
    second.cancel()
    await settle()
    assert held.entered == ["/a", "/c"]
    held.let_go.set()
    await third
    assert app.count == 0


async def test_health_checks_and_lifespans_neither_wait_nor_count() -> None:
    app = InFlight(held := Held(), lambda: 1)
    busy = ask(app, "/a")
    await settle()
    await ask(app, "/health")
    held.let_go.set()
    await busy
    await ask(app, "/l", "lifespan")
    assert app.count == 0


# Members


def test_a_watcher_hears_who_is_there_and_each_change_once() -> None:
    members, heard = Members(), []
    members.update("decode", ["a"])
    members.watch("decode", heard.append)
    members.update("decode", ["a"])
    members.update("decode", ["b", "a"])
    members.update("prefill", ["p"])
    members.update("decode", [])
    assert heard == [{"a"}, {"a", "b"}, set()]


def test_who_watches_before_anybody_is_known_hears_of_the_first() -> None:
    members, heard = Members(), []
    members.watch("decode", heard.append)
    assert heard == []
    members.update("decode", [])
    assert heard == [set()]


# Orders


class Cluster(dict[str, bytes]):
    """The cluster's values, by key."""

    def overrides(self, app: str = "app") -> OverrideStore:
        return OverrideStore(app, self.get, self.__setitem__)


def test_a_replica_that_starts_learns_the_orders_in_force() -> None:
    cluster = Cluster()
    cluster.overrides().set_override({"policy": "local"}, 0.0)
    cluster.overrides().set_override({"mode": "off", "draft_cap": None}, 0.0)
    pending = AppliedOverrides().pending(cluster.overrides().all(), 10.0)
    assert pending == [{"policy": "local"}, {"mode": "off"}, {"draft_cap": None}]


def test_a_replica_is_told_each_order_once() -> None:
    cluster, applied = Cluster(), AppliedOverrides()
    cluster.overrides().set_override({"policy": "local"}, 0.0)
    assert applied.pending(cluster.overrides().all(), 1.0) == [{"policy": "local"}]
    assert applied.pending(cluster.overrides().all(), 2.0) == []
    cluster.overrides().set_override({"policy": "cost"}, 3.0)
    assert applied.pending(cluster.overrides().all(), 4.0) == [{"policy": "cost"}]


def test_an_order_for_a_time_holds_for_what_is_left_of_it() -> None:
    cluster = Cluster()
    cluster.overrides().set_override({"mode": "auto"}, 0.0)
    cluster.overrides().set_override({"mode": "off", "for_s": 60.0}, 100.0)
    assert AppliedOverrides().pending(cluster.overrides().all(), 140.0) == [
        {"mode": "auto"},
        {"mode": "off", "for_s": 20.0},
    ]
    assert AppliedOverrides().pending(cluster.overrides().all(), 160.0) == [{"mode": "auto"}]


def test_a_standing_order_ends_one_that_holds_for_a_time() -> None:
    cluster, applied = Cluster(), AppliedOverrides()
    cluster.overrides().set_override({"mode": "off", "for_s": 60.0}, 0.0)
    applied.pending(cluster.overrides().all(), 1.0)
    cluster.overrides().set_override({"mode": "static:4"}, 2.0)
    assert applied.pending(cluster.overrides().all(), 3.0) == [{"mode": "static:4"}]


def test_apps_do_not_hear_each_others_orders() -> None:
    cluster = Cluster()
    cluster.overrides("a").set_override({"policy": "local"}, 0.0)
    assert AppliedOverrides().pending(cluster.overrides("b").all(), 1.0) == []
    assert all(key.startswith(prefix("a")) for key in cluster)
    assert not prefix("ab").startswith(prefix("a"))


def test_models_of_an_app_do_not_hear_each_others_orders() -> None:
    cluster = Cluster()
    of_a, of_b = (OverrideStore("app", cluster.get, cluster.__setitem__, key) for key in "ab")
    of_a.set_override({"policy": "local"}, 0.0)
    assert AppliedOverrides().pending(of_a.all(), 1.0) == [{"policy": "local"}]
    assert AppliedOverrides().pending(of_b.all(), 1.0) == []
    assert AppliedOverrides().pending(cluster.overrides().all(), 1.0) == []
    assert all(key.startswith(prefix("app")) for key in cluster)


@given(st.binary(max_size=200))
def test_a_value_that_is_none_of_ours_is_no_order(value: bytes) -> None:
    noted = Override.of(value)
    assert len(noted.standing) <= 1 >= len(noted.passing)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(FIELDS),
            st.one_of(st.none(), st.integers(0, 9), st.text(max_size=3)),
            st.one_of(st.none(), st.floats(1.0, 50.0)),
            st.floats(0.0, 30.0),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_a_replica_that_starts_late_ends_up_as_one_that_heard_every_order(
    given_orders: list[tuple[str, Any, float | None, float]], looks: bool
) -> None:
    cluster, old = Cluster(), AppliedOverrides()
    heard, late = Desk(), Desk()
    now_s = 0.0
    for name, value, for_s, pause_s in given_orders:
        order = {name: value} if for_s is None else {name: value, "for_s": for_s}
        cluster.overrides().set_override(order, now_s)
        heard.obey(order, now_s)
        if looks:
            for pending in old.pending(cluster.overrides().all(), now_s):
                heard.obey(pending, now_s)
        now_s += pause_s
    for pending in AppliedOverrides().pending(cluster.overrides().all(), now_s):
        late.obey(pending, now_s)
    for then_s in (now_s, now_s + 25.0, now_s + 100.0):
        assert heard.at(then_s) == late.at(then_s)


class Desk:
    """Obeys orders as a replica does (`headrace_decode.speculative`)."""

    def __init__(self) -> None:
        self.standing: dict[str, Any] = {}
        self.passing: dict[str, tuple[Any, float]] = {}

    def obey(self, order: dict[str, Any], now_s: float) -> None:
        for name in FIELDS:
            if name in order and "for_s" in order:
                self.passing[name] = order[name], now_s + order["for_s"]
            elif name in order:
                self.standing[name] = order[name]
                self.passing.pop(name, None)

    def at(self, now_s: float) -> dict[str, Any]:
        holding = {name: value for name, (value, until) in self.passing.items() if until > now_s}
        return self.standing | holding
