"""The web console over recorded documents: a server for tests and pictures of it, without an app.

    python -m tests.support.console_page          # serves each state until interrupted

`tests/data/console/STATE.json` has the documents that a gateway would answer with, the traffic from
which a history is made, and `growth_per_s`: counters of the status that grow, so that rates show.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headrace.console.files import find
from headrace.observability.health import assess

DATA = Path(__file__).resolve().parents[1] / "data" / "console"
RECORDED = ("loaded", "empty", "degraded")
STATES = (*RECORDED, "loading", "no-answer", "key")
"""`loading`: the gateway has not answered yet. `no-answer`: it hangs up. `key`: it asks for one."""
KEY = "operators-key"
ANSWER = "A prompt's KV is computed once and used again by every later prompt that begins alike."


def recorded(state: str) -> dict[str, Any]:
    """Return the documents of a state.

    A file may instead name a `base`, and `changes` to it: the path of a value and its new value, or
    a path alone for a value that is removed.
    """
    found: dict[str, Any] = json.loads((DATA / f"{state}.json").read_text())
    if "base" not in found:
        return found
    documents = recorded(found["base"])
    for path, *value in found["changes"]:
        at: Any = documents
        *way, last = (int(part) if part.isdigit() else part for part in path.split("/"))
        for part in way:
            at = at[part]
        if not value:
            del at[last]
        elif isinstance(at, list) and last == len(at):
            at.append(value[0])
        else:
            at[last] = value[0]
    return documents


class ConsolePage:
    """A server of the console. `state` may be changed while it runs.

    Attributes:
        state: one of `STATES`.
        puts: the changes of settings that came: path and body.
    """

    def __init__(self, state: str) -> None:
        self.state = state
        self.puts: list[tuple[str, dict[str, Any]]] = []
        self.documents = {name: recorded(name) for name in RECORDED}
        self._started_s = time.monotonic()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.closed = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()

    def document(self, path: str) -> tuple[int, Any]:
        """Return the status and the body of a GET."""
        recorded = self.documents[self.state if self.state in RECORDED else "loaded"]
        if path == "/headrace/v1/console":
            last = history(0.0, recorded["traffic"])["last"]
            health = assess(recorded["console"], last)
            return 200, {"health": asdict(health), **self._grown(recorded)}
        if path == "/headrace/v1/requests":
            return 200, recorded["requests"]
        if path == "/headrace/v1/usage":
            return 200, recorded["usage"]
        if path == "/headrace/v1/history":
            return 200, history(recorded["requests"]["now"], recorded["traffic"])
        if path == "/version":
            return 200, {"version": "0.1.0"}
        plan = recorded["plan"]
        if path.startswith("/headrace/v1/plans/") and plan:
            name = path.rsplit("/", 1)[1]
            if name.startswith(("req-", "chat-")):
                return 200, {**plan, "request_id": name}
        return 404, error(f"There is no {path}.")

    def _grown(self, recorded: dict[str, Any]) -> dict[str, Any]:
        status: dict[str, Any] = copy.deepcopy(recorded["console"])
        seconds = time.monotonic() - self._started_s
        for place, per_second in recorded["growth_per_s"].items():
            *parents, last = place.split(".")
            part: Any = status
            try:
                for name in parents:
                    part = part[int(name) if isinstance(part, list) else name]
            except (IndexError, KeyError):
                continue
            part[last] = part.get(last, 0) + int(per_second * seconds)
        return status

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        page = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if (file := find(path)) is not None:
                    self._send(200, file.body, {k.decode(): v.decode() for k, v in file.headers})
                elif not self._refused():
                    status, document = page.document(path)
                    self._json(status, document)

            def do_PUT(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                page.puts.append((self.path, body))
                self._json(200, {**body, "replicas": 2})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                pieces = [{"choices": [{"delta": {"content": f"{w} "}}]} for w in ANSWER.split()]
                usage = {"completion_tokens": len(pieces), "prompt_tokens": 31}
                events = [*map(json.dumps, pieces), json.dumps({"usage": usage}), "[DONE]"]
                body = "".join(f"data: {event}\n\n" for event in events).encode()
                self._send(
                    *(200, body),
                    {"content-type": "text/event-stream", "x-request-id": "chat-000001"},
                )

            def _refused(self) -> bool:
                if page.state == "no-answer":
                    self.close_connection = True
                    return True
                if page.state == "loading":
                    page.closed.wait(60)
                    return True
                if page.state == "key" and self.headers["authorization"] != f"Bearer {KEY}":
                    self._json(401, error("This takes an API key: Authorization: Bearer KEY."))
                    return True
                return False

            def _json(self, status: int, document: Any) -> None:
                body = json.dumps(document).encode()
                self._send(status, body, {"content-type": "application/json"})

            def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the page was left
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@contextmanager
def console_page(state: str) -> Iterator[ConsolePage]:
    """Serve the console in a state."""
    page = ConsolePage(state)
    page.start()
    try:
        yield page
    finally:
        page.close()


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": None}}


def history(now_s: float, traffic: dict[str, Any]) -> dict[str, Any]:
    """Return the document of `/headrace/v1/history` for a traffic that swells and ebbs."""
    error_rate = traffic.get("error_rate", 0.004)
    has_requests = traffic["requests_per_s"] > 0
    last = {
        "seconds": 60,
        "requests_per_s": traffic["requests_per_s"],
        "tokens_per_s": traffic["tokens_per_s"],
        "error_rate": error_rate if has_requests else None,
        "ttft_p50_s": 0.183 if has_requests else None,
        "ttft_p99_s": 0.642 if has_requests else None,
        "tpot_p50_s": 0.0162 if has_requests else None,
        "tpot_p99_s": 0.0231 if has_requests else None,
    }
    series = [_series(now_s, traffic, error_rate, step, n) for step, n in ((10, 360), (300, 288))]
    started_s = now_s - traffic["uptime_s"]
    return {"started_at": started_s, "now": now_s, "last": last, "series": series}


def _series(
    now_s: float, traffic: dict[str, Any], error_rate: float, step_s: int, steps: int
) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            *("at", "requests", "errors", "tokens"),
            *("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"),
        )
    }
    steps = min(steps, max(1, int(traffic["uptime_s"] // step_s)))
    for n in range(steps):
        at = now_s - (steps - n) * step_s
        swell = 1 + 0.4 * math.sin(at / 200) + 0.25 * math.sin(at / 37) + 0.1 * math.sin(at / 7)
        requests = round(max(0.0, traffic["requests_per_s"] * swell) * step_s)
        known = requests > 0
        columns["at"].append(at)
        columns["requests"].append(requests)
        columns["errors"].append(round(requests * error_rate * (1.5 if n % 7 == 3 else 0.5)))
        columns["tokens"].append(round(max(0.0, traffic["tokens_per_s"] * swell) * step_s))
        for name, base in (("ttft_p50_s", 0.15), ("ttft_p99_s", 0.5)):
            columns[name].append(round(base * (0.6 + 0.4 * swell), 4) if known else None)
        for name, base in (("tpot_p50_s", 0.016), ("tpot_p99_s", 0.022)):
            columns[name].append(round(base * (0.9 + 0.1 * swell), 5) if known else None)
    return {"step_s": step_s, **columns}


if __name__ == "__main__":
    pages = [ConsolePage(state) for state in STATES]
    for page in pages:
        page.start()
        print(f"{page.state}: {page.url}/console")
    threading.Event().wait()
