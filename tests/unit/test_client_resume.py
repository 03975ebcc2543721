"""A client's stream outlives its gateway: the transport resumes it at whichever gateway answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web

from headrace.client import AsyncResumingTransport, ResumingTransport
from headrace.gateway.errors import stopping
from headrace.gateway.relay.dialect import DIALECTS
from headrace_decode.resume.emitted import HEADER, encode_line
from tests.unit.gateway_fakes import BODY, CHAT, EVENTS, PROMPT, FakeReplica, gateway_over, stream
from tests.unit.test_gateway_stream_resume import WHOLE, says, tells

ASKED = {**PROMPT, "stream": True}
LINES = says(1) + says(2)


class Cut(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream's body whose connection breaks behind so many bytes."""

    def __init__(self, body: Any, size: int) -> None:
        self._body, self._left = body, size

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._body:
            yield self._part(chunk)
            self._break()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            yield self._part(chunk)
            self._break()

    def _part(self, chunk: bytes) -> bytes:
        part, self._left = chunk[: self._left], self._left - len(chunk)
        return part

    def _break(self) -> None:
        if self._left <= 0:
            raise httpx.ReadError("cut")


class Cutting(httpx.AsyncHTTPTransport):
    """Breaks each of the first connections behind so many bytes of the stream; None refuses it."""

    def __init__(self, *sizes: int | None) -> None:
        super().__init__()
        self.sizes, self.sent = list(sizes), list[httpx.Request]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        size = self.sizes.pop(0) if self.sizes else 10**9
        if size is None:
            raise httpx.ConnectError("nobody listens")
        self.sent.append(request)
        response = await super().handle_async_request(request)
        response.stream = Cut(response.stream, size)
        return response


async def streamed(url: str, transport: httpx.AsyncBaseTransport) -> bytes:
    async with (
        httpx.AsyncClient(transport=AsyncResumingTransport(transport, patience_s=1.0)) as client,
        client.stream("POST", url + CHAT, json=ASKED) as response,
    ):
        return b"".join([chunk async for chunk in response.aiter_bytes()])


async def test_wherever_the_connection_breaks_each_event_comes_once() -> None:
    async with gateway_over(tells(*WHOLE)) as bench:
        for size in range(0, len(b"".join(WHOLE)) + 1, 5):
            bench.replica.seen.clear()
            cutting = Cutting(size, None, size + 7)
            assert await streamed(bench.url, cutting) == b"".join(EVENTS), size
            first, *later = bench.replica.seen
            for each in later:
                lines = int(each.headers[HEADER.decode()])
                assert each[BODY] == LINES[:lines] + first[BODY]
                assert each.headers["x-request-id"] == first.headers["x-request-id"]


class Breaking(httpx.AsyncHTTPTransport):
    """So many requests break before their answers begin."""

    def __init__(self, breaks: int, error: httpx.TransportError) -> None:
        super().__init__()
        self.left, self.error = breaks, error

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.left -= 1
        if self.left >= 0:
            raise self.error
        return await super().handle_async_request(request)


class SyncBreaking(httpx.HTTPTransport):
    """The same of the first request."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 1

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.left -= 1
        if self.left >= 0:
            raise GONE
        return super().handle_request(request)


GONE = httpx.RemoteProtocolError("Server disconnected without sending a response.")


async def test_a_request_whose_gateway_dies_before_it_answers_is_sent_again() -> None:
    async with gateway_over(tells(*WHOLE)) as bench:
        for error in (GONE, httpx.ReadError("reset")):
            assert await streamed(bench.url, Breaking(1, error)) == b"".join(EVENTS)

        def ask() -> bytes:
            with (
                httpx.Client(transport=ResumingTransport(SyncBreaking())) as client,
                client.stream("POST", bench.url + CHAT, json=ASKED) as response,
            ):
                return response.read()

        assert await asyncio.to_thread(ask) == b"".join(EVENTS)


async def test_a_request_that_breaks_whatever_it_meets_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.client.PAUSES_S", (0.0, 0.0))
    for breaks, error in ((3, GONE), (1, httpx.ConnectError("nobody listens"))):
        breaking = Breaking(breaks, error)
        with pytest.raises(type(error)):
            await streamed("http://127.0.0.1:9", breaking)
        assert breaking.left == 0


@pytest.mark.parametrize("api", DIALECTS)
async def test_a_gateway_that_stops_is_no_event_of_the_stream(api: str) -> None:
    """The client knows the error by its code, in each API's shape, whatever its message is."""
    error = stopping()
    error.message = "Other words."
    stops = DIALECTS[api].event(error, b"")
    async with gateway_over(tells(*WHOLE[:2], stops)) as old, gateway_over(tells(*WHOLE)) as new:

        class Moving(httpx.AsyncHTTPTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                if request.headers["x-headrace-resume"] != "0":
                    request.url = httpx.URL(new.url + CHAT)
                return await super().handle_async_request(request)

        assert await streamed(old.url, Moving()) == b"".join(EVENTS)


@pytest.mark.parametrize(
    "data",
    [
        b'{"choices":[{"text":"This gateway stops: \\"error\\" gateway_stopping"}]}',
        b'{"error":{"message":"gateway_stopping","code":"replica_lost"}}',
        b'{"error":"gateway_stopping"}',
        b'["gateway_stopping"]',
        b"gateway_stopping",
    ],
)
async def test_an_event_that_only_speaks_of_a_gateway_that_stops_is_the_streams(
    data: bytes,
) -> None:
    event = b"data: " + data + b"\n\n"
    async with gateway_over(tells(says(1), event, EVENTS[2])) as bench:
        assert (await streamed(bench.url, Cutting())).startswith(event)
        assert len(bench.replica.seen) == 1


class SyncCutting(httpx.HTTPTransport):
    """Breaks the first connection behind the first event."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [len(WHOLE[0]) + len(WHOLE[1])]

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        response.stream = Cut(response.stream, self.sizes.pop() if self.sizes else 10**9)
        return response


async def test_threads_may_stream_likewise() -> None:
    async with gateway_over(tells(*WHOLE)) as bench:
        got = list[bytes]()

        def ask() -> None:
            with (
                httpx.Client(transport=ResumingTransport(SyncCutting())) as client,
                client.stream("POST", bench.url + CHAT, json=ASKED) as response,
            ):
                got.append(response.read())

        await asyncio.to_thread(ask)
        assert got == [b"".join(EVENTS)]


async def test_openais_client_streams_over_a_break_as_the_docs_say() -> None:
    async with gateway_over(tells(*WHOLE)) as bench:

        def numbers() -> list[int]:
            http = httpx.Client(transport=ResumingTransport(SyncCutting()), timeout=600)
            with openai.OpenAI(base_url=bench.url + "/v1", api_key="none", http_client=http) as api:
                return [chunk.i for chunk in api.chat.completions.create(**ASKED)]

        assert await asyncio.to_thread(numbers) == [0, 1]
        transport = AsyncResumingTransport(Cutting(len(WHOLE[0]) + len(WHOLE[1])))
        http = httpx.AsyncClient(transport=transport, timeout=600)
        async with openai.AsyncOpenAI(
            base_url=bench.url + "/v1", api_key="none", http_client=http
        ) as api:
            stream = await api.chat.completions.create(**ASKED)
            assert [chunk.i async for chunk in stream] == [0, 1]


async def test_who_does_not_ask_for_it_sees_no_line() -> None:
    async with gateway_over(tells(*WHOLE)) as bench, httpx.AsyncClient(timeout=60) as client:
        plain = await client.post(bench.url + CHAT, json=ASKED)
        wants = await client.post(bench.url + CHAT, json=ASKED, headers={"x-headrace-resume": "0"})
    assert plain.content == b"".join(EVENTS) and "x-headrace-resume" not in plain.headers
    assert wants.content == b"".join(WHOLE) and wants.headers["x-headrace-resume"] == "1"


@pytest.mark.parametrize("told", ["-1", "x", "1e3", "9" * 13, "100000"])
async def test_a_wrong_header_is_refused_by_its_name(told: str) -> None:
    async with gateway_over(tells(*WHOLE)) as bench, httpx.AsyncClient(timeout=60) as client:
        got = await client.post(bench.url + CHAT, json=ASKED, headers={"x-headrace-resume": told})
        assert (got.status_code, got.json()["error"]["param"]) == (400, "x-headrace-resume")
        assert bench.replica.seen == []


async def test_a_stream_that_said_it_cannot_be_taken_up_is_not_resumed() -> None:
    had = encode_line("it has two prompts") + EVENTS[0]
    async with gateway_over(tells(*WHOLE)) as bench, httpx.AsyncClient(timeout=60) as client:
        got = await client.post(
            bench.url + CHAT,
            content=had + httpx.Request("POST", bench.url, json=ASKED).content,
            headers={"x-headrace-resume": str(len(had)), "content-type": "application/json"},
        )
        assert (got.status_code, got.json()["error"]["code"]) == (409, "cannot_resume")
        assert "two prompts" in got.json()["error"]["message"]


async def test_a_replica_that_tells_nothing_neither_begins_nor_resumes_such_a_stream() -> None:
    async with gateway_over(stream) as bench, httpx.AsyncClient(timeout=60) as client:
        began = await client.post(bench.url + CHAT, json=ASKED, headers={"x-headrace-resume": "0"})
        assert "x-headrace-resume" not in began.headers
        had = says(1) + EVENTS[0]
        got = await client.post(
            bench.url + CHAT,
            content=had + httpx.Request("POST", bench.url, json=ASKED).content,
            headers={"x-headrace-resume": str(len(had)), "content-type": "application/json"},
        )
        assert (got.status_code, got.json()["error"]["code"]) == (409, "cannot_resume")


async def test_a_break_that_nobody_can_mend_is_the_callers() -> None:
    async def refuses(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=400)

    async with gateway_over(tells(*WHOLE)) as bench:
        with pytest.raises(httpx.ReadError, match="cut"):
            await streamed(bench.url, Cutting(30, *[None] * 99))
    async with gateway_over(refuses) as bench:
        cutting = Cutting(30)
        cutting.sizes = [10**9]
        assert b'"no"' in await streamed(bench.url, cutting)
