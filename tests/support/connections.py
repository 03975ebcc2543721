"""Raw clients of a server at the public port, and small applications for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from headrace.gateway import Server, serve_gateway
from headrace.gateway.ingress.connection import LINGER_BYTES

LIMIT_S = 60.0


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def flood(self, piece: bytes, most_bytes: int = 2 * LINGER_BYTES) -> int:
        """Send a piece again and again until the server hangs up; the bytes sent by then."""
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < most_bytes:
                self.writer.write(piece)
                await self.writer.drain()
                sent += len(piece)
        return sent

    async def rest(self) -> bytes:
        """All that the server sends until it hangs up."""
        found = b""
        with contextlib.suppress(ConnectionError):
            while part := await self.reader.read(65_536):
                found += part
        return found

    async def head(self) -> bytes:
        return (await self.reader.readuntil(b"\r\n\r\n")).lower()

    async def answer(self) -> tuple[bytes, bytes]:
        """The head and body of an answer whose length is told."""
        head = await self.head()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head, await self.reader.readexactly(length)

    async def is_ended(self) -> None:
        """The server has ended the connection: it takes no more bytes."""
        with contextlib.suppress(ConnectionError, RuntimeError):  # uvloop raises the latter
            while True:
                self.writer.write(b"a")
                await self.writer.drain()
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def client_of(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield Client(reader, writer)
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(
    app: Callable[[Any, Any, Any], Awaitable[None]], **options: Any
) -> AsyncIterator[Server]:
    """A server of an ASGI app."""

    async def http_only(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await app(scope, receive, send)

    server = await serve_gateway(http_only, "127.0.0.1", 0, **options)
    try:
        yield server
    finally:
        await server.stop(1)


async def send_all(send: Any, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def read_all(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body, and what was asked for before it."""
    body = scope["path"].encode() + b" " + await read_all(receive)
    await send_all(send, body, (b"content-length", b"%d" % len(body)))


def connections(server: Server) -> set[Any]:
    return server.uvicorn_server.server_state.connections


@contextlib.contextmanager
def unread(port: int, request: bytes) -> Iterator[socket.socket]:
    """A client that asks and never reads."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(LIMIT_S)
        sock.connect(("127.0.0.1", port))
        sock.sendall(request)
        yield sock
