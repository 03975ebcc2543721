"""The connections to the replicas' HTTP servers: one request out, one byte stream back.

The module uses `httptools`, the parser of the gateway's own server. A stream costs the gateway CPU
time for every chunk, and a general HTTP client costs more for a chunk than all of the gateway's
other work on it (docs/benchmarks.md).

A connection carries one request at a time. It is kept for the next request if the response reached
its marked end, no bytes followed, and the request was written whole; otherwise it is closed.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from functools import lru_cache
from typing import cast
from urllib.parse import quote, urlsplit

from headrace.gateway.errors import Headers
from headrace.gateway.upstream_reply import ReplicaLost, Reply

__all__ = ["KEEPALIVE_S", "ReplicaLost", "Reply", "Upstream"]

# Far below the 75 s for which a replica keeps an idle connection (`http_server.KEEPALIVE_S`), so
# that the replica never closes a connection just as a request is sent on it.
KEEPALIVE_S = 4.0
CONNECT_TIMEOUT_S = 5.0
_SILENT_PEER = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""TCP keep-alive options: a connection detects a vanished machine within about 30 s."""
_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_PLAIN = re.compile(r'[!$-~"]+')
"""Characters that a request's target may have: visible ASCII without `#`."""
_SAFE = "".join(map(chr, range(0x21, 0x7F))).replace("#", "")

Address = tuple[str, int]


class Upstream:
    """A pool of kept-alive connections to replicas, bound to the event loop in which it is made.

    Args:
        connect_timeout_s: limit for each attempt to connect.
    """

    def __init__(self, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self.open_connections: set[_Connection] = set()
        self._idle: dict[Address, dict[_Connection, float]] = {}  # loop time of their last use
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def send(
        self, base_url: str, method: str, target: str, headers: Headers, body: bytes
    ) -> Reply:
        """Send a request and wait for the head of its response.

        An idempotent request is sent again when a kept connection turns out to be dead.

        Args:
            base_url: `http://ip:port`.
            target: path and query.

        Raises:
            ReplicaLost: there is no connection, or no response on it.
            RuntimeError: the pool is closed.
            ValueError: a header holds a line break.
        """
        if self._closed:
            raise RuntimeError("the connections are closed")
        address, host = _address(base_url)
        head = _head(method, target, host, headers, body)
        connection = self._take_idle(address)
        if connection is not None:
            try:
                return await _ask(connection, method, head, body)
            except _Stale:
                if method not in _IDEMPOTENT:
                    raise
        return await _ask(await self._connect(address), method, head, body)

    async def aclose(self) -> None:
        """Close every connection."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self.open_connections):
            connection.close()
        await asyncio.sleep(0)

    def _take_idle(self, address: Address) -> _Connection | None:
        """Return the idle connection that was used last, or None if there is none."""
        idle = self._idle.get(address)
        while idle:
            connection, since_s = idle.popitem()
            if self._loop.time() - since_s < KEEPALIVE_S and connection.is_open():
                return connection
            connection.close()
        return None

    async def _connect(self, address: Address) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(address, self._on_idle, self._on_close), *address
                )
        except OSError as error:  # TimeoutError is one
            raise ReplicaLost(f"cannot connect: {error!r}", sent=False) from error
        if self._closed:
            connection.close()
        if connection.is_open():
            self.open_connections.add(connection)
        return connection

    def _on_idle(self, connection: _Connection) -> None:
        if self._closed:
            connection.close()
            return
        self._idle.setdefault(connection.address, {})[connection] = self._loop.time()
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(KEEPALIVE_S, self._sweep)

    def _on_close(self, connection: _Connection) -> None:
        self.open_connections.discard(connection)
        idle = self._idle.get(connection.address, {})
        idle.pop(connection, None)

    def _sweep(self) -> None:
        """Close connections that have been idle for `KEEPALIVE_S`."""
        until_s = self._loop.time() - KEEPALIVE_S
        for address, idle in list(self._idle.items()):
            for connection in [one for one, since_s in idle.items() if since_s <= until_s]:
                connection.close()
            if not idle:
                del self._idle[address]
        self._sweeper = self._loop.call_later(KEEPALIVE_S, self._sweep) if self._idle else None


class _Stale(ReplicaLost):
    """The error of a kept connection that was closed before a byte of the response arrived."""


class _Connection(asyncio.Protocol):
    """One connection.

    Args:
        address: address of the replica.
        on_idle: called when the connection may carry another request.
        on_close: called when the connection is closed.
    """

    def __init__(
        self,
        address: Address,
        on_idle: Callable[[_Connection], None],
        on_close: Callable[[_Connection], None],
    ) -> None:
        self.address = address
        self.uses = 0
        self._on_idle, self._on_close = on_idle, on_close
        self._reply: Reply | None = None
        self._transport: asyncio.Transport | None = None

    def is_open(self) -> bool:
        """Return whether a request can be written."""
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, method: str, head: bytes, body: bytes) -> Reply:
        """Write a request, and return the reply that will receive the response."""
        assert self._transport is not None
        self.uses += 1
        self._reply = Reply(method, self)
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)
        return self._reply

    def close(self) -> None:
        """Close the connection at once; unwritten bytes are dropped."""
        transport, self._transport = self._transport, None
        reply, self._reply = self._reply, None
        if transport is not None:
            transport.abort()
        self._on_close(self)
        if reply is not None:
            reply.lose("the gateway closed the connection")

    # The methods of `upstream_reply.ReplyConnection`.

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def release(self, *, clean: bool) -> None:
        self._reply = None
        transport = self._transport
        if clean and transport is not None and not transport.get_write_buffer_size():
            self._on_idle(self)
        else:
            self.close()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in _SILENT_PEER:
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    def data_received(self, data: bytes) -> None:
        if self._reply is not None:
            self._reply.feed(data)
        else:
            self.close()  # bytes without a request

    def eof_received(self) -> None:
        if self._reply is not None:
            self._reply.eof()
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None:
            self._reply.lose(f"the connection broke: {exc!r}")
        self.close()


async def _ask(connection: _Connection, method: str, head: bytes, body: bytes) -> Reply:
    """Send a request on a connection, and return the reply once its head has arrived.

    Raises:
        ReplicaLost: the connection broke before the head arrived.
    """
    if not connection.is_open():
        raise ReplicaLost("the replica hung up at once", sent=False)
    kept = connection.uses > 0
    reply = connection.ask(method, head, body)
    try:
        await reply.head()
    except ReplicaLost as lost:
        if kept and not reply.began:
            raise _Stale(str(lost), sent=True) from lost
        raise
    except BaseException:
        reply.close()
        raise
    return reply


@lru_cache(maxsize=1024)
def _address(base_url: str) -> tuple[Address, bytes]:
    """Return the address to connect to, and the value of the `Host` header."""
    parts = urlsplit(base_url)
    return (parts.hostname or "", parts.port or 80), parts.netloc.encode()


def _head(method: str, target: str, host: bytes, headers: Headers, body: bytes) -> bytes:
    """Return the request's head.

    Raises:
        ValueError: a header holds a line break or a null byte.
    """
    if not _PLAIN.fullmatch(target):
        target = quote(target, safe=_SAFE)
    lines = [f"{method} {target} HTTP/1.1".encode(), b"host: " + host]
    lines += [name + b": " + value for name, value in headers]
    if body or method not in _WITHOUT_BODY:
        lines.append(b"content-length: %d" % len(body))
    head = b"\r\n".join([*lines, b"", b""])
    ends = len(lines) + 1
    if head.count(b"\n") != ends or head.count(b"\r") != ends or b"\0" in head:
        raise ValueError("a header holds a line break")
    return head
