"""A replica that answers with given bytes, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.gateway.upstream import Reply, Upstream

LIMIT_S = 20.0
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = CHUNKED + b"3\r\nabc\r\n2;why=not\r\nde\r\n0\r\nx-trailer: 1\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\n"

Turn = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Server:
    """A raw server: each connection is led by the next of `turns`, the last one for all others."""

    turns: list[Turn]
    url: str = ""
    connections: int = 0
    gone: int = 0
    heads: list[bytes] = field(default_factory=list)
    tasks: set[Any] = field(default_factory=set)

    async def lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turn = self.turns[min(self.connections, len(self.turns) - 1)]
        self.connections += 1
        self.tasks.add(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await turn(reader, writer)
        self.gone += 1
        writer.close()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        """Read one request; its body."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        _, marked, length = head.lower().partition(b"content-length: ")
        return await reader.readexactly(int(length.split(b"\r\n")[0]) if marked else 0)


@contextlib.asynccontextmanager
async def replica(*turns: Turn | bytes) -> AsyncIterator[tuple[Server, Upstream]]:
    """A raw server and a client; bytes in place of a turn answer each request and stay open."""
    server = Server([])
    server.turns = [always(server, turn) if isinstance(turn, bytes) else turn for turn in turns]
    listener = await asyncio.start_server(server.lead, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    upstream = Upstream()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield server, upstream
    finally:
        await upstream.aclose()
        listener.close()
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)


def always(server: Server, answer: bytes) -> Turn:
    """Answer each request with the same bytes."""

    async def turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await server.request(reader)
            writer.write(answer)

    return turn


def once(answer: bytes, *, abort: bool = False) -> Turn:
    """Answer whatever comes first, then hang up; `abort` resets the connection."""

    async def turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if abort:
            await asyncio.sleep(0.02)  # what was sent would be lost, too
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    return turn


async def whole(reply: Reply) -> bytes:
    """The body."""
    parts = []
    while part := await reply.read_some():
        parts.append(part)
    reply.close()
    return b"".join(parts)


async def asked(upstream: Upstream, server: Server, method: str = "POST") -> bytes:
    """The body of the answer to a request."""
    return await whole(await upstream.send(server.url, method, "/v1/x", [], b""))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)
