"""A small HTTP/1.1 server for engines that are emulated: one write a token, nothing else.

A web framework would take more of this machine's two cores than the routers that are measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, cast

import httptools

_CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_LAST_CHUNK = b"0\r\n\r\n"
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found"}

Handler = Callable[["Exchange"], None]


def chunk(event: bytes) -> bytes:
    """Return an event as a chunk of HTTP/1.1's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(event), event)


class Exchange(asyncio.Protocol):
    """One connection: its present request, and the answer to it.

    Attributes:
        method, path, headers, body: of the request; header names are lower case.
        on_lost: called if the client leaves before the answer's end.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._parts: list[bytes] = []
        self._url = b""
        self.method = self.path = ""
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.on_lost: Callable[[], None] | None = None

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of a client that has connected."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if error.__context__ is not None:  # ours, not the client's
                print(f"a request failed: {error!r}, {error.__context__!r}", file=sys.stderr)
            if self._transport is not None:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle a client's disconnection."""
        self._transport = None
        lost, self.on_lost = self.on_lost, None
        if lost is not None:
            lost()

    # httptools

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._parts, self._url, self.headers = [], b"", {}

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one of the request's headers."""
        self.headers[name.lower()] = value
        if name.lower() == b"expect" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, part: bytes) -> None:
        """Take a part of the request's body."""
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """Handle the complete request."""
        self.method = self._parser.get_method().decode()
        self.path = self._url.split(b"?", 1)[0].decode("latin-1")
        self.body = b"".join(self._parts)
        self._parts = []
        self._handler(self)

    # Answers

    def write(self, data: bytes) -> None:
        """Send bytes, if the client is still there."""
        if self._transport is not None:
            self._transport.write(data)

    def stream(self) -> None:
        """Begin an event stream; `write` its events as `chunk`s."""
        self.write(_CHUNKED)

    def finish(self) -> None:
        """End an event stream."""
        self.on_lost = None
        self.write(_LAST_CHUNK)

    def close(self) -> None:
        """Break off."""
        self.on_lost = None
        if self._transport is not None:
            self._transport.close()

    def json(self, told: Any, status: int = 200) -> None:
        """Answer with a document."""
        self.on_lost = None
        body = json.dumps(told, separators=(",", ":")).encode()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.write(head % (status, _REASONS[status], len(body)) + body)


async def serve(handler: Handler) -> tuple[asyncio.Server, int]:
    """Listen on this machine, and the port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Exchange(handler), "127.0.0.1", 0, backlog=2048)
    return server, int(server.sockets[0].getsockname()[1])
