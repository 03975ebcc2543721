"""Sends an answer: an early one is the last of its connection, and HTTP/1.0 gets no chunks.

An answer is early if it begins before the request's end. `connection` says why it is the last.
"""

from __future__ import annotations

from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.gateway.asgi import Message

_WITHOUT_BODY = frozenset({204, 304})


class ResponseSender:
    """The sender of the answer to one request.

    Args:
        cycle: uvicorn's side of the request.
        linger: ends the connection after an early answer; see `Connection.linger`.
    """

    def __init__(self, cycle: RequestResponseCycle, linger: Callable[[], None]) -> None:
        self._cycle, self._linger = cycle, linger
        self._is_early = False
        self._ends_by_closing = False

    async def send(self, message: Message) -> None:
        """Send an ASGI message."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            message = self._start(message)
        elif self._ends_by_closing:
            cycle.expected_content_length = len(message.get("body", b""))
        more = message["type"] == "http.response.start" or message.get("more_body", False)
        if more or not self._is_early or not cycle.more_body:
            await cycle.send(message)  # type: ignore[arg-type]
            return
        cycle.keep_alive = True  # uvicorn would close at once
        await cycle.send(message)  # type: ignore[arg-type]
        self._linger()

    def _start(self, message: Message) -> Message:
        """Return the head of the answer with the framing and the `connection` that the request asks
        for."""
        cycle = self._cycle
        headers = list(message.get("headers", ()))
        names = {name.lower() for name, _ in headers}
        if cycle.more_body:
            self._is_early = True
            if b"connection" not in names:
                headers.append((b"connection", b"close"))
        if (
            cycle.scope["http_version"] == "1.0"
            and b"content-length" not in names
            and cycle.scope["method"] != "HEAD"
            and message["status"] not in _WITHOUT_BODY
        ):
            self._ends_by_closing = True
            cycle.chunked_encoding = False
        return {**message, "headers": headers}
