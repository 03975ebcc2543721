"""Resumes streams for clients that reach replicas without a gateway.

On the token path `direct` a proxy passes bytes between clients and replicas. When a replica dies or
is stopped, its streams break. A client that kept its stream (`headrace.resume`) then sends the same
request again, with the stream so far before the body and its size in the header `RESUME`. The proxy
gives the request to any replica. The replica reads the stream so far as a gateway would, passes its
outputs through the serving layer again, and sends the events that follow. `docs/replay.md`
describes the client's side.

ASGI, around vLLM's application. It acts only on requests with the header `RESUME`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headrace_decode.resume.journal import EVENTS, Diverged, Events, Journal
from headrace_decode.resume.recorder import ASGIApp, Message, Recorded, shorter, size_told, split
from headrace_decode.resume.said import END, HEADER, MAX_BYTES, RESUME

MAX_HAD_BYTES = 2 * MAX_BYTES
"""Maximum size of the stream that a client sends back, with lines and events."""


class Resumed:
    """ASGI application that resumes streams without a gateway.

    Args:
        app: the replica's application.
        apis: path -> API (`headrace_decode.routes`); a path without an entry has OpenAI's.
        engine_died: returns whether the replica's engine died. If it did, an error event is not
            sent as part of the answer: the stream breaks, and another replica can resume it.
    """

    def __init__(
        self, app: ASGIApp, apis: Mapping[str, str], engine_died: Callable[[], bool]
    ) -> None:
        self._app, self._recorded = app, Recorded(app)
        self._apis, self._engine_died = apis, engine_died

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Answer one request."""
        size = size_told(scope, RESUME)
        if size is None:
            await self._app(scope, receive, send)
            return
        events = EVENTS.get(self._apis.get(scope["path"], ""), EVENTS["openai"])
        journal = Journal(events, tells=True)
        if size > MAX_HAD_BYTES:
            why = f"{RESUME.decode()}: must be a number of bytes, 0 to {MAX_HAD_BYTES}"
            await _refuse(send, 400, why, "invalid_value")
            return
        lines = b""
        if size:
            try:
                had, receive = await split(receive, size)
            except ValueError as error:
                await _refuse(send, 400, f"{RESUME.decode()}: {error}", "invalid_value")
                return
            await journal.read(had)
            if journal.why_not is not None:
                why = f"This stream cannot be resumed: {journal.why_not}. Send a new request."
                await _refuse(send, 409, why, "cannot_resume")
                return
            lines = journal.take_up()
        headers = [
            *(head for head in shorter(scope["headers"], size - len(lines)) if head[0] != HEADER),
            (HEADER, b"%d" % len(lines)),
        ]
        stream = _Stream(journal, events, send, self._engine_died)
        await self._recorded({**scope, "headers": headers}, _before(lines, receive), stream.send)


class _Stream:
    """An answer to the client, without the events that the client already has."""

    def __init__(
        self, journal: Journal, events: Events, send: Any, engine_died: Callable[[], bool]
    ) -> None:
        self._journal, self._events, self._send = journal, events, send
        self._engine_died = engine_died
        self._streams = self._over = False

    async def send(self, message: Message) -> None:
        """Send an ASGI message."""
        if self._over:
            return
        if message["type"] == "http.response.start":
            headers = [head for head in message["headers"] if head[0] != HEADER]
            self._streams = len(headers) < len(message["headers"])
            if self._streams:
                headers.append((RESUME, b"1"))
            message = {**message, "headers": headers}
        elif self._streams:
            message = self._cut(message)
        await self._send(message)

    def _cut(self, message: Message) -> Message:
        more = message.get("more_body", False)
        try:
            body, failed = self._journal.pass_on(message.get("body", b""))
        except Diverged:
            body, failed, more = self._error(), b"", False
            self._over = True
        if failed and self._engine_died():
            self._over = more = True  # the server closes a connection whose answer has no end
        elif not self._over:
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
