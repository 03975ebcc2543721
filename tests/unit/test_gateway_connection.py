"""A connection at the public port is bounded in bytes and in time, whatever its client does."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from headrace.gateway.ingress import connection
from headrace.gateway.ingress.connection import MAX_HEAD_BYTES
from tests.support.connections import (
    client_of,
    connections,
    echo,
    read_all,
    send_all,
    serving,
)
from tests.unit.gateway_fakes import CHAT, PROMPT, answer, begin_stream, gateway_over, soon

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")
START = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"
BODY = json.dumps(PROMPT).encode()


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.3)


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoopPolicy]:
    """Both loops that the gateway runs in: Ray's replicas have uvloop's."""
    yield (
        uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()
    )


# Answers before the body's end.


@pytest.mark.parametrize("more", [b"", b"1", b"0\r\n", b"0\r\na: b\r\n"])
async def test_a_request_that_is_refused_before_its_end_is_the_connections_last(
    more: bytes,
) -> None:
    async with gateway_over(answer, api_keys=("right-key",)) as bench:
        async with client_of(bench.gateway.port) as client:
            client.writer.write(CHUNKED)
            head, body = await client.answer()
            assert b" 401 " in head and b"connection: close" in head
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
            client.writer.write(more)  # and nothing more, for ever
            assert await client.rest() == b""
            await client.is_ended()
        assert not connections(bench.gateway)


@pytest.mark.parametrize("piece", [b"a:b\r\n" * 2000, b"a:" + b"b" * 10_000, b"a" * 65_536])
async def test_after_an_early_refusal_nothing_that_comes_is_kept(piece: bytes) -> None:
    async with gateway_over(answer, api_keys=("right-key",)) as bench:
        async with client_of(bench.gateway.port) as client:
            client.writer.write(CHUNKED)
            await client.answer()
            (kept,) = connections(bench.gateway)
            client.writer.write(b"0\r\n")
            await client.flood(piece)
            assert len(kept.headers or ()) < 10
            await client.is_ended()
        assert not connections(bench.gateway)


async def test_a_client_that_sends_all_of_a_refused_body_still_reads_the_refusal() -> None:
    async with (
        gateway_over(answer, max_body_bytes=100_000) as bench,
        client_of(bench.gateway.port) as client,
    ):
        client.writer.write(START + b"content-length: 4000000\r\n\r\n")
        for _ in range(40):
            client.writer.write(b" " * 100_000)
            await client.writer.drain()
        head, _ = await client.answer()
        assert b" 413 " in head


async def test_a_refusal_of_a_whole_request_keeps_the_connection() -> None:
    async with (
        gateway_over(answer, api_keys=("right-key",)) as bench,
        client_of(bench.gateway.port) as client,
    ):
        for _ in range(2):
            client.writer.write(START + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
            head, _ = await client.answer()
            assert b" 401 " in head and b"connection" not in head


# Bytes that are neither head nor body.


async def test_trailers_are_read_and_are_no_headers() -> None:
    seen: list[list[Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read_all(receive)
        seen.append(scope["headers"])
        await send_all(send, b"", (b"content-length", b"0"))

    async with serving(app) as server, client_of(server.port) as client:
        for _ in range(2):
            client.writer.write(CHUNKED + b"2;x=y\r\n{}\r\n0\r\na: b\r\nc: d\r\n\r\n")
            head, _ = await client.answer()
            assert b" 200 " in head
    assert [[name for name, _ in headers] for headers in seen] == [
        [b"host", b"content-type", b"transfer-encoding"]
    ] * 2


@pytest.mark.parametrize(
    "begin, piece",
    [
        (b"2\r\n{}\r\n0\r\n", b"a:b\r\n" * 2000),
        (b"2\r\n{}\r\n0\r\n", b"a:b\r\n" * 3),
        (b"2\r\n{}\r\n0\r\na:", b"b" * 10_000),
        (b"2;", b"a" * 10_000),
        (b"", b"1;" + b"a" * 60_000 + b"\r\na\r\n"),
        (b"", b"1\r\na\r\n" * 1000),
    ],
    ids=[
        *("trailers", "few trailers at once", "one trailer", "one extension", "extensions"),
        "chunks of one byte",
    ],
)
async def test_endless_framing_ends_the_connection(begin: bytes, piece: bytes) -> None:
    async with serving(echo) as server:
        async with client_of(server.port) as client:
            client.writer.write(CHUNKED + begin)
            flood = asyncio.create_task(client.flood(piece))
            head = await client.head()
            assert b" 400 " in head and b"connection: close" in head
            await client.is_ended()
            await flood
        assert not connections(server)


@pytest.mark.parametrize("chunk, count", [(1, 10_000), (5, 100_000)])
async def test_a_body_may_come_in_short_chunks(chunk: int, count: int) -> None:
    piece = b"%d\r\n%b\r\n" % (chunk, b"a" * chunk)
    async with serving(echo) as server, client_of(server.port) as client:
        client.writer.write(CHUNKED + piece * count + b"0\r\n\r\n")
        _, body = await client.answer()
        assert body == CHAT.encode() + b" " + b"a" * chunk * count


async def test_a_body_that_nobody_reads_ends_too() -> None:
    async def ignores(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serving(ignores, max_body_bytes=100_000) as server:
        async with client_of(server.port) as client:
            client.writer.write(CHUNKED)
            flood = asyncio.create_task(client.flood(b"10000\r\n" + b"a" * 0x10000 + b"\r\n"))
            assert b" 413 " in await client.head()
            await client.is_ended()
            await flood
        await soon(lambda: not server.uvicorn_server.server_state.tasks)


# Heads.


@pytest.mark.parametrize("pieces", [1, 2, 40])
@pytest.mark.parametrize("what", ["one header", "many headers", "target"])
async def test_a_head_over_the_limit_is_431_however_it_comes(what: str, pieces: int) -> None:
    large = {
        "one header": b"GET / HTTP/1.1\r\nhost: x\r\na: %s\r\n\r\n" % (b"a" * MAX_HEAD_BYTES),
        "many headers": b"GET / HTTP/1.1\r\nhost: x\r\n" + b"ab: cdefg\r\n" * 6600 + b"\r\n",
        "target": b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n" % (b"a" * MAX_HEAD_BYTES),
    }[what]
    async with serving(echo) as server, client_of(server.port) as client:
        size = len(large) // pieces + 1
        for at in range(0, len(large), size):
            client.writer.write(large[at : at + size])
            await client.writer.drain()
            await asyncio.sleep(0.002)
        assert b" 431 " in await client.head()
        await client.is_ended()


async def test_a_head_below_the_limit_passes_however_it_comes() -> None:
    head = b"GET / HTTP/1.1\r\nhost: x\r\na: %s\r\n\r\n" % (b"a" * (MAX_HEAD_BYTES - 100))
    async with serving(echo) as server, client_of(server.port) as client:
        for size in (len(head), 30_000, 1_000):
            for at in range(0, len(head), size):
                client.writer.write(head[at : at + size])
                await client.writer.drain()
            assert b" 200 " in (await client.answer())[0]


async def test_two_hosts_are_400() -> None:
    async with serving(echo) as server, client_of(server.port) as client:
        client.writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n")
        assert b" 400 " in await client.head()


async def test_a_connection_that_sends_nothing_between_requests_is_closed() -> None:
    async with serving(echo, keepalive_s=1) as server, client_of(server.port) as client:
        client.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.answer()
        assert await client.rest() == b""


async def test_a_head_that_begins_on_a_kept_connection_has_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    async with serving(echo) as server, client_of(server.port) as client:
        client.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HT")
        await client.answer()
        assert b" 408 " in await client.rest()


# Several requests on a connection.


async def test_pipelined_requests_wait_unparsed_and_are_answered_in_their_order() -> None:
    most_waiting = 0
    gate = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal most_waiting
        await gate.wait()
        (one,) = connections(server)
        most_waiting = max(most_waiting, len(one.pipeline))
        await echo(scope, receive, send)

    count = 5_000
    async with serving(app) as server, client_of(server.port) as client:
        client.writer.write(
            b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % n for n in range(count))
        )
        await asyncio.sleep(0.1)
        gate.set()
        for number in range(count):
            assert (await client.answer())[1] == b"/%d " % number
        assert most_waiting < 200


async def test_what_cannot_be_parsed_is_refused_after_the_requests_before_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        await echo(scope, receive, send)

    async with serving(app) as server, client_of(server.port) as client:
        client.writer.write(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % 1)
        client.writer.write(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\nNONSENSE\r\n\r\n" % 2)
        assert (await client.answer())[1] == b"/1 "
        assert (await client.answer())[1] == b"/2 "
        assert b" 400 " in await client.head()
        await client.is_ended()


async def test_a_body_that_stops_being_one_is_refused_and_its_request_ends() -> None:
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with serving(app) as server, client_of(server.port) as client:
        client.writer.write(CHUNKED + b"2\r\n{}\r\nnonsense\r\n")
        assert b" 400 " in await client.head()
        await asyncio.wait_for(gone.wait(), 5)
        await client.is_ended()


# Upgrades.


@pytest.mark.parametrize("size", [10_000, 7, 1])
@pytest.mark.parametrize("to", [b"h2c", b"websocket", b"TLS/1.0", b"anything"])
async def test_an_upgrade_is_ignored_and_the_body_is_read(to: bytes, size: int) -> None:
    ask = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: " + to + b"\r\nhttp2-settings: AAE\r\n"
    sent = b"".join(
        [
            START + ask + b"content-length: 5\r\n\r\nfirst",
            START
            + ask
            + b"transfer-encoding: chunked\r\n\r\n3\r\nsec\r\n3\r\nond\r\n0\r\nx: y\r\n\r\n",
            b"GET /third HTTP/1.1\r\nhost: x\r\n" + ask + b"\r\n",
            START + b"content-length: 6\r\n\r\nfourth",
        ]
    )
    async with serving(echo) as server, client_of(server.port) as client:
        for at in range(0, len(sent), size):
            client.writer.write(sent[at : at + size])
            await client.writer.drain()
            if size < 10_000:
                await asyncio.sleep(0)
        path = CHAT.encode()
        expected = [path + b" first", path + b" second", b"/third ", path + b" fourth"]
        assert [(await client.answer())[1] for _ in range(4)] == expected


async def test_a_tunnel_is_refused() -> None:
    async with serving(echo) as server, client_of(server.port) as client:
        client.writer.write(b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n")
        client.writer.write(b"\x16\x03\x01")
        assert b" 40" in await client.head()
        await client.is_ended()


# HTTP/1.0.


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one,", b"two,"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"three"})

    async with serving(app) as server, client_of(server.port) as client:
        client.writer.write(b"GET / HTTP/1.0\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head and b"connection: close" in head
        assert body == b"one,two,three"


async def test_a_stream_to_a_client_of_http_1_0_is_the_stream() -> None:
    async def stream(replica: Any, request: Any) -> Any:
        response = await begin_stream(request)
        for part in (b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"):
            await response.write(part)
        return response

    async with gateway_over(stream) as bench, client_of(bench.gateway.port) as client:
        head = START.replace(b"HTTP/1.1", b"HTTP/1.0")
        client.writer.write(head + b"content-length: %d\r\n\r\n" % len(BODY) + BODY)
        body = (await client.rest()).partition(b"\r\n\r\n")[2]
        assert body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


async def test_a_client_that_is_gone_before_its_early_answer_leaves_nothing() -> None:
    async with gateway_over(answer, api_keys=("right-key",)) as bench:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", bench.gateway.port)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                sock.sendall(CHUNKED)
        await soon(lambda: not connections(bench.gateway))
        await soon(lambda: not bench.gateway.uvicorn_server.server_state.tasks)
