"""The client that the gateway asks replicas with, before replicas that are not there, or break."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.gateway.upstream import ReplicaLost, Upstream
from headrace.gateway.upstream_reply import MAX_WAITING_BYTES
from tests.unit.raw_replica import (
    CHUNKED,
    OK,
    UNTIL_CLOSE,
    asked,
    once,
    replica,
    until,
    whole,
)


async def test_a_replica_that_does_not_listen_got_nothing() -> None:
    async with replica(OK) as (server, upstream):
        pass
    upstream = Upstream()
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
        assert not upstream.open_connections


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
        assert not upstream.open_connections
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
        assert not upstream.open_connections


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
        assert len(reply._waiting) < MAX_WAITING_BYTES + 2**18
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
        assert not upstream.open_connections


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
