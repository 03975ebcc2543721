"""A decode replica's planner and the plans that gateways send along."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.replica.planner import ReplicaPlanner
from headrace.router import Geometry, Plan, Router, RouterSettings
from headrace.router.plan_codec import encode
from headrace_engine.kv_transfer.handoff import PrefillResult
from headrace_engine.meter import EngineMeter
from tests.support.plans import TOKENS, gateway_plan


class Store:
    """A `StoreView` that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.lookup_failures: dict[str, int] = {}

    async def available_runs(
        self, token_ids: Sequence[int], salt: str, compute_s: float
    ) -> list[Any]:
        self.asked += 1
        return []


def planner(store: Any = None) -> ReplicaPlanner:
    router = Router(RouterSettings(), Geometry(16, 1000, 100, 100), replica="d1")
    router.prefill_members({"x"})
    return ReplicaPlanner(router, EngineMeter(), store, "here")


def gateways(kind: str = "remote", **other: Any) -> bytes:
    return encode(gateway_plan(kind, **other))


def plan(mine: ReplicaPlanner, given: bytes | None, local_only: str | None = None) -> Plan:
    return asyncio.run(mine.plan("r", range(TOKENS), "", local_only, given))


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_plan_that_fits_is_taken_up_without_asking_the_store(kind: str) -> None:
    store = Store()
    mine = planner(store)
    made = plan(mine, gateways(kind))
    assert (made.kind, made.request_id, made.plan_id) == (kind, "r", "g-1")
    assert store.asked == 0
    told = mine.explain("r")
    assert told is not None and told["made_by"] == "gateway"
    assert mine.report_fields()["heard"] == ("g-1",)


def test_a_stale_plan_is_replaced_and_the_reasons_say_so() -> None:
    store = Store()
    mine = planner(store)
    made = plan(mine, gateways(decode="d2"))
    assert made.reasons[0] == "the gateway's plan is stale: it is for d2"
    assert (made.plan_id, store.asked) == ("", 1)
    assert mine.report_fields()["heard"] == ("g-1",), "its gateway may forget it"
    plans = mine.snapshot()["plans"]
    assert (plans["adopted"], plans["stale"]) == (0, 1)


def test_bytes_that_are_no_plan_are_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine, whole = planner(), json.loads(gateways())
    missing = json.dumps({**whole, "predicted": {"remote.queue": 1.0}}).encode()
    with caplog.at_level(logging.WARNING, "headrace.router"):
        for given in (b"", b"{}", b"\xff", b"x" * 10_000, gateways()[:-1], missing):
            assert plan(mine, given).plan_id == ""
    assert mine.snapshot()["plans"]["stale"] == 6
    assert caplog.text.count("cannot be read") == 1


def test_whoever_wants_to_know_hears_of_each_change() -> None:
    mine, heard = planner(), list[int]()
    mine.on_change.append(lambda: heard.append(len(heard)))
    plan(mine, gateways())
    mine.prefill_done("r", PrefillResult({}, 0.0, 0.1, 0, TOKENS, "x"), 0.2)
    mine.first_token("r", 0.3, 0)
    mine.finished("r")
    assert len(heard) == 4
    plan(mine, None)
    mine.remote_failed("r", "no answer")
    assert len(heard) == 6


def test_the_first_token_logs_one_line_with_the_plan_and_what_came_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine = planner()
    made = plan(mine, None)
    with caplog.at_level(logging.INFO, "headrace.router"):
        mine.first_token("r", 0.5, 16)
    [line] = [each for each in caplog.records if each.getMessage().startswith("plan: ")]
    assert vars(line)["request_id"] == "r"
    told = line.getMessage()
    for part in (made.reasons[0], "measured 0.500 s", f"16 of {TOKENS}"):
        assert part in told, told


def test_a_span_gets_the_whole_plan_as_flat_attributes() -> None:
    mine = planner()
    made = plan(mine, gateways("local"))
    mine.first_token("r", 0.5, 0)
    told = mine.attributes("r")
    assert told["headrace.plan.kind"] == "local"
    assert told["headrace.plan.predicted.local.total"] == made.predicted["local.total"]
    assert told["headrace.plan.measured.ttft_s"] == 0.5
    assert all(isinstance(value, str | int | float) for value in told.values())
    assert mine.attributes("nobody") == {}
