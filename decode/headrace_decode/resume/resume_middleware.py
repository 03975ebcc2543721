"""Resumes streams for clients that reach replicas without a gateway.

On the token path `direct` a proxy passes bytes between clients and replicas. When a replica dies or
is stopped, its streams break. A client that kept its stream (`headrace.client`) then sends the same
request again, with the stream so far before the body and its size in the header `RESUME`. The proxy
gives the request to any replica. The replica reads the stream so far as a gateway would, passes its
outputs through the serving layer again, and sends the events that follow. `docs/resume.md`
describes the client's side.

ASGI, around vLLM's application. It acts only on requests with the header `RESUME`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headrace_decode.resume.emitted import END, HEADER, MAX_LINES_BYTES, RESUME
from headrace_decode.resume.journal import EVENTS, Diverged, Events, Journal
from headrace_decode.resume.recorder import (
    ASGIApp,
    Message,
    RecordingMiddleware,
    prefix_bytes_of,
    split_body,
    with_shorter_body,
)

MAX_RECEIVED_BYTES = 2 * MAX_LINES_BYTES
"""Maximum size of the stream that a client sends back, with lines and events."""


class ResumeMiddleware:
    """ASGI application that resumes streams without a gateway.

    Args:
        app: the replica's application.
        apis: path -> API (`http.public_routes`); a path without an entry has OpenAI's.
        engine_died: returns whether the replica's engine died. If it did, an error event is not
            sent as part of the answer: the stream breaks, and another replica can resume it.
    """

    def __init__(
        self, app: ASGIApp, apis: Mapping[str, str], engine_died: Callable[[], bool]
    ) -> None:
        self._app, self._recording = app, RecordingMiddleware(app)
        self._apis, self._engine_died = apis, engine_died

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Answer one request."""
        size = prefix_bytes_of(scope, RESUME)
        if size is None:
            await self._app(scope, receive, send)
            return
        events = EVENTS.get(self._apis.get(scope["path"], ""), EVENTS["openai"])
        journal = Journal(events, sends_lines=True)
        if size > MAX_RECEIVED_BYTES:
            why = f"{RESUME.decode()}: must be a number of bytes, 0 to {MAX_RECEIVED_BYTES}"
            await _refuse(send, 400, why, "invalid_value")
            return
        lines = b""
        if size:
            try:
                received, receive = await split_body(receive, size)
            except ValueError as error:
                await _refuse(send, 400, f"{RESUME.decode()}: {error}", "invalid_value")
                return
            await journal.read(received)
            if journal.why_not is not None:
                why = f"This stream cannot be resumed: {journal.why_not}. Send a new request."
                await _refuse(send, 409, why, "cannot_resume")
                return
            lines = journal.begin_resume()
        headers = [
            *(
                head
                for head in with_shorter_body(scope["headers"], size - len(lines))
                if head[0] != HEADER
            ),
            (HEADER, b"%d" % len(lines)),
        ]
        stream = _ResumedStream(journal, events, send, self._engine_died)
        await self._recording({**scope, "headers": headers}, _before(lines, receive), stream.send)


class _ResumedStream:
    """An answer to the client, without the events that the client already has."""

    def __init__(
        self, journal: Journal, events: Events, send: Any, engine_died: Callable[[], bool]
    ) -> None:
        self._journal, self._events, self._send = journal, events, send
        self._engine_died = engine_died
        self._is_stream = self._is_over = False

    async def send(self, message: Message) -> None:
        """Send an ASGI message."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            headers = [head for head in message["headers"] if head[0] != HEADER]
            self._is_stream = len(headers) < len(message["headers"])
            if self._is_stream:
                headers.append((RESUME, b"1"))
            message = {**message, "headers": headers}
        elif self._is_stream:
            message = self._without_known_events(message)
        await self._send(message)

    def _without_known_events(self, message: Message) -> Message:
        more = message.get("more_body", False)
        try:
            body, failed = self._journal.pass_on(message.get("body", b""))
        except Diverged:
            body, failed, more = self._error(), b"", False
            self._is_over = True
        if failed and self._engine_died():
            self._is_over = more = True  # the server closes a connection whose answer has no end
        elif not self._is_over:
            body += failed + (b"" if more else self._journal.rest())
        return {**message, "body": body, "more_body": more}

    def _error(self) -> bytes:
        """Return the last event if the replica's answer does not continue the client's stream."""
        error = {
            "message": "The replica was lost, and another one answers differently. "
            "Send the request again.",
            "type": "server_error",
            "param": None,
            "code": "replica_lost",
        }
        named = self._events.failed[0].startswith(b"event: ")
        head, kind = (self._events.failed[0], {"type": "error"}) if named else (b"", {})
        return head + b"data: " + json.dumps({**kind, "error": error}).encode() + END


def _before(lines: bytes, receive: Any) -> Any:
    """Return a `receive` whose body begins with these lines."""
    first = True

    async def receiving() -> Any:
        nonlocal first
        message = await receive()
        if first and message["type"] == "http.request":
            message, first = {**message, "body": lines + message.get("body", b"")}, False
        return message

    return receiving


async def _refuse(send: Any, status: int, why: str, code: str) -> None:
    error = {"message": why, "type": "invalid_request_error", "param": RESUME.decode()}
    body = json.dumps({"error": {**error, "code": code}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
