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
    cluster.overrides().set_override({"policy": "local"})
    cluster.overrides().set_override({"mode": "off", "draft_cap": None})
    pending = AppliedOverrides().pending(cluster.overrides().all())
    assert pending == [{"policy": "local"}, {"mode": "off"}, {"draft_cap": None}]


def test_a_replica_is_told_each_order_once() -> None:
    cluster, applied = Cluster(), AppliedOverrides()
    cluster.overrides().set_override({"policy": "local"})
    assert applied.pending(cluster.overrides().all()) == [{"policy": "local"}]
    assert applied.pending(cluster.overrides().all()) == []
    cluster.overrides().set_override({"policy": "cost"})
    assert applied.pending(cluster.overrides().all()) == [{"policy": "cost"}]


def test_apps_do_not_hear_each_others_orders() -> None:
    cluster = Cluster()
    cluster.overrides("a").set_override({"policy": "local"})
    assert AppliedOverrides().pending(cluster.overrides("b").all()) == []
    assert all(key.startswith(prefix("a")) for key in cluster)
    assert not prefix("ab").startswith(prefix("a"))


def test_models_of_an_app_do_not_hear_each_others_orders() -> None:
    cluster = Cluster()
    of_a, of_b = (OverrideStore("app", cluster.get, cluster.__setitem__, key) for key in "ab")
    of_a.set_override({"policy": "local"})
    assert AppliedOverrides().pending(of_a.all()) == [{"policy": "local"}]
    assert AppliedOverrides().pending(of_b.all()) == []
    assert AppliedOverrides().pending(cluster.overrides().all()) == []
    assert all(key.startswith(prefix("app")) for key in cluster)


def test_a_value_that_is_no_json_is_no_order() -> None:
    cluster = Cluster({prefix("app") + "mode": b"{", prefix("app") + "policy": b"\xff"})
    assert cluster.overrides().all() == {}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(FIELDS), st.one_of(st.none(), st.integers(0, 9), st.text(max_size=3))
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_a_replica_that_starts_late_ends_up_as_one_that_heard_every_order(
    given_orders: list[tuple[str, Any]], looks: bool
) -> None:
    cluster, old = Cluster(), AppliedOverrides()
    heard: dict[str, Any] = {}
    for name, value in given_orders:
        cluster.overrides().set_override({name: value})
        heard[name] = value
        if looks:
            for pending in old.pending(cluster.overrides().all()):
                heard |= pending
    late: dict[str, Any] = {}
    for pending in AppliedOverrides().pending(cluster.overrides().all()):
        late |= pending
    assert heard == late
