"""The client that the gateway asks replicas with: kept connections, bad replicas.

`test_reply` has what does not depend on a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.gateway import upstream as upstream_module
from headrace.gateway.reply import MOST_WAITING_BYTES
from headrace.gateway.upstream import ReplicaLost, Reply, Upstream

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
    upstream = Upstream(connect_timeout_s=5.0)
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


# Requests


async def test_a_request_is_written_as_given() -> None:
    async with replica(OK) as (server, upstream):
        headers = [(b"content-type", b"application/json"), (b"x-name", "Jörg".encode("latin-1"))]
        await whole(await upstream.send(server.url, "POST", "/v1/x?a=b%20c", headers, b"{}"))
        host = server.url.removeprefix("http://").encode()
        assert server.heads == [
            b"POST /v1/x?a=b%20c HTTP/1.1\r\nhost: " + host + b"\r\n"
            b"content-type: application/json\r\nx-name: J\xf6rg\r\ncontent-length: 2\r\n\r\n"
        ]


async def test_a_get_says_nothing_of_a_body() -> None:
    async with replica(OK) as (server, upstream):
        await asked(upstream, server, "GET")
        assert b"content-length" not in server.heads[0]
        await asked(upstream, server, "POST")
        assert b"content-length: 0" in server.heads[1]


async def test_a_large_body_arrives_whole() -> None:
    bodies = []

    async def turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(await server.request(reader))
        writer.write(OK)

    async with replica(turn) as (server, upstream):
        body = bytes(range(256)) * 40_000
        assert await whole(await upstream.send(server.url, "POST", "/", [], body)) == b"hi"
        assert bodies == [body]


@pytest.mark.parametrize("value", [b"a\r\nx-evil: 1", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_header_never_becomes_two(value: bytes) -> None:
    async with replica(OK) as (server, upstream):
        with pytest.raises(ValueError):
            await upstream.send(server.url, "POST", "/", [(b"x", value)], b"")
        assert server.heads == []


async def test_a_target_never_ends_its_line() -> None:
    async with replica(OK) as (server, upstream):
        target = "/v1/a b\r\nx-evil: 1\0ü#c"
        await whole(await upstream.send(server.url, "GET", target, [], b""))
        assert server.heads[0].startswith(b"GET /v1/a%20b%0D%0Ax-evil:%201%00%C3%BC%23c HTTP/1.1\r")


# Responses


async def test_status_and_headers_are_those_of_the_response() -> None:
    answer = b"HTTP/1.1 418 no\r\nX-Empty:\r\nX-One: 1\r\nX-One: 2\r\ncontent-length: 0\r\n\r\n"
    async with replica(answer) as (server, upstream):
        reply = await upstream.send(server.url, "POST", "/", [], b"")
        assert reply.status == 418
        assert reply.headers == [
            *((b"x-empty", b""), (b"x-one", b"1"), (b"x-one", b"2"), (b"content-length", b"0"))
        ]
        assert await whole(reply) == b""


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK, b"hi"),
        (STREAM, b"abcde"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK, b"hi"),
        (b"HTTP/1.1 100 Continue\r\ncontent-length: 7\r\n\r\n" + STREAM, b"abcde"),
    ],
)
async def test_a_body_with_a_marked_end_leaves_the_connection_for_the_next_request(
    answer: bytes, body: bytes
) -> None:
    async with replica(answer) as (server, upstream):
        for _ in range(3):
            assert await asked(upstream, server) == body
        assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (UNTIL_CLOSE + b"as much as comes", b"as much as comes"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"hi"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi", b"hi"),
    ],
)
async def test_a_response_that_says_so_ends_its_connection(answer: bytes, body: bytes) -> None:
    async with replica(once(answer)) as (server, upstream):
        for number in range(3):
            assert await asked(upstream, server) == body
            assert server.connections == number + 1


async def test_interim_headers_are_not_those_of_the_response() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nx-early: 1\r\ncontent-length: 9\r\n\r\n"
    async with replica(once(interim + UNTIL_CLOSE + b"rest")) as (server, upstream):
        reply = await upstream.send(server.url, "POST", "/", [], b"")
        assert reply.headers == []
        assert await whole(reply) == b"rest"


async def test_the_answer_to_head_has_no_body_whatever_it_says() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"
    async with replica(answer) as (server, upstream):
        for _ in range(2):
            assert await asked(upstream, server, "HEAD") == b""


async def test_what_waits_is_read_without_waiting() -> None:
    async with replica(STREAM) as (server, upstream):
        reply = await upstream.send(server.url, "POST", "/", [], b"")
        with pytest.raises(StopIteration) as read:
            reply.read_some().send(None)  # one step of it is all of it
        assert read.value.value == b"abcde"


# Kept connections


async def test_requests_at_the_same_time_have_a_connection_each() -> None:
    async with replica(OK) as (server, upstream):
        for _ in range(3):
            answers = await asyncio.gather(*(asked(upstream, server) for _ in range(5)))
            assert answers == [b"hi"] * 5
        assert server.connections == 5


async def test_a_connection_is_kept_only_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "KEEPALIVE_S", 0.05)
    async with replica(OK) as (server, upstream):
        await asked(upstream, server)
        await until(lambda: server.gone == 1)
        assert not upstream._idle
        assert not upstream._open
        await asked(upstream, server)
        assert server.connections == 2


async def test_a_response_that_is_not_read_to_its_end_ends_its_connection() -> None:
    async with replica(CHUNKED + b"3\r\nabc\r\n", OK) as (server, upstream):
        reply = await upstream.send(server.url, "POST", "/", [], b"")
        assert await reply.read_some() == b"abc"
        reply.close()
        await until(lambda: server.gone == 1)
        assert await asked(upstream, server) == b"hi"
        assert server.connections == 2


async def test_a_closed_reply_leaves_the_next_one_on_its_connection_alone() -> None:
    async with replica(OK) as (server, upstream):
        first = await upstream.send(server.url, "POST", "/", [], b"")
        second = await upstream.send(server.url, "POST", "/", [], b"")
        first.close()
        assert await whole(first) == await whole(second) == b"hi"
        assert server.connections == 1


async def test_a_connection_that_the_replica_closed_is_not_asked() -> None:
    async with replica(once(OK), OK) as (server, upstream):
        await asked(upstream, server)
        await until(lambda: not upstream._open)
        assert await asked(upstream, server) == b"hi"


def hangs_up_on_the_second(server: Server) -> Turn:
    async def turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(OK)
        await server.request(reader)

    return turn


async def test_a_kept_connection_may_die_on_a_request_that_may_be_repeated() -> None:
    async with replica(OK) as (server, upstream):
        server.turns = [hangs_up_on_the_second(server), always(server, OK)]
        await asked(upstream, server, "GET")
        assert await asked(upstream, server, "GET") == b"hi"
        assert server.connections == 2


async def test_a_kept_connection_that_dies_may_have_delivered_a_post() -> None:
    async with replica(OK) as (server, upstream):
        server.turns = [hangs_up_on_the_second(server), always(server, OK)]
        await asked(upstream, server)
        with pytest.raises(ReplicaLost) as lost:
            await asked(upstream, server)
        assert lost.value.sent
        assert server.connections == 1


async def test_an_answer_before_the_request_is_written_ends_the_connection() -> None:
    async def turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await asyncio.sleep(3600)

    async with replica(turn, OK) as (server, upstream):
        reply = await upstream.send(server.url, "POST", "/", [], bytes(2**25))
        assert await whole(reply) == b"hi"
        assert not upstream._open


@pytest.mark.parametrize("behind", [b"x", OK, b"\0" * 100, b"HTTP/1.1 "])
@pytest.mark.parametrize("answer", [OK, STREAM])
async def test_bytes_behind_the_end_answer_no_request(answer: bytes, behind: bytes) -> None:
    async with replica(answer + behind, OK) as (server, upstream):
        assert await asked(upstream, server) == (b"hi" if answer == OK else b"abcde")
        assert await asked(upstream, server) == b"hi"
        assert server.connections == 2


async def test_bytes_that_nobody_asked_for_end_an_idle_connection() -> None:
    async def turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        writer.write(OK)
        await asyncio.sleep(0.02)
        writer.write(OK)
        await reader.read()

    async with replica(turn, OK) as (server, upstream):
        await asked(upstream, server)
        await until(lambda: server.gone == 1)
        assert not upstream._open


# Replicas that are not there, or break


async def test_a_replica_that_does_not_listen_got_nothing() -> None:
    async with replica(OK) as (server, upstream):
        pass
    upstream = Upstream(connect_timeout_s=5.0)
    with pytest.raises(ReplicaLost) as lost:
        await asked(upstream, server)
    assert not lost.value.sent


async def test_a_replica_that_takes_no_connection_got_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    upstream = Upstream(connect_timeout_s=0.01)
    with pytest.raises(ReplicaLost) as lost:
        await upstream.send("http://192.0.2.1:80", "POST", "/", [], b"")
    assert not lost.value.sent


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"\x16\x03\x01\x00\xa5 not HTTP at all",
        b"\r\n\r\n\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 099 what\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 999 what\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nabc",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-bad: a\x00b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n bad name: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
@pytest.mark.parametrize("abort", [False, True])
async def test_a_head_that_is_none_is_a_lost_replica(answer: bytes, abort: bool) -> None:
    async with replica(once(answer, abort=abort)) as (server, upstream):
        with pytest.raises(ReplicaLost) as lost:
            await asked(upstream, server)
        assert lost.value.sent
        assert not upstream._open


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nabc",
        CHUNKED + b"3\r\nabc\r\n",
        CHUNKED + b"3\r\nabc\r\n5\r\nde",
        CHUNKED + b"3\r\nabc\r\n0\r\n",
        CHUNKED + b"3\r\nabc\r\nno size\r\n",
        CHUNKED + b"3\r\nabc\r\n-1\r\nd\r\n",
        CHUNKED + b"3\r\nabc\r\nffffffffffffffffff\r\nd",
        CHUNKED + b"3\r\nabcdefg",
        CHUNKED + b"3\r\nabc\r\n0\r\nbad trailer\r\n\r\n",
    ],
)
@pytest.mark.parametrize("abort", [False, True])
async def test_a_body_that_breaks_off_is_a_lost_replica_behind_what_came(
    answer: bytes, abort: bool
) -> None:
    async with replica(once(answer, abort=abort)) as (server, upstream):
        reply = await upstream.send(server.url, "POST", "/", [], b"")
        got = b""
        with pytest.raises(ReplicaLost) as lost:
            while part := await reply.read_some():
                got += part
        assert lost.value.sent
        assert b"abcde".startswith(got)
        assert not upstream._open
        with pytest.raises(ReplicaLost):
            await reply.read_some()


async def test_a_connection_that_breaks_is_no_end_of_a_body_without_one() -> None:
    async with replica(once(UNTIL_CLOSE + b"abc", abort=True)) as (server, upstream):
        with pytest.raises(ReplicaLost):
            await asked(upstream, server)


async def endless(writer: asyncio.StreamWriter, begin: bytes, more: bytes) -> None:
    """Send the beginning, and the rest for as long as the other side takes it."""
    writer.write(begin)
    while True:
        writer.write(more)
        await writer.drain()


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-more: " + b"a" * 1000 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\nx-long: ", b"a" * 1000),
        (b"HTTP/1.1 200 ", b"a" * 1000),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
        (b"", b"\r\n" * 100),
        (CHUNKED + b"1;", b"a" * 1000),
        (CHUNKED + b"0\r\n", b"x-more: " + b"a" * 1000 + b"\r\n"),
        (CHUNKED + b"0\r\nx-long: ", b"a" * 1000),
    ],
)
async def test_what_is_neither_head_nor_body_has_an_end(begin: bytes, more: bytes) -> None:
    async def turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await endless(writer, begin, more)

    async with replica(turn) as (server, upstream):
        with pytest.raises(ReplicaLost):
            await asked(upstream, server)
        assert not upstream._open


async def test_a_body_that_nobody_reads_waits_at_the_replica() -> None:
    sent = 0

    async def turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        for _ in range(400):
            writer.write(b"10000\r\n" + bytes(2**16) + b"\r\n")
            await writer.drain()
            sent += 2**16
        writer.write(b"0\r\n\r\n")

    async with replica(turn) as (server, upstream):
        reply = await upstream.send(server.url, "POST", "/", [], b"")
        before = -1
        while before != sent:  # until the kernel's buffers are full
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 400 * 2**16
        assert len(reply._waiting) < MOST_WAITING_BYTES + 2**18
        assert await whole(reply) == bytes(400 * 2**16)


async def test_a_reader_that_is_cancelled_breaks_the_request_off() -> None:
    async with replica(CHUNKED, b"") as (server, upstream):
        reply = await upstream.send(server.url, "POST", "/", [], b"")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await reply.read_some()
        reply.close()
        await until(lambda: server.gone == 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await upstream.send(server.url, "POST", "/", [], b"")
        await until(lambda: server.gone == 2)
        assert not upstream._open


async def test_a_closed_pool_loses_what_is_under_way_and_takes_nothing_more() -> None:
    async with replica(CHUNKED) as (server, upstream):
        reply = await upstream.send(server.url, "POST", "/", [], b"")
        reading = asyncio.ensure_future(reply.read_some())
        await asyncio.sleep(0)
        await upstream.aclose()
        with pytest.raises(ReplicaLost):
            await reading
        with pytest.raises(RuntimeError):
            await asked(upstream, server)
        await until(lambda: server.gone == 1)


# Pushed


async def test_pieces_are_pushed_from_the_loop_to_the_end() -> None:
    async def turn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        for number in range(5):
            await asyncio.sleep(0.01)
            writer.write(b"1\r\n%d\r\n" % number)
        await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async with replica(turn) as (server, upstream):
        reply = await upstream.send(server.url, "POST", "/", [], b"")
        pieces: list[bytes] = []

        def take(piece: bytes) -> bool:
            pieces.append(piece)
            return True

        assert await reply.pour(take)
        assert b"".join(pieces) == b"01234"
