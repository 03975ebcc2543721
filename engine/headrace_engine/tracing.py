"""Spans for moving KV, children of the request's span wherever the request came with one.

vLLM hands trace headers down only when its own tracing is on (`otlp_traces_endpoint`), so without
an exporter this costs one comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
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


def record(
    name: str,
    headers: Mapping[str, str] | None,
    seconds: float,
    attributes: Callable[[], Mapping[str, str | int | float]],
) -> None:
    """Record a span that ends now and began `seconds` ago. `attributes` is called only for a
    request that is traced."""
    if not headers:
        return
    from opentelemetry import propagate, trace

    now_ns = time.time_ns()
    trace.get_tracer("headrace").start_span(
        name,
        context=propagate.extract(dict(headers)),
        start_time=now_ns - int(1e9 * seconds),
        attributes=dict(attributes()),
    ).end(now_ns)
