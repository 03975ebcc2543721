"""Spans for moving KV, children of the request's span wherever the request came with one.

vLLM hands trace headers down only when its own tracing is on (`otlp_traces_endpoint`), so without
an exporter this costs one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def span(
    name: str, headers: Mapping[str, str] | None, **attributes: str | int | float
) -> Iterator[dict[str, str] | None]:
    """Run a block inside a span; yields the headers that make the next hop its child."""
    if not headers:
        yield None
        return
    from opentelemetry import propagate, trace

    tracer = trace.get_tracer("headrace")
    context = propagate.extract(dict(headers))
    with tracer.start_as_current_span(name, context=context, attributes=attributes):
        onward: dict[str, str] = {}
        propagate.inject(onward)
        yield onward
