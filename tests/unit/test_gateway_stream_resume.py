"""A stream whose replica is lost midway: another one takes it up, and the client sees nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from headrace.gateway.backend import ReplicaInfo
from headrace.gateway.relay import replica_monitor
from headrace.gateway.relay.call import Answer, Call
from headrace.gateway.relay.quarantine import Quarantine
from headrace.gateway.relay.stream_relay import MAX_TRIES, StreamRelay
from headrace.gateway.upstream import ReplicaLost
from headrace.observability.gateway_metrics import GatewayMetrics
from headrace.replica_health import Probe
from headrace_decode.resume.emitted import HEADER, EmittedChoice, encode_line
from headrace_decode.resume.journal import Journal
from tests.unit.gateway_fakes import (
    BODY,
    CHAT,
    EVENTS,
    PROMPT,
    FakeReplica,
    Handler,
    begin_stream,
    cut,
    gateway_over,
    in_turn,
    stall,
)

ERROR_EVENT = b'data: {"error":{"message":"EngineDeadError","code":500}}\n\n'
NAME = HEADER.decode()


class Losses(GatewayMetrics):
    def __init__(self) -> None:
        self.when: list[str] = []

    def replica_lost(self, model: str, when: str) -> None:
        self.when.append(when)


def says(*tokens: int) -> bytes:
    """The line before the events of one output of the engine."""
    return encode_line((EmittedChoice(0, tokens),))


def tells(*parts: bytes, dies: bool = False, hangs: bool = False, pause_s: float = 0.02) -> Handler:
    """A replica whose stream has lines: these parts, then it dies, hangs, or ends the stream."""

    async def handler(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request, {NAME: "1"})
        for part in parts:
            await response.write(part)
            await asyncio.sleep(pause_s)
        if dies:
            cut(request)
        elif hangs:
            await stall(replica, request)
        return response

    return handler


WHOLE = (says(1), EVENTS[0], says(2), EVENTS[1], EVENTS[2])


async def test_a_stream_goes_on_from_another_replica_behind_what_the_client_has() -> None:
    losses = Losses()
    handler = in_turn(tells(*WHOLE[:3], b'data: {"half', dies=True), tells(*WHOLE))
    async with gateway_over(handler, handler, metrics=losses) as bench:
        for each in bench.cluster.members:
            each.healthy = False
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            assert await response.read() == b"".join(EVENTS)
            assert NAME not in response.headers
        first, second = [request for each in bench.cluster.members for request in each.seen]
    assert first.headers[NAME] == "0" and first[BODY] == second[BODY][len(says(1)) :]
    assert second.headers[NAME] == str(len(says(1)))
    assert second[BODY].startswith(says(1)), "the second line led to no event"
    assert first.headers["x-request-id"] == second.headers["x-request-id"]
    assert losses.when == ["resumed"]


async def test_a_replica_that_lives_takes_its_stream_up_itself() -> None:
    handler = in_turn(tells(*WHOLE[:2], dies=True), tells(*WHOLE))
    async with gateway_over(handler, handler, handler) as bench:
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            assert await response.read() == b"".join(EVENTS)
        assert sorted(len(each.seen) for each in bench.cluster.members) == [0, 0, 2]


async def test_an_engines_death_midway_is_no_event_of_the_stream() -> None:
    handler = in_turn(tells(*WHOLE[:2], ERROR_EVENT), tells(*WHOLE))
    async with gateway_over(handler, handler) as bench:
        for each in bench.cluster.members:
            each.healthy = False
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            assert await response.read() == b"".join(EVENTS)


async def test_an_error_midway_of_a_healthy_engine_is_the_streams() -> None:
    async with gateway_over(tells(*WHOLE[:2], ERROR_EVENT)) as bench:
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            assert await response.read() == EVENTS[0] + ERROR_EVENT
        assert len(bench.replica.seen) == 1


async def test_a_replica_that_hangs_is_lost_and_one_that_is_busy_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_monitor, "SILENT_S", 0.2)
    monkeypatch.setattr(replica_monitor, "POLL_INTERVAL_S", 0.05)
    handler = in_turn(tells(*WHOLE[:2], hangs=True), tells(*WHOLE))
    async with (
        gateway_over(handler, handler) as bench,
        bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response,
    ):
        assert await response.content.readexactly(len(EVENTS[0])) == EVENTS[0]
        await asyncio.sleep(0.6)
        assert sum(len(each.seen) for each in bench.cluster.members) == 1, "it is well"
        for each in bench.cluster.members:
            each.healthy = not each.seen
        assert await response.read() == EVENTS[1] + EVENTS[2]


class SlowClient:
    """A client that reads when it is told to, through a small buffer."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self._address, sent = url.removeprefix("http://"), json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {self._address}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
        self._request = head.encode() + sent

    async def __aenter__(self) -> SlowClient:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Linux sizes the other end's buffer by it: 40 KB instead of 2.6 MB.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        sock.setblocking(False)
        host, port = self._address.split(":")
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        await asyncio.get_running_loop().sock_sendall(sock, self._request)
        self.sock = sock
        return self

    async def __aexit__(self, *error: object) -> None:
        self.sock.close()

    async def events(self) -> list[bytes]:
        """The rest of the answer, by events."""
        parts = []
        while part := await asyncio.get_running_loop().sock_recv(self.sock, 2**16):
            parts.append(part)
        body = b"".join(parts).partition(b"\r\n\r\n")[2]
        found = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            found += body[: int(size, 16)]
            body = body[int(size, 16) + 2 :]
        return found.split(b"\n\n")[:-1]


@pytest.mark.parametrize("ends", ["hangs", "dies", "error"])
async def test_a_slow_client_gets_each_event_once_when_its_replica_is_lost(
    monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """The client does not read while the gateway finds out that the replica hangs."""
    monkeypatch.setattr(replica_monitor, "SILENT_S", 0.2)
    monkeypatch.setattr(replica_monitor, "POLL_INTERVAL_S", 0.05)
    count, pad = 60, "x" * 2**14
    events = [b'data: {"i":%d,"pad":"%s"}\n\n' % (i, pad.encode()) for i in range(count)]
    parts = [part for i, event in enumerate(events) for part in (says(i), event)]
    written = asyncio.Event()

    async def first(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin_stream(request, {NAME: "1"})
        replica.healthy = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                for part in parts[:-20]:
                    await response.write(part)
        written.set()
        await asyncio.sleep(0.5)
        if ends == "error":
            await response.write(ERROR_EVENT)
        elif ends == "dies":
            cut(request)
        else:
            await stall(replica, request)
        return response

    handler = in_turn(first, tells(*parts, EVENTS[2], pause_s=0.0))
    async with (
        gateway_over(handler, handler) as bench,
        SlowClient(bench.url, {**PROMPT, "stream": True}) as client,
    ):
        await asyncio.wait_for(written.wait(), 10)
        await asyncio.sleep(1.0)
        got = [json.loads(event[6:])["i"] for event in (await client.events())[:-1]]
    assert got == list(range(count))


class FakeReply:
    """A reply whose body is these bytes; its replica is lost as they come, if that is told."""

    status, headers = 200, [(HEADER, b"1")]

    def __init__(self, body: bytes = b"", *, lost: bool = False) -> None:
        self._body, self._lost = body, lost

    async def pour(self, take: Any) -> bool:
        over = not self._body or take(self._body)
        if self._lost:
            raise ReplicaLost("it hangs", sent=True, hangs=True)
        return bool(over)

    def close(self) -> None: ...


async def test_an_event_that_comes_in_the_moment_in_which_its_replica_is_lost_is_sent() -> None:
    sent: list[bytes] = []
    lease: Any = SimpleNamespace(replica=ReplicaInfo("decode-1", "", 0, 0), release=lambda: None)
    pool: Any = SimpleNamespace(on_failure=lambda replica, error: None, suspects=list)

    async def send(message: Any) -> None:
        sent.append(message["body"])

    async def probe(replica: Any) -> Probe:
        return Probe.REFUSED

    def replied(body: bytes, reply: Any) -> Answer:
        return Answer(lease, reply, body, streamed=True)

    async def fetch(call: Call, prefer: str) -> Answer:
        assert call.resume_lines == says(1) + says(2)
        return replied(b"".join(WHOLE), FakeReply())

    looks = replica_monitor.ReplicaMonitor(pool, probe)
    fetcher: Any = SimpleNamespace(
        monitor=looks, quarantine=Quarantine(lambda: 0.0), fetch=fetch, probe=probe
    )
    streams = StreamRelay(pool, fetcher, lambda when: None)
    first = replied(WHOLE[0] + WHOLE[1], FakeReply(WHOLE[2] + WHOLE[3], lost=True))
    await streams.copy(Call(b"r", "POST", CHAT, []), first, Journal(), send)
    await looks.aclose()
    assert b"".join(sent) == b"".join(EVENTS)


async def test_a_stream_that_differs_ends_with_an_error_event() -> None:
    handler = in_turn(tells(*WHOLE[:4], dies=True), tells(says(9), EVENTS[0], says(2), EVENTS[1]))
    async with (
        gateway_over(handler) as bench,
        bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response,
    ):
        body = await response.read()
    assert body.startswith(EVENTS[0] + EVENTS[1])
    assert json.loads(body.split(b"data: ")[-1])["error"]["code"] == "replica_lost"


async def test_a_stream_that_loses_every_replica_without_a_new_event_is_given_up() -> None:
    handler = tells(*WHOLE[:2], dies=True)
    async with gateway_over(handler, handler) as bench:
        async with bench.client.post(CHAT, json={**PROMPT, "stream": True}) as response:
            body = await response.read()
        assert sum(len(each.seen) for each in bench.cluster.members) == 1 + MAX_TRIES
    assert body.startswith(EVENTS[0] + b'data: {"error"') and b"in a row" in body


async def test_a_stream_that_kills_engines_is_not_tried_again() -> None:
    handler = tells(*WHOLE[:2], ERROR_EVENT)
    async with gateway_over(*[handler] * (1 + MAX_TRIES)) as bench:
        for each in bench.cluster.members:
            each.healthy = False
        stream = {**PROMPT, "stream": True}
        async with bench.client.post(CHAT, json=stream) as response:
            assert b"in a row" in await response.read()
        async with bench.client.post(CHAT, json=stream) as response:
            assert response.status == 422
            assert (await response.json())["error"]["code"] == "request_quarantined"
        assert [len(each.seen) for each in bench.cluster.members] == [1] * (1 + MAX_TRIES)
        for each in bench.cluster.members:
            each.healthy = True
        async with bench.client.post(CHAT, json={**stream, "seed": 1}) as response:
            assert response.status == 200, "another request is asked"
