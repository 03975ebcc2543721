"""The HTTP client of the relay, against servers that send exactly these bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from headrace.gateway import upstream as module
from headrace.gateway.upstream import Connection, ReplicaLost, Upstream
from tests.unit.gateway_fakes import free_port, soon


@dataclass
class RawServer:
    """Answers each request with the next of `answers`, cut into pieces; None hangs up."""

    answers: list[list[bytes] | None]
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    closed: int = 0
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                pieces = self.answers.pop(0)
                for piece in pieces or []:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if pieces is None or b"connection: close" in pieces[0]:
                    break
        self.closed += 1
        writer.close()


@contextlib.asynccontextmanager
async def serving(*answers: list[bytes] | None) -> AsyncIterator[tuple[RawServer, Upstream]]:
    raw = RawServer(list(answers))
    server = await asyncio.start_server(raw.handle, "127.0.0.1", 0)
    raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    upstream = Upstream(1.0)
    try:
        yield raw, upstream
    finally:
        await upstream.aclose()
        server.close()


async def get(raw: RawServer, upstream: Upstream, method: str = "GET") -> Connection:
    return await upstream.send(raw.url, method, "/x?y", [(b"a", b"b")], b"")


async def whole(reply: Connection) -> bytes:
    parts = [await reply.read_some()]
    while parts[-1]:
        parts.append(await reply.read_some())
    reply.close()
    return b"".join(parts)


LENGTH = [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nX-A: 1\r\n\r\nab", b"cd"]
CHUNKED = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"3\r\nabc\r\n", b"0\r\n\r\n"]


async def test_a_request_is_written_with_host_headers_and_target() -> None:
    async with serving(LENGTH) as (raw, upstream):
        reply = await get(raw, upstream)
        assert reply.status == 200
        assert reply.headers == [(b"content-length", b"4"), (b"x-a", b"1")]
        assert await whole(reply) == b"abcd"
        host = raw.url.removeprefix("http://")
        assert raw.requests == [f"GET /x?y HTTP/1.1\r\nhost: {host}\r\na: b\r\n\r\n".encode()]


async def test_connections_are_reused_after_bodies_of_each_kind() -> None:
    async with serving(LENGTH, CHUNKED, LENGTH) as (raw, upstream):
        for expected in (b"abcd", b"abc", b"abcd"):
            assert await whole(await get(raw, upstream)) == expected
        assert raw.connections == 1


async def test_a_reply_that_is_not_read_to_its_end_breaks_the_connection_off() -> None:
    async with serving(CHUNKED[:2], LENGTH) as (raw, upstream):
        reply = await get(raw, upstream)
        assert await reply.read_some() == b"abc"
        reply.close()
        await soon(lambda: raw.closed == 1)
        assert await whole(await get(raw, upstream)) == b"abcd"
        assert raw.connections == 2


async def test_a_body_without_length_ends_with_the_connection() -> None:
    answer = [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", b"ab", b"cd"]
    async with serving(answer) as (raw, upstream):
        assert await whole(await get(raw, upstream)) == b"abcd"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [b"nonsense\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 9\r\n\r\nab"],
        [b"HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n"],
    ],
)
async def test_an_answer_that_breaks_off_is_a_lost_replica(answer: list[bytes] | None) -> None:
    async with serving(answer) as (raw, upstream):
        with pytest.raises(ReplicaLost) as lost:
            await whole(await get(raw, upstream))
        assert lost.value.sent


async def test_what_came_before_the_break_is_read_first() -> None:
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 9\r\n\r\n"
    async with serving([head + b"abc"]) as (raw, upstream):
        reply = await get(raw, upstream)
        await asyncio.sleep(0.1)
        assert await reply.read_some() == b"abc"
        with pytest.raises(ReplicaLost):
            await reply.read_some()


async def test_a_refused_connection_is_told_apart_as_nothing_was_sent() -> None:
    upstream = Upstream(1.0)
    with pytest.raises(ReplicaLost) as lost:
        await upstream.send(f"http://127.0.0.1:{free_port()}", "GET", "/", [], b"")
    assert not lost.value.sent


async def test_interim_responses_are_skipped() -> None:
    async with serving([b"HTTP/1.1 102 Processing\r\n\r\n", *LENGTH]) as (raw, upstream):
        reply = await get(raw, upstream)
        assert (reply.status, await whole(reply)) == (200, b"abcd")


async def test_idle_connections_are_closed_before_the_replica_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "KEEPALIVE_S", 0.1)
    async with serving(LENGTH, LENGTH) as (raw, upstream):
        await whole(await get(raw, upstream))
        await soon(lambda: raw.closed == 1, limit_s=1)
        await whole(await get(raw, upstream))
        assert raw.connections == 2


async def test_a_connection_that_the_replica_closed_while_idle_is_not_used() -> None:
    closing = [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"]
    async with serving(closing, LENGTH) as (raw, upstream):
        await whole(await get(raw, upstream))
        assert await whole(await get(raw, upstream)) == b"abcd"
        assert raw.connections == 2


async def test_a_reader_that_lags_stops_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFER_BYTES", 1000)
    size = 20_000_000
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    async with serving([head, b"x" * size, b""]) as (raw, upstream):
        reply = await get(raw, upstream)
        await asyncio.sleep(0.2)
        assert len(await reply.read_some()) < size / 4
        received = 0
        while chunk := await reply.read_some():
            received += len(chunk)
        assert received > size / 2
        reply.close()
