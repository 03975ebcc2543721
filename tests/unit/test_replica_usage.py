"""A replica's usage on its way out: metrics, one request's part, the last report."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from headrace_decode.apis.middleware import usage_header
from headrace_decode.http.internal_port import REQUEST_ID, TENANT
from headrace_engine.usage import replica_usage
from headrace_engine.usage.replica_usage import ReplicaUsage, UsageExports
from headrace_engine.usage.request_usage import RequestUsage
from headrace_engine.usage.scheduler_usage import UsageUpdate
from headrace_engine.usage.usage_book import UsageBook


def reporting() -> UsageBook:
    book = UsageBook()
    book.add(UsageUpdate({"before": RequestUsage(computed_tokens=9).values()}, [], 0.0))
    return book


def ended(name: str, tenant: str = "shop", **quantities: int) -> UsageUpdate:
    values = RequestUsage(**quantities).values()
    return UsageUpdate({tenant: values}, [(name, tenant, values)], 0.0)


class Exports:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[dict[str, Any]] = []
        self.exported = asyncio.Event()

    def __call__(self, model: str, totals: Mapping[str, RequestUsage]) -> None:
        self.metrics.append((model, {name: each.to_dict() for name, each in totals.items()}))
        self.exported.set()

    async def send(self, report: dict[str, Any]) -> None:
        self.sent.append(report)

    @property
    def exports(self) -> UsageExports:
        return UsageExports(lambda: self, self.send)


async def test_what_the_engine_did_before_the_replica_serves_is_no_usage() -> None:
    usage = ReplicaUsage(reporting(), "m", "d", None)
    assert usage.report()["tenants"] == {}
    await usage.close()


async def test_totals_become_metrics_and_go_out_once_more_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_usage, "EXPORT_S", 0.01)
    book, exports = reporting(), Exports()
    usage = ReplicaUsage(book, "m", "d", exports.exports)
    book.add(ended("a", computed_tokens=5))
    async with asyncio.timeout(30):
        await exports.exported.wait()
    assert exports.metrics[0] == ("m", {"shop": {"computed_tokens": 5}})
    await usage.close()
    [report] = exports.sent
    assert (report["replica_id"], report["model"]) == ("d", "m")
    assert report["tenants"] == {"shop": {"computed_tokens": 5}}


async def test_a_replica_stops_also_if_no_gateway_takes_its_last_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_usage, "LAST_REPORT_S", 0.01)

    async def never(report: dict[str, Any]) -> None:
        await asyncio.sleep(3600)

    book = reporting()
    usage = ReplicaUsage(book, "m", "d", UsageExports(Exports, never))
    book.add(ended("a", computed_tokens=5))
    await usage.close()
    assert "was not reported" in caplog.text


async def test_a_requests_part_names_replica_model_and_tenant() -> None:
    book = reporting()
    usage = ReplicaUsage(book, "m", "d", None)
    record = book.record_of("shop", "r")
    book.follow("e", record)
    [part] = usage.of_request("r", "shop")
    assert not part["complete"]
    book.add(ended("e", computed_tokens=5))
    assert usage.of_request("r", None) == [
        {
            **{"replica_id": "d", "model": "m", "tenant": "shop", "complete": True},
            "usage": {"computed_tokens": 5},
        }
    ]
    assert usage.of_request("r", "bank") == []


async def test_a_whole_answer_says_what_it_cost_unless_that_is_not_known() -> None:
    book = reporting()
    assert await usage_header(book) == [], "a request of the replica's own"
    id_before, tenant_before = REQUEST_ID.set("r"), TENANT.set("shop")
    try:
        assert await usage_header(book) == []
        book.follow("e", book.record_of("shop", "r"))
        book.add(ended("e", prompt_tokens=5))
        [(name, value)] = await usage_header(book)
        assert name == b"x-headrace-usage" and value.startswith(b"prompt_tokens=5")
    finally:
        REQUEST_ID.reset(id_before)
        TENANT.reset(tenant_before)
