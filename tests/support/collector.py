"""An OpenTelemetry collector that keeps the spans it is sent (OTLP over HTTP)."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class SeenSpan:
    """A span: ids in hex, and the service that made it."""

    trace: str
    span: str
    parent: str
    name: str
    service: str


class Collector:
    """Listens on a free loopback port until closed."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    spans.extend(_spans(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def of_trace(self, trace: str) -> list[SeenSpan]:
        """The spans of one trace so far."""
        return [span for span in list(self.spans) if span.trace == trace]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spans(body: bytes) -> list[SeenSpan]:
    request = ExportTraceServiceRequest.FromString(body)
    found = []
    for resource in request.resource_spans:
        attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
        service = attributes.get("service.name", "")
        for scope in resource.scope_spans:
            found += [
                SeenSpan(
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.name,
                    service,
                )
                for span in scope.spans
            ]
    return found
