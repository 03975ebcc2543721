"""Sets up logging and tracing once in each process of the app.

Logs are one JSON object a line on stderr, which Ray collects per process; every line of a request
carries `request_id`. Spans are made only when an OTLP endpoint is configured.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, role, message and whatever `extra` holds."""

    def __init__(self, role: str):
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "role": self._role,
            "message": record.getMessage(),
        }
        line.update({k: v for k, v in vars(record).items() if k not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


@dataclass(frozen=True)
class ProcessSetup:
    """Callable bound into each deployment: `setup(role)` prepares the replica's process."""

    log_level: str = "INFO"
    log_json: bool = True
    otlp_endpoint: str | None = None

    def __call__(self, role: str) -> None:
        self._logging(role)
        if self.otlp_endpoint:
            self._tracing(role, self.otlp_endpoint)

    def _logging(self, role: str) -> None:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            JsonFormatter(role)
            if self.log_json
            else logging.Formatter(f"%(asctime)s %(levelname)s {role} %(name)s: %(message)s")
        )
        root = logging.getLogger("headrace")
        root.handlers = [handler]
        root.setLevel(self.log_level)
        root.propagate = False

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
