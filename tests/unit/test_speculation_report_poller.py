"""The poller of a decode replica's reports on speculative decoding, and their metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from headrace.observability import speculation, totals
from headrace.observability.speculation import RaySpeculationMetrics
from headrace_decode.speculative import report_poller
from headrace_decode.speculative.report_poller import poll_reports


def test_an_engine_that_fails_or_does_not_draft_is_polled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_poller, "POLL_INTERVAL_S", 0.0)
    seen: list[Mapping[str, Any]] = []
    asked = 0

    async def fetch_report() -> dict[str, Any] | None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("the engine is busy dying")
        return None if asked == 2 else {"steps": 1}

    async def until_reported() -> None:
        task = asyncio.create_task(poll_reports(fetch_report, seen.append))
        while not seen:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(asyncio.wait_for(until_reported(), 60))
    assert seen[0] == {"steps": 1}


class Recorded:
    """In the place of Ray's counters and gauges: value by name and tag."""

    values: dict[tuple[str, str], float] = {}

    def __init__(self, name: str, text: str, tag_keys: tuple[str, ...] = ()) -> None:
        assert text
        self.name = name

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        assert value > 0, "Ray refuses anything else"
        key = self.name, *(tags or {"": ""}).values()
        self.values[key] = self.values.get(key, 0.0) + value

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.values[self.name, *(tags or {"": ""}).values()] = value


def one_report(drafted: int, accepted: int) -> dict[str, Any]:
    return {
        "sources": {"prompt": {"drafted": drafted, "accepted": accepted}},
        "counts": {"steps": 10, "row_steps": 20, "emitted_tokens": 20 + accepted},
        "mode": "auto",
        "price": 0.25,
        "failures": 0,
        "budget_tokens": 3,
        "token_s": 0.001,
        "saved_s": -0.5,
        "regret_bound_s": 1.5,
        "propose_s": 0.125,
    }


def test_totals_become_counters_and_the_rest_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(totals, "Counter", Recorded)
    monkeypatch.setattr(speculation, "Gauge", Recorded)
    monkeypatch.setattr(Recorded, "values", {})
    metrics = RaySpeculationMetrics()
    metrics(one_report(drafted=8, accepted=0))
    metrics(one_report(drafted=12, accepted=5))
    name = "headrace_speculation_"
    assert {key: value for key, value in Recorded.values.items() if value} == {
        (f"{name}drafted_tokens", "prompt"): 12,
        (f"{name}accepted_tokens", "prompt"): 5,
        (f"{name}steps", ""): 10,
        (f"{name}row_steps", ""): 20,
        (f"{name}emitted_tokens", ""): 25,
        (f"{name}propose_seconds", ""): 0.125,
        (f"{name}budget_tokens", ""): 3.0,
        (f"{name}token_seconds", ""): 0.001,
        (f"{name}survival_price", ""): 0.25,
        (f"{name}saved_seconds", ""): -0.5,
        (f"{name}regret_bound_seconds", ""): 1.5,
        (f"{name}mode", "auto"): 1.0,
    }


def test_metrics_read_what_a_proposer_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.test_speculation_session import proposer

    monkeypatch.setattr(totals, "Counter", Recorded)
    monkeypatch.setattr(speculation, "Gauge", Recorded)
    RaySpeculationMetrics()(proposer(mode="static:4").command({}))
    assert Recorded.values["headrace_speculation_mode", "static"] == 1.0
