"""A server that stops: what has begun ends, what is on its way is answered, nothing new enters."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.gateway.ingress import connection
from headrace.gateway.ingress.http_server import Server, serve_gateway

REQUEST = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"


class Slow:
    """ASGI: `/slow` answers in two parts, the second when told to; anything else at once."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/slow":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"last"})


@pytest.fixture
async def app(monkeypatch: pytest.MonkeyPatch) -> Slow:
    monkeypatch.setattr(connection, "STOPPING_LINGER_S", 0.5)
    return Slow()


@pytest.fixture
async def server(app: Slow) -> AsyncIterator[Server]:
    made = await serve_gateway(app, "127.0.0.1", 0)
    yield made
    app.go_on.set()
    await made.stop(1)


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    opened = await asyncio.open_connection("127.0.0.1", server.port)
    await asyncio.sleep(0.05)  # accepted
    return opened


async def stopping(server: Server) -> asyncio.Task[None]:
    """The server on its way out; it accepts nothing any more."""
    task = asyncio.create_task(server.stop(10))
    async with asyncio.timeout(5):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            except ConnectionRefusedError:
                return task
            except ConnectionResetError:  # it waited to be accepted
                continue
            writer.close()
            await asyncio.sleep(0.02)


async def whole(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(5):
        return await reader.read()


async def test_a_stream_that_has_begun_goes_on_to_its_end(server: Server, app: Slow) -> None:
    reader, writer = await connect(server)
    writer.write(REQUEST % b"slow")
    await reader.readuntil(b"first")
    done = await stopping(server)
    app.go_on.set()
    assert b"last" in await whole(reader)
    await done


async def test_a_request_on_a_connection_from_before_is_answered_and_is_its_last(
    server: Server,
) -> None:
    reader, writer = await connect(server)
    done = await stopping(server)
    writer.write(REQUEST % b"")
    answer = await whole(reader)
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
    await done


async def test_a_kept_connection_takes_one_more_request(server: Server) -> None:
    reader, writer = await connect(server)
    writer.write(REQUEST % b"")
    await reader.readuntil(b"last")
    done = await stopping(server)
    writer.write(REQUEST % b"")
    assert b"last" in await whole(reader)
    await done


async def test_clients_that_wait_to_be_accepted_are_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[socket.socket] = []
    shutdown = server.uvicorn_server.shutdown

    async def late(sockets: Any = None) -> None:
        for _ in range(20):  # the loop, which is busy here, accepts none of them
            waiting.append(socket.create_connection(("127.0.0.1", server.port)))
            waiting[-1].sendall(REQUEST % b"")
        await shutdown(sockets)

    monkeypatch.setattr(server.uvicorn_server, "shutdown", late)
    await server.stop(5)
    for client in waiting:
        client.settimeout(5)
        with client, client.makefile("rb") as answer:
            assert b"last" in answer.read()


async def test_a_connection_that_stays_idle_does_not_hold_the_server(server: Server) -> None:
    reader, _ = await connect(server)
    done = await stopping(server)
    assert await whole(reader) == b""
    async with asyncio.timeout(5):
        await done


async def test_after_the_grace_what_goes_on_is_cut(server: Server) -> None:
    reader, writer = await connect(server)
    writer.write(REQUEST % b"slow")
    await reader.readuntil(b"first")
    async with asyncio.timeout(5):
        await server.stop(1)
    assert b"last" not in await whole(reader)
