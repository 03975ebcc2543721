"""One client's connection: uvicorn's HTTP/1.1, with a limit in bytes and in time in every state.

uvicorn limits the time between two requests and nothing else. Here each connection has one timer,
which every change of state sets again:

| state | time | bytes |
| --- | --- | --- |
| no request yet, or a part of a head | `HEAD_TIMEOUT_S` | `MAX_HEAD_BYTES` |
| between two requests | uvicorn's keep-alive time | none |
| a body, its chunk headers and trailers | the application's | `max_body_bytes`, `OVERHEAD` |
| an answer that the client does not read | `send_timeout_s`, and `MIN_RATE` | its written bytes |
| after the last answer | `LINGER_S`, and `MIN_RATE` | `LINGER_BYTES` |

The application limits the time of a request itself: it has `ABORT_EXTENSION` for that.

An answer that begins before the request's end is the connection's last, because the bytes that the
client still sends are not the next request. The connection then lingers: it is closed for writing,
and for a moment received bytes are read and dropped. Closing it at once would reset it, and a reset
may destroy the answer before the client has read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.gateway.asgi import (
    ABORT_EXTENSION,
    WRITE_EXTENSION,
    ASGIApp,
    Receive,
    Scope,
    Send,
)
from headrace.gateway.errors import ApiError
from headrace.gateway.ingress.deadline_timer import DeadlineTimer
from headrace.gateway.ingress.response_sender import ResponseSender

HEAD_TIMEOUT_S = 15.0
MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of a head, and of consecutive bytes without a body: chunk extensions, trailers."""
OVERHEAD = 1
"""Maximum bytes of framing for each byte of a body, beyond the first `MAX_HEAD_BYTES`. Chunks of
one byte have five, and each costs as much as one of 64 KiB."""
BODY_MARGIN_BYTES = 1 << 20
"""Bytes above `max_body_bytes` after which the connection ends. The application refuses such a body
in the shape of its API, but only in its next turn of the loop."""
SEND_TIMEOUT_S = 30.0
"""Seconds for a client to read while more than 64 KiB of its answer wait. nginx's `send_timeout`
is 60."""
MAPPED = "::ffff:"
"""Prefix of IPv4 addresses at a socket for both families; proxies and limits are set without it."""
MIN_RATE = 4096
"""Minimum rate in bytes a second at which a client has to read waiting bytes, after that time."""
LINGER_S = 2.0
LINGER_BYTES = 16 * 1024 * 1024
"""Maximum bytes that a lingering connection reads; a body that is too large is usually smaller."""
STOPPING_LINGER_S = 5.0
"""Time for which clients of a stopping server may still use an idle connection. Most clients close
connections that have been idle for that long, and then send no request on a closing one."""
GOODBYE_S = 0.5
"""Time for an idle client to confirm the end of TLS. Many never do, and Python waits half a
minute."""
HEAD_SLICE, BODY_SLICE = 4 * 1024, 64 * 1024
"""Bytes parsed before the connection's state is checked. 4 KiB hold 227 requests of the shortest
kind, each of which costs 25 microseconds and 3 KB until it is answered."""

SECURITY_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
"""Headers of each answer, so that browsers do not guess its type and caches do not keep it."""

_HEAD_TOO_LARGE = f"The request's head is larger than {MAX_HEAD_BYTES} bytes."


class _RefusedError(ValueError):
    """The error that a callback of the parser raises, with the status and message to answer."""


class Connection(HttpToolsProtocol):
    """A client's connection.

    Args:
        max_body_bytes: maximum body of one request; None for no limit but the application's.
        long_bodies: that of the requests for some paths, if it is larger, by path.
        send_timeout_s: `SEND_TIMEOUT_S`, or longer for a client that stops reading on purpose.
    """

    def __init__(
        self,
        *args: Any,
        max_body_bytes: int | None = None,
        long_bodies: Mapping[str, int] | None = None,
        send_timeout_s: float = SEND_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._max_body_bytes, self._send_timeout_s = max_body_bytes, send_timeout_s
        self._long_bodies = long_bodies or {}
        self._last = False  # the server stops
        self._active: RequestResponseCycle | None = None  # the request that is answered now
        self._unparsed = b""
        self._refusal: tuple[int, str] | None = None  # the answer to bytes that cannot be parsed
        self._lingers = False
        self._dropped_bytes = 0
        # State of the message that is being parsed.
        self._in_head = self._in_body = self._completed = False
        self._head_bytes = self._raw_bytes = self._body_bytes = self._barren_bytes = 0
        self._body_follows = self._framed_again = False
        self._pieces: list[bytes] = []  # pieces of the body since the parser was last fed
        self._deadline = DeadlineTimer(self.loop)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None and self.client[0].startswith(MAPPED):
            self.client = self.client[0].removeprefix(MAPPED), self.client[1]
        self._deadline.set(HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        self._unparsed = b""
        self.pipeline.clear()
        active = self._active
        super().connection_lost(exc)
        if active is not None and active is not self.cycle and not active.response_complete:
            active.disconnected = True  # uvicorn notifies the newest request only
            active.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._lingers or self._refusal is not None:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES:
                self.flow.pause_reading()
            return
        self._unparsed = self._unparsed + data if self._unparsed else data
        if self.pipeline:  # another request already waits for its turn
            self.flow.pause_reading()
        else:
            self._parse()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._settle()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._settle()

    def shutdown(self) -> None:
        """Close the connection as the server stops; a request on its way here is still answered."""
        self._last = True
        if self._is_idle():
            self.loop.call_later(STOPPING_LINGER_S, self._close_if_idle)
        else:
            super().shutdown()

    # Parsing.

    def _parse(self) -> None:
        """Parse the received bytes, up to the second request without an answer."""
        data, at = memoryview(self._unparsed), 0
        while at < len(data) and not (self.pipeline or self._lingers or self._refusal):
            if self.transport.is_closing():
                break
            piece = data[at : at + (BODY_SLICE if self._in_body else HEAD_SLICE)]
            body_bytes, self._completed = self._body_bytes, False
            used = len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                used = upgrade.args[0]
                self._ignore_upgrade()
            except _RefusedError as error:
                self._refuse(*error.args)
            except httptools.HttpParserError as error:
                cause = error.__context__
                why = cause.args if isinstance(cause, _RefusedError) else None
                self._refuse(*(why or (400, "This is not a valid HTTP request.")))
            else:
                self._check_bytes(used, self._body_bytes - body_bytes)
            self._pass_on_body()
            at += used
        self._unparsed = bytes(data[at:]) if self.pipeline else b""

    def _check_bytes(self, came: int, of_body: int) -> None:
        """Refuse a request with too many bytes where no callback of the parser sees them."""
        if not self._in_body:
            self._raw_bytes = 0 if self._completed else self._raw_bytes + came
            if self._raw_bytes > MAX_HEAD_BYTES:
                self._refuse(431, _HEAD_TOO_LARGE)
            return
        self._raw_bytes += came
        self._barren_bytes = 0 if of_body else self._barren_bytes + came
        overhead = self._raw_bytes - self._body_bytes
        maximum = MAX_HEAD_BYTES + HEAD_SLICE
        if self._barren_bytes > maximum or overhead > maximum + OVERHEAD * self._body_bytes:
            self._refuse(400, "The request has too many bytes that are no part of its body.")
        elif self._max_body_bytes is not None and self._body_bytes > self._max_body_bytes:
            limit = self._long_bodies.get(self.scope["path"], self._max_body_bytes)
            if self._body_bytes > limit + BODY_MARGIN_BYTES:
                self._refuse(413, f"The request body is larger than {limit} bytes.")

    def _ignore_upgrade(self) -> None:
        """Continue to read, as a server that does not know the protocol must (RFC 9110, 7.8).

        The parser has skipped the body. A second parser reads it, after a head that has only the
        headers which determine the body's end.
        """
        if not self._body_follows:
            return
        self._body_follows = False
        self._framed_again = True
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        framing = [
            name + b": " + value + b"\r\n"
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"]))

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._framed_again:
            return
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()
        extensions: Any = {WRITE_EXTENSION: self._write_at_once, ABORT_EXTENSION: self._hang_up}
        self.scope["extensions"] = extensions
        if self._active is None:
            self._deadline.set(HEAD_TIMEOUT_S, self._head_is_late)

    def on_url(self, url: bytes) -> None:
        if not self._framed_again:
            self._count_head(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and not self._framed_again:
            self._count_head(len(name) + len(value) + 4)
            super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _RefusedError(431, _HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        if self._framed_again:
            self._framed_again = False
            return
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise _RefusedError(400, "The request has more than one Host header.")
        if self.parser.should_upgrade():
            self._body_follows = any(
                name == b"transfer-encoding" or (name == b"content-length" and int(value) > 0)
                for name, value in self.headers
            )
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        self._raw_bytes = self._body_bytes = self._barren_bytes = 0
        if self._last:
            self.cycle.keep_alive = False  # the answer tells the client
        self._settle()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._pieces.append(body)

    def _pass_on_body(self) -> None:
        """Give the application all received pieces at once, since chunks may have one byte each."""
        if not self._pieces:
            return
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.body += b"".join(self._pieces)
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()
        self._pieces.clear()

    def on_message_complete(self) -> None:
        if not self._body_follows:
            self._pass_on_body()
            self._in_body, self._completed = False, True
            super().on_message_complete()

    # Answering.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, partial(self._run, cycle, app))

    async def _run(
        self, cycle: RequestResponseCycle, app: ASGIApp, scope: Scope, receive: Receive, _: Send
    ) -> None:
        try:
            await app(scope, receive, ResponseSender(cycle, self.linger).send)
        finally:
            self.loop.call_soon(self._bound_closing)

    def _write_at_once(self, piece: bytes) -> bool:
        """Write a piece of a body of unknown length, as uvicorn's `send` does."""
        cycle = self.cycle  # the newest request, which may wait for the one that writes
        if self.flow.write_paused or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self._active = None
        if self.transport.is_closing():
            self._bound_closing()
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        if self._unparsed:
            self.loop.call_soon(self._parse_on)
        elif self._refusal is not None and self._active is None:
            self._write_refusal()
            return
        self._settle()

    def _parse_on(self) -> None:
        if self._unparsed and not self.pipeline and not self.transport.is_closing():
            self._parse()

    def _hang_up(self) -> None:
        """End the connection: at once if the client does not read the answer under way."""
        if self._active is not None:
            self.transport.abort()
        else:
            self.linger()

    # Ending.

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Refuse a request outside ASGI, after the answers to requests before it, and hang up."""
        if self._lingers or self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = status, message
        self._unparsed = b""
        cycle = self.cycle
        if self._in_body:  # the request under way is incomplete
            if self.pipeline:
                self.pipeline.clear()
            elif cycle.response_started and not cycle.response_complete:
                self.transport.abort()
            elif not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                self._active = None
        if self._active is None:
            self._write_refusal()

    def _write_refusal(self) -> None:
        assert self._refusal is not None
        status, message = self._refusal
        body = ApiError(status, message, code="bad_http").body()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
        head += f"content-length: {len(body)}\r\n"
        kept = (b"%s: %s\r\n" % header for header in self.server_state.default_headers)
        self.transport.write(b"".join([head.encode(), *kept, b"\r\n", body]))
        self.linger()

    def linger(self) -> None:
        """Stop writing; read and drop received bytes for a moment, then close."""
        if self._lingers or self.transport.is_closing():
            return
        self._lingers = True
        self._unparsed = b""
        self.flow.resume_reading()
        self._deadline.set(self._time_to_read(LINGER_S), self.transport.abort)
        if self.transport.can_write_eof():
            try:
                self.transport.write_eof()
            except OSError:  # the client has disconnected
                self.transport.abort()

    def _bound_closing(self) -> None:
        """Limit the time that a closing transport waits for the client to read all bytes."""
        if self.transport.is_closing() and not self._lingers:
            self._deadline.set(self._time_to_read(self._send_timeout_s), self.transport.abort)

    def _time_to_read(self, least_s: float) -> float:
        return least_s + self.transport.get_write_buffer_size() / MIN_RATE

    def _is_idle(self) -> bool:
        return self._active is None

    def _close_if_idle(self) -> None:
        if self._is_idle() and not self.transport.is_closing():
            self._end()

    def _end(self) -> None:
        self.transport.close()
        self._deadline.set(GOODBYE_S, self.transport.abort)

    def _head_is_late(self) -> None:
        if self._in_head:
            self._refuse(408, f"The request's head did not arrive within {HEAD_TIMEOUT_S:g} s.")
        else:
            self._end()

    def _settle(self) -> None:
        """Set the timer for the state that the connection is in."""
        if self._lingers or self.transport.is_closing():
            return
        if self.flow.write_paused:
            self._deadline.set(self._time_to_read(self._send_timeout_s), self.transport.abort)
        elif self._active is not None:
            self._deadline.clear()
        elif self._in_head:
            self._deadline.set(HEAD_TIMEOUT_S, self._head_is_late)
        else:
            self._deadline.set(self.timeout_keep_alive, self._end)
