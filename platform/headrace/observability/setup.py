"""Sets up logging (`headrace_engine.reporting.logs`) and tracing once in each process of the app.

Every line of a request carries `request_id`. Spans are made only when an OTLP endpoint is
configured.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_engine.reporting import logs


@dataclass(frozen=True)
class ProcessSetup:
    """Callable bound into each deployment: `setup(role)` prepares the replica's process."""

    log_level: str = "INFO"
    log_json: bool = True
    otlp_endpoint: str | None = None

    def __call__(self, role: str) -> None:
        logs.set_up(role, self.log_level, self.log_json)
        if self.otlp_endpoint:
            self._tracing(role, self.otlp_endpoint)

    def _tracing(self, role: str, endpoint: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": f"headrace-{role}"}))
        url = endpoint.rstrip("/") + "/v1/traces"
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        trace.set_tracer_provider(provider)
