"""Inserts the lines of `said` into a replica's streams, and reads those of a resumed request.

ASGI, around vLLM's application. It acts only on requests with the header `HEADER`, and on their
answers that are event streams.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from headrace_decode.rests import PIECE_BYTES, then_rest
from headrace_decode.resume.said import END, HEADER, MAX_BYTES, Output, line, read

Message = MutableMapping[str, Any]
ASGIApp = Callable[[Message, Any, Any], Awaitable[None]]


class Recorder:
    """The lines of one request: the ones to resume from, and the ones to send.

    Attributes:
        again: outputs of the lost replica's engine.
        has_told: whether an output was added.
    """

    def __init__(self) -> None:
        self.again: list[Output] = []
        self.has_told = False
        self._began = False
        self._lines: list[bytes] = []
        self._silent = False

    def begin(self, why_not: str | None) -> list[Output]:
        """Return the earlier outputs of a request that the engine gets now.

        Args:
            why_not: why another replica cannot resume the stream; None if it can.
        """
        if self._began:
            why_not = "one request asks the engine several times"
        self._began = True
        if why_not is not None:
            self.stop(why_not)
        return self.again

    def stop(self, why: str) -> None:
        """Send the reason why the stream cannot be resumed, and no more lines."""
        if not self._silent:
            self._lines.append(line(why))
            self._silent = True

    def add(self, output: Output) -> None:
        """Record an output of the engine that the serving layer gets now."""
        self.has_told = True
        if not self._silent:
            self._lines.append(line(output))

    def take(self) -> bytes:
        """Return the lines that were added since the last call."""
        if not self._lines:
            return b""
        lines = b"".join(self._lines)
        self._lines.clear()
        return lines


RECORDER: ContextVar[Recorder | None] = ContextVar("headrace_recorder", default=None)
"""Recorder of the request that this task answers; None if the request does not ask for lines."""


class Recorded:
    """ASGI application that gives each request with `HEADER` a `Recorder` and sends its lines."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Answer one request."""
        size = size_told(scope, HEADER)
        if size is None:
            await self._app(scope, receive, send)
            return
        recorder = Recorder()
        if size > MAX_BYTES:
            await _refuse(send, f"{HEADER.decode()}: must be 0 to {MAX_BYTES}")
            return
        if size:
            try:
                lines, receive = await split(receive, size)
                recorder.again = await _outputs(lines)
            except ValueError as error:
                await _refuse(send, f"{HEADER.decode()}: {error}")
                return
            scope = {**scope, "headers": shorter(scope["headers"], size)}
        before = RECORDER.set(recorder)
        try:
            await self._app(scope, receive, _with_lines(send, recorder))
        finally:
            RECORDER.reset(before)


async def _outputs(lines: bytes) -> list[Output]:
    """Run `read` in pieces with rests between them, since many lines take long."""
    outputs: list[Output] = []
    start = 0
    while start < len(lines):
        cut = lines.find(END, start + PIECE_BYTES)
        end = len(lines) if cut < 0 else cut + len(END)
        outputs += await then_rest(read, lines[start:end])
        start = end
    return outputs


def _with_lines(send: Any, recorder: Recorder) -> Callable[[Message], Awaitable[None]]:
    streams = False

    async def sending(message: Message) -> None:
        nonlocal streams
        if message["type"] == "http.response.start":
            streams = any(
                name == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message["headers"]
            )
            if streams:
                message["headers"] = [*message["headers"], (HEADER, b"1")]
        elif streams and (body := message.get("body")):
            message["body"] = recorder.take() + body
        await send(message)

    return sending


def size_told(scope: Message, header: bytes) -> int | None:
    """Return the number of body bytes that a request's header names.

    Returns:
        The number; None without the header; `sys.maxsize` if the value is not a number of bytes.
    """
    if scope["type"] != "http":
        return None
    told = next((value for name, value in scope["headers"] if name == header), None)
    if told is None:
        return None
    return int(told) if told.isdigit() and len(told) < 10 else sys.maxsize


async def split(receive: Any, size: int) -> tuple[bytes, Any]:
    """Return the first `size` bytes of a body, and a `receive` that gives the rest.

    Raises:
        ValueError: the body is shorter, or the client left.
    """
    parts, have, more = [], 0, True
    while have < size and more:
        message = await receive()
        if message["type"] != "http.request":
            raise ValueError("the client left")
        parts.append(message.get("body", b""))
        have += len(parts[-1])
        more = message.get("more_body", False)
    whole = b"".join(parts)
    if have < size:
        raise ValueError(f"the body has {have} bytes, not {size}")
    rest: Message | None = {"type": "http.request", "body": whole[size:], "more_body": more}

    async def receiving() -> Any:
        nonlocal rest
        if rest is not None:
            message, rest = rest, None
            return message
        return await receive()

    return whole[:size], receiving


def shorter(headers: Any, size: int) -> list[tuple[bytes, bytes]]:
    """Return the headers with a content length reduced by `size`."""
    return [
        (name, b"%d" % (int(value) - size) if name == b"content-length" else value)
        for name, value in headers
    ]


async def _refuse(send: Any, why: str) -> None:
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": why.encode()})
