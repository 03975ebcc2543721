"""Spans that are made after the fact."""

from __future__ import annotations

import pytest

from headrace_engine.tracing import record


def test_a_request_that_is_not_traced_costs_no_attributes() -> None:
    record("plan", None, 1.0, lambda: pytest.fail("nobody asked"))


def test_a_span_began_so_long_ago_under_the_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter, provider = memory.InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    record("plan", headers, 2.5, lambda: {"headrace.plan.kind": "local"})
    [span] = exporter.get_finished_spans()
    assert span.name == "plan" and span.attributes["headrace.plan.kind"] == "local"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.end_time - span.start_time == 2_500_000_000
