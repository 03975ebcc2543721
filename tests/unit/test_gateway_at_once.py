"""Pieces of a stream that are written to the client from outside a task, by the real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import h11

from headrace.gateway import serve_gateway
from headrace.gateway.asgi import Send, Write, write_nowait

LIMIT_S = 20.0
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


def test_a_server_without_the_extension_writes_nothing() -> None:
    assert not write_nowait({"type": "http"})(b"a")
    assert not write_nowait({"type": "http", "extensions": {"http.response.push": {}}})(b"a")


@contextlib.asynccontextmanager
async def client(
    answer: Callable[[Write, Send], Any],
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server whose app answers so."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await answer(write_nowait(scope), send)

    server = await serve_gateway(app, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield reader, writer
    finally:
        writer.close()
        await server.stop(0.1)


async def start(send: Send, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": list(headers)})


async def end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b""})


async def bodies(reader: asyncio.StreamReader, count: int) -> list[bytes]:
    """The bodies of so many answers, as another library reads them."""
    found = []
    line = h11.Connection(h11.CLIENT)
    while len(found) < count:
        line.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
        line.send(h11.EndOfMessage())
        body = b""
        while True:
            event = line.next_event()
            if event is h11.NEED_DATA:
                line.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
        found.append(body)
        line.start_next_cycle()
    return found


async def test_pieces_written_at_once_stand_between_those_that_are_sent() -> None:
    async def answer(write: Write, send: Send) -> None:
        assert not write(b"before the head")
        await start(send)
        assert write(b"one ")
        await send({"type": "http.response.body", "body": b"two ", "more_body": True})
        assert write(b"three")
        await end(send)
        assert not write(b"behind the end")

    async with client(answer) as (reader, writer):
        writer.write(GET)
        assert await bodies(reader, 1) == [b"one two three"]


async def test_a_body_of_stated_length_is_not_written_so() -> None:
    async def answer(write: Write, send: Send) -> None:
        await start(send, (b"content-length", b"2"))
        assert not write(b"hi")
        await send({"type": "http.response.body", "body": b"hi"})

    async with client(answer) as (reader, writer):
        writer.write(GET)
        assert await bodies(reader, 1) == [b"hi"]


async def test_a_second_request_on_the_connection_waits_for_the_end_of_the_first() -> None:
    written = []

    async def answer(write: Write, send: Send) -> None:
        await start(send)
        await asyncio.sleep(0.05)  # the second request is here
        for number in b"123":
            written.append(write(b"%c" % number))
            if not written[-1]:
                body = b"%c" % number
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await end(send)

    async with client(answer) as (reader, writer):
        writer.write(GET + GET)
        assert await bodies(reader, 2) == [b"123", b"123"]
        assert written == [False] * 3 + [True] * 3


async def test_a_client_that_does_not_read_gets_nothing_until_it_does() -> None:
    piece = b"x" * (1 << 16)
    taken = 0

    async def answer(write: Write, send: Send) -> None:
        nonlocal taken
        await start(send)
        while write(piece):
            taken += 1
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"end", "more_body": True})
        await end(send)

    async with client(answer) as (reader, writer):
        writer.write(GET)
        await asyncio.sleep(0.3)
        [body] = await bodies(reader, 1)
        assert body == piece * taken + b"end"
