"""Transports for httpx clients: a client's streams outlive the gateway that relays them.

    client = openai.OpenAI(
        base_url=..., http_client=httpx.Client(transport=ResumingTransport(), timeout=600)
    )

`ResumingTransport` and `AsyncResumingTransport` are transports of httpx. OpenAI's client takes
clients of httpx, but since version 3 it is built on httpx2, so its `DefaultHttpxClient` does not
take these transports. They keep the events of each stream that have arrived. When its connection
breaks, they send the request again with these events, and any gateway can continue the stream
(`headrace.gateway.relay.client_resume`). The caller sees a pause. Servers that do not know the
header answer as usual.

A request whose connection breaks before its answer begins is sent again, at most twice. Where no
server listens, the caller gets the error at once.

A stream that has grown beyond `MAX_BYTES` cannot be resumed: the caller gets the error when it
breaks.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator

import httpx

from headrace_decode.resume.emitted import END, MARK, RESUME, STOPPING

MAX_BYTES = 6 * 2**20
PATIENCE_S = 60.0
"""Time from the break until a gateway has to continue the stream."""
LONGEST_PAUSE_S = 2.0
PAUSES_S = 0.1, 1.0
"""Pauses before a request without an answer is sent again."""

_REFUSED = MARK + b'"'
_LATER = frozenset({429, 500, 502, 503, 504})
_BREAKS = (httpx.NetworkError, httpx.RemoteProtocolError)
_UNANSWERED = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)
_NAME = RESUME.decode()


class _Stopping(httpx.RemoteProtocolError):
    """The error of a stream that its gateway ends because it shuts down."""


class _Stream:
    """The events of one stream that have arrived, and the request for the rest.

    Args:
        request: the request that was sent.
        response: its answer, a stream that can be resumed.
    """

    def __init__(self, request: httpx.Request, response: httpx.Response, patience_s: float) -> None:
        self._request, self._patience_s = request, patience_s
        self._id = response.headers.get("x-request-id", "")
        self._received, self._lines = bytearray(), b""  # up to the last event; lines after it
        self._tail = b""
        self._resumable = True
        self._until_s, self._pause_s = 0.0, 0.0

    def feed(self, chunk: bytes) -> bytes:
        """Return the events that are complete with `chunk`, without those for gateways.

        Raises:
            _Stopping: the rest has to come from another gateway.
        """
        chunk = self._tail + chunk
        cut = chunk.rfind(END) + len(END)
        if cut < len(END):
            self._tail = chunk
            return b""
        self._tail = chunk[cut:]
        events = []
        for part in chunk[:cut].split(END)[:-1]:
            if self._resumable and _says_it_stops(part):
                self._tail = b""
                raise _Stopping("the gateway stops")
            self._record(part)
            if not part.startswith(MARK):
                events.append(part + END)
        return b"".join(events)

    def rest(self) -> bytes:
        """Return the bytes after the last whole event, at the end of the stream."""
        return self._tail

    def on_break(self, error: httpx.TransportError) -> None:
        """Prepare to resume the stream, because the connection broke.

        Raises:
            httpx.TransportError: `error`, if the stream cannot be resumed.
        """
        if not self._resumable:
            raise error
        self._tail = self._lines = b""
        self._pause_s = 0.05
        self._until_s = time.monotonic() + self._patience_s

    def request(self) -> httpx.Request:
        """Return the request for the rest of the stream."""
        headers = self._request.headers.copy()
        headers.pop("content-length", None)
        headers[_NAME] = str(len(self._received))
        if self._id:
            headers["x-request-id"] = self._id
        return httpx.Request(
            self._request.method,
            self._request.url,
            headers=headers,
            content=bytes(self._received) + self._request.content,
            extensions=self._request.extensions,
        )

    def next_pause_s(
        self, answer: httpx.Response | httpx.TransportError, error: httpx.HTTPError
    ) -> float:
        """Return the seconds to wait before the next try; 0 if the answer is the rest of the
        stream.

        Args:
            error: the error that broke the stream.

        Raises:
            httpx.HTTPError: `error` or `answer`, if no gateway will continue the stream.
        """
        if isinstance(answer, httpx.Response):
            if _NAME in answer.headers:
                return 0.0
            if answer.status_code not in _LATER:
                raise error
        elif not isinstance(answer, (*_BREAKS, httpx.ConnectTimeout)):
            raise answer
        if time.monotonic() > self._until_s:
            raise error
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return self._pause_s

    def _record(self, part: bytes) -> None:
        if not self._resumable:
            return
        self._lines += part + END
        if part.startswith(_REFUSED) or len(self._received) + len(self._lines) > MAX_BYTES:
            self._resumable = False
            self._received.clear()
            self._lines = b""
        elif not part.startswith(MARK):
            self._received += self._lines
            self._lines = b""


class ResumingTransport(httpx.BaseTransport):
    """Transport that resumes streams; see the module.

    Args:
        transport: sends requests; httpx's own by default.
        patience_s: time from a break until a gateway has to continue the stream.
    """

    def __init__(
        self, transport: httpx.BaseTransport | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._inner = transport or httpx.HTTPTransport()
        self._patience_s = patience_s

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. If it asks for a stream, ask for one that can be resumed."""
        request.read()
        if not _asks_for_stream(request):
            return self._inner.handle_request(request)
        response = self._begin(_opted_in(request))
        if _NAME not in response.headers:
            return response
        stream = _SyncBody(self._inner, response, _Stream(request, response, self._patience_s))
        return _with_stream(response, stream)

    def _begin(self, request: httpx.Request) -> httpx.Response:
        for pause_s in PAUSES_S:
            try:
                return self._inner.handle_request(request)
            except _UNANSWERED:
                time.sleep(pause_s)
        return self._inner.handle_request(request)

    def close(self) -> None:
        """Close the connections."""
        self._inner.close()


class AsyncResumingTransport(httpx.AsyncBaseTransport):
    """Transport that resumes streams; see the module.

    Args:
        transport: sends requests; httpx's own by default.
        patience_s: time from a break until a gateway has to continue the stream.
    """

    def __init__(
        self, transport: httpx.AsyncBaseTransport | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._inner = transport or httpx.AsyncHTTPTransport()
        self._patience_s = patience_s

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request. If it asks for a stream, ask for one that can be resumed."""
        await request.aread()
        if not _asks_for_stream(request):
            return await self._inner.handle_async_request(request)
        response = await self._begin(_opted_in(request))
        if _NAME not in response.headers:
            return response
        stream = _AsyncBody(self._inner, response, _Stream(request, response, self._patience_s))
        return _with_stream(response, stream)

    async def _begin(self, request: httpx.Request) -> httpx.Response:
        for pause_s in PAUSES_S:
            try:
                return await self._inner.handle_async_request(request)
            except _UNANSWERED:
                await asyncio.sleep(pause_s)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class _SyncBody(httpx.SyncByteStream):
    def __init__(
        self, inner: httpx.BaseTransport, response: httpx.Response, stream: _Stream
    ) -> None:
        self._inner, self._response, self._stream = inner, response, stream

    def __iter__(self) -> Iterator[bytes]:
        while True:
            try:
                for chunk in self._response.iter_raw():
                    if events := self._stream.feed(chunk):
                        yield events
                yield self._stream.rest()
                return
            except _BREAKS as error:
                self._response.close()
                self._stream.on_break(error)
                self._resume(error)

    def _resume(self, error: httpx.HTTPError) -> None:
        while True:
            answer: httpx.Response | httpx.TransportError
            try:
                answer = self._response = self._inner.handle_request(self._stream.request())
            except httpx.TransportError as failed:
                answer = failed
            if not (pause_s := self._stream.next_pause_s(answer, error)):
                return
            self._response.close()
            time.sleep(pause_s)

    def close(self) -> None:
        self._response.close()


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(
        self, inner: httpx.AsyncBaseTransport, response: httpx.Response, stream: _Stream
    ) -> None:
        self._inner, self._response, self._stream = inner, response, stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async for chunk in self._response.aiter_raw():
                    if events := self._stream.feed(chunk):
                        yield events
                yield self._stream.rest()
                return
            except _BREAKS as error:
                await self._response.aclose()
                self._stream.on_break(error)
                await self._resume(error)

    async def _resume(self, error: httpx.HTTPError) -> None:
        while True:
            answer: httpx.Response | httpx.TransportError
            try:
                request = self._stream.request()
                answer = self._response = await self._inner.handle_async_request(request)
            except httpx.TransportError as failed:
                answer = failed
            if not (pause_s := self._stream.next_pause_s(answer, error)):
                return
            await self._response.aclose()
            await asyncio.sleep(pause_s)

    async def aclose(self) -> None:
        await self._response.aclose()


def _says_it_stops(event: bytes) -> bool:
    """Whether a gateway that shuts down ends the stream with this event."""
    if STOPPING.encode() not in event:
        return False
    data = b"".join(each[5:] for each in event.split(b"\n") if each.startswith(b"data:"))
    try:
        document = json.loads(data)
    except ValueError:
        return False
    error = document.get("error", document) if isinstance(document, dict) else None
    return isinstance(error, dict) and error.get("code") == STOPPING


def _asks_for_stream(request: httpx.Request) -> bool:
    """Whether the request asks for a stream, in the way that all of these APIs share."""
    if request.method != "POST" or b'"stream"' not in request.content:
        return False
    try:
        body = json.loads(request.content)
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("stream") is True


def _opted_in(request: httpx.Request) -> httpx.Request:
    request.headers[_NAME] = "0"
    return request


def _with_stream(
    response: httpx.Response, stream: httpx.SyncByteStream | httpx.AsyncByteStream
) -> httpx.Response:
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=stream,
        extensions=response.extensions,
    )
