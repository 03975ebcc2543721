"""Inserts the lines of `emitted` into a replica's streams, and reads those of a resumed request.

ASGI, around vLLM's application. It acts only on requests with the header `HEADER`, and on their
answers that are event streams.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

from headrace_decode.http.event_loop import PIECE_BYTES, run_then_rest
from headrace_decode.resume.emitted import (
    END,
    HEADER,
    MAX_LINES_BYTES,
    EmittedOutput,
    decode_lines,
    encode_line,
)

Message = MutableMapping[str, Any]
ASGIApp = Callable[[Message, Any, Any], Awaitable[None]]


class OutputRecorder:
    """The lines of one request: the ones to resume from, and the ones to send.

    Attributes:
        earlier: outputs of the lost replica's engine.
        has_output: whether an output was added.
        adapter: digest of the content of the request's LoRA adapter; empty without one.
    """

    def __init__(self) -> None:
        self.earlier: list[EmittedOutput] = []
        self.has_output = False
        self.adapter = ""
        self._has_begun = False
        self._lines: list[bytes] = []
        self._is_stopped = False

    def begin(self, why_not: str | None) -> list[EmittedOutput]:
        """Return the earlier outputs of a request that the engine gets now.

        Args:
            why_not: why another replica cannot resume the stream; None if it can.
        """
        if self._has_begun:
            why_not = "one request has several prompts"
        self._has_begun = True
        if why_not is not None:
            self.stop(why_not)
        return self.earlier

    def stop(self, why: str) -> None:
        """Send the reason why the stream cannot be resumed, and no more lines."""
        if not self._is_stopped:
            self._lines.append(encode_line(why))
            self._is_stopped = True

    def add(self, output: EmittedOutput) -> None:
        """Record an output of the engine that the serving layer gets now."""
        self.has_output = True
        if not self._is_stopped:
            self._lines.append(encode_line(output))

    def take(self) -> bytes:
        """Return the lines that were added since the last call."""
        if not self._lines:
            return b""
        lines = b"".join(self._lines)
        self._lines.clear()
        return lines


RECORDER: ContextVar[OutputRecorder | None] = ContextVar("headrace_recorder", default=None)
"""Recorder of the request that this task answers; None if the request does not ask for lines."""


class RecordingMiddleware:
    """ASGI application that gives requests with `HEADER` a recorder and sends its lines."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        """Answer one request."""
        size = prefix_bytes_of(scope, HEADER)
        if size is None:
            await self._app(scope, receive, send)
            return
        recorder = OutputRecorder()
        if size > MAX_LINES_BYTES:
            await _refuse(send, f"{HEADER.decode()}: must be 0 to {MAX_LINES_BYTES}")
            return
        if size:
            try:
                lines, receive = await split_body(receive, size)
                recorder.earlier = await _outputs(lines)
            except ValueError as error:
                await _refuse(send, f"{HEADER.decode()}: {error}")
                return
            scope = {**scope, "headers": with_shorter_body(scope["headers"], size)}
        before = RECORDER.set(recorder)
        try:
            await self._app(scope, receive, _with_lines(send, recorder))
        finally:
            RECORDER.reset(before)


async def _outputs(lines: bytes) -> list[EmittedOutput]:
    """Run `decode_lines` in pieces with rests between them, since many lines take long."""
    outputs: list[EmittedOutput] = []
    start = 0
    while start < len(lines):
        cut = lines.find(END, start + PIECE_BYTES)
        end = len(lines) if cut < 0 else cut + len(END)
        outputs += await run_then_rest(decode_lines, lines[start:end])
        start = end
    return outputs


def _with_lines(send: Any, recorder: OutputRecorder) -> Callable[[Message], Awaitable[None]]:
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


def prefix_bytes_of(scope: Message, header: bytes) -> int | None:
    """Return the number of body bytes that a request's header names.

    Returns:
        The number; None without the header; `sys.maxsize` if the value is not a number of bytes.
    """
    if scope["type"] != "http":
        return None
    size = next((value for name, value in scope["headers"] if name == header), None)
    if size is None:
        return None
    return int(size) if size.isdigit() and len(size) < 10 else sys.maxsize


async def split_body(receive: Any, size: int) -> tuple[bytes, Any]:
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


def with_shorter_body(headers: Any, size: int) -> list[tuple[bytes, bytes]]:
    """Return the headers with a content length reduced by `size`."""
    return [
        (name, b"%d" % (int(value) - size) if name == b"content-length" else value)
        for name, value in headers
    ]


async def _refuse(send: Any, why: str) -> None:
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": why.encode()})
