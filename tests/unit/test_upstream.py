"""The client that the gateway asks replicas with: requests, responses, kept connections.

`test_reply` has what does not depend on a connection, `test_upstream_faults` bad replicas.
"""

from __future__ import annotations

import asyncio

import pytest

from headrace.gateway import upstream as upstream_module
from headrace.gateway.upstream import ReplicaLost
from tests.unit.raw_replica import (
    CHUNKED,
    OK,
    STREAM,
    UNTIL_CLOSE,
    Server,
    Turn,
    always,
    asked,
    once,
    replica,
    until,
    whole,
)

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
        assert not upstream.open_connections
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
        await until(lambda: not upstream.open_connections)
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
        assert not upstream.open_connections


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
        assert not upstream.open_connections


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
