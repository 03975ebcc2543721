"""An answer that its client does not read ends in time, with all that it holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from headrace.gateway.asgi import ABORT_EXTENSION
from headrace.gateway.ingress import connection
from tests.support.connections import connections, send_all, serving, unread
from tests.unit.gateway_fakes import soon

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoopPolicy]:
    """Both loops that the gateway runs in: Ray's replicas have uvloop's."""
    yield (
        uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()
    )


async def test_an_answer_that_nobody_reads_ends_the_connection_and_its_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MIN_RATE", 10**9)
    sent = 0

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": b"a" * 10_000, "more_body": True})
            sent += 10_000
        await send({"type": "http.response.body", "body": b""})

    async with serving(endless, send_timeout_s=0.3) as server:
        with unread(server.port, GET):
            await soon(lambda: sent > 0)
            await soon(lambda: not connections(server))
            await soon(lambda: not server.uvicorn_server.server_state.tasks)


@pytest.mark.parametrize("request_", [GET, b"GET / HTTP/1.0\r\n\r\n", GET * 3])
async def test_a_whole_answer_that_nobody_reads_does_not_stay(
    monkeypatch: pytest.MonkeyPatch, request_: bytes
) -> None:
    monkeypatch.setattr(connection, "MIN_RATE", 10**9)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send_all(send, b"a" * 10_000_000, (b"content-length", b"10000000"))

    async with serving(app, send_timeout_s=0.3, keepalive_s=1) as server:
        with unread(server.port, request_):
            await soon(lambda: bool(connections(server)))
            await soon(lambda: not connections(server))


async def test_a_slow_reader_gets_all_of_a_large_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2_000_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send_all(send, b"a" * size, (b"content-length", b"%d" % size))

    async with serving(app, send_timeout_s=0.2) as server:
        with unread(server.port, b"GET / HTTP/1.0\r\n\r\n") as sock:
            got, loop = 0, asyncio.get_running_loop()
            sock.setblocking(False)
            while part := await loop.sock_recv(sock, 100_000):
                got += len(part)
                await asyncio.sleep(0.01)
            assert got > size


async def test_an_app_can_hang_up_on_a_client_that_does_not_read() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                while True:
                    await send(
                        {"type": "http.response.body", "body": b"a" * 10_000, "more_body": True}
                    )
        scope["extensions"][ABORT_EXTENSION]()

    async with serving(app) as server:
        with unread(server.port, GET):
            await soon(lambda: bool(connections(server)))
            await soon(lambda: not connections(server), 5.0)
