"""Spans of OpenTelemetry. They are made only if the process has configured an OpenTelemetry SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.gateway.errors import Headers

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from headrace.gateway.relay.call import Call


def tracing_is_configured() -> bool:
    """Return whether this process has a tracer provider of the SDK."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        return False
    return isinstance(trace.get_tracer_provider(), TracerProvider)


def start_span(call: Call, path: str) -> Span:
    """Start a server span under the client's context, and put it into the call's headers."""
    from opentelemetry import propagate, trace

    carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in call.headers}
    parent = propagate.extract(carrier)
    attributes = {
        "http.request.method": call.method,
        "http.route": path,
        "headrace.request_id": call.request_id.decode(),
    }
    span = trace.get_tracer("headrace.gateway").start_span(
        f"{call.method} {path}",
        context=parent,
        kind=trace.SpanKind.SERVER,
        attributes=attributes,
        record_exception=False,
    )
    injected: dict[str, str] = {}
    propagate.inject(injected, context=trace.set_span_in_context(span, parent))
    new: Headers = [(name.lower().encode(), value.encode()) for name, value in injected.items()]
    names = {name for name, _ in new}
    call.headers = [head for head in call.headers if head[0] not in names] + new
    return span


def end_span(span: Span, call: Call) -> None:
    """End the span with the call's result as its attributes."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("http.response.status_code", call.status)
    span.set_attribute("headrace.replica", call.replica_id)
    span.set_attribute("headrace.response_bytes", call.sent_bytes)
    if call.ttft_s is not None:
        span.set_attribute("headrace.ttft_s", call.ttft_s)
    if call.status >= 500:
        span.set_status(Status(StatusCode.ERROR))
    span.end()
