"""A connection answers requests however they are framed and cut, and any bytes leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any

import pytest

from headrace.gateway import serve_gateway
from headrace.gateway.ingress import connection

UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"
SEEDS = range(8)
CASES = 12
"""For each seed."""


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path and the body."""
    if scope["type"] != "http":
        return
    body, more = scope["path"].encode() + b" ", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


def request(draw: random.Random, number: int) -> tuple[bytes, bytes]:
    """A request in some framing, and the body of its answer."""
    size = draw.choice([0, 1, 5, 300, 5_000, 70_000, 200_000])
    body, path = bytes(draw.choices(b"abc\r\n:;", k=size)), b"/%d" % number
    more = UPGRADE if draw.random() < 0.3 else b""
    head = b" %s HTTP/1.1\r\nhost: x\r\n%s" % (path, more)
    if not size and draw.random() < 0.5:
        return b"GET" + head + b"\r\n", path + b" "
    if draw.random() < 0.5:
        framed = b"content-length: %d\r\n\r\n%s" % (size, body)
        return b"POST" + head + framed, path + b" " + body
    parts, at = [], 0
    while at < size:
        step = draw.choice([1, 7, 1_000] if size < 2_000 else [1_000, 66_000])
        piece, extension = body[at : at + step], draw.choice([b"", b";a=b"])
        parts.append(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece))
        at += step
    end = b"0\r\n%s\r\n" % draw.choice([b"", b"x: y\r\n"])
    return (
        b"POST" + head + b"transfer-encoding: chunked\r\n\r\n" + b"".join(parts) + end,
        path + b" " + body,
    )


def damaged(draw: random.Random, sent: bytes) -> bytes:
    """The bytes with some of them changed or left out."""
    found = bytearray(sent)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found))
        if draw.random() < 0.5:
            found[at] = draw.randrange(256)
        elif len(found) > 60:
            del found[at : at + draw.randint(1, 50)]
    return bytes(found)


async def send_cut(draw: random.Random, writer: asyncio.StreamWriter, sent: bytes) -> None:
    """Send in segments of any length."""
    sizes = [1, 3, 100, 5_000] if len(sent) < 3_000 else [500, 5_000, 100_000, 1_000_000]
    at = 0
    with contextlib.suppress(ConnectionError):
        while at < len(sent):
            size = draw.choice(sizes)
            writer.write(sent[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
            at += size


@pytest.mark.parametrize("seed", SEEDS)
async def test_requests_are_answered_in_order_however_they_are_framed_and_cut(seed: int) -> None:
    draw = random.Random(seed)
    server = await serve_gateway(echo, "127.0.0.1", 0)
    for _ in range(CASES):
        made = [request(draw, number) for number in range(draw.randint(1, 8))]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        sent = b"".join(raw for raw, _ in made)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(send_cut(draw, writer, sent))
            for _, expected in made:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                assert await reader.readexactly(len(expected)) == expected
        writer.transport.abort()
    await server.stop(1)


@pytest.mark.parametrize("seed", SEEDS)
async def test_damaged_requests_leave_no_connection_and_no_task(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    draw = random.Random(seed)
    server = await serve_gateway(echo, "127.0.0.1", 0)
    for _ in range(CASES):
        made = [request(draw, number) for number in range(draw.randint(1, 8))]
        sent = damaged(draw, b"".join(raw for raw, _ in made))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(send_cut(draw, writer, sent))
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.05)
        writer.transport.abort()
    state = server.uvicorn_server.server_state
    async with asyncio.timeout(60):
        while state.connections or state.tasks:
            await asyncio.sleep(0.02)
    await server.stop(1)
