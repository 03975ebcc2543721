"""Serving an ASGI app on a socket of our own, inside an event loop that already runs.

uvicorn does the work. Added here: a clear error for a port that is taken, ports shared between
processes, no touching of the process's signals, limits for slow and endless request heads (uvicorn
has none), and faults of HTTP answered in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.config.tlsfiles import TlsFiles
from headrace.gateway.asgi import WRITE_AT_ONCE
from headrace.gateway.door.tls import ReloadingContext
from headrace.gateway.errors import ApiError

BACKLOG = 2048
KEEPALIVE_S = 75.0
HEAD_TIMEOUT_S = 15.0
MAX_HEAD_BYTES = 64 * 1024
SECURITY_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
"""On each answer: no browser guesses its type, and nobody on the way keeps it."""
HSTS = (b"strict-transport-security", b"max-age=31536000")
"""On each answer over TLS: a browser that has seen it speaks no plain HTTP here for a year."""
LINGER_S = 5.0
"""For clients of a server that stops to use a connection once more. Most close one that has been
idle for that long, so they do not send a request on one that is being closed."""
GOODBYE_S = 0.5
"""For an idle client to confirm the end of TLS. Many never do, and Python waits half a minute."""


class PortTakenError(OSError):
    """The address is in use, or not ours to use; the message says what to do, in one line."""


class Server:
    """A server that runs as a task of the current loop; made by `serve_gateway`."""

    def __init__(self, server: uvicorn.Server, sock: socket.socket) -> None:
        self._server = server
        self.host: str = sock.getsockname()[0]
        self.port: int = sock.getsockname()[1]
        self._task = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]))

    async def started(self) -> None:
        """Wait until connections are accepted.

        Raises:
            RuntimeError: the app's startup failed.
        """
        while not self._server.started:
            if self._task.done():
                raise RuntimeError("the HTTP server did not start; the log says why")
            await asyncio.sleep(0.005)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Accept no more, let requests end for `grace_s` seconds, then cancel them."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    """uvicorn's server without its hold on the process's signals; its end resets no connection."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but clients that wait to be accepted are accepted before the sockets
        close, which would reset their connections. On a busy loop they are many."""
        waiting = [conn for sock in sockets or () for conn in _waiting_at(sock)]
        taken = [asyncio.ensure_future(self._take(conn)) for conn in waiting]
        await super().shutdown(sockets)
        await asyncio.gather(*taken, return_exceptions=True)

    async def _take(self, conn: socket.socket) -> None:
        config, loop = self.config, asyncio.get_running_loop()

        def protocol() -> _Protocol:
            return _Protocol(config, self.server_state, self.lifespan.state)

        _, made = await loop.connect_accepted_socket(protocol, conn, ssl=config.ssl)
        made.shutdown()


def _waiting_at(sock: socket.socket) -> Iterator[socket.socket]:
    """The connections that nobody has accepted."""
    while True:
        try:
            yield sock.accept()[0]
        except OSError:
            return


class _Protocol(HttpToolsProtocol):
    """HTTP/1.1 with a time and a size limit for request heads, and an end that loses no request."""

    _last = False
    _head_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_has_come()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._head_has_come()
                self._refuse(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        if not self._in_head:
            self._expect_head()
        super().on_message_begin()
        self.scope["extensions"] = {WRITE_AT_ONCE: self._write_at_once}  # type: ignore[dict-item]

    def _write_at_once(self, piece: bytes) -> bool:
        """What uvicorn's `send` does with a piece of a body whose length is unknown."""
        cycle = self.cycle  # of the newest request, which may wait for the one that writes
        if self.flow.write_paused or not cycle.chunked_encoding or cycle.response_complete:
            return False
        if not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def on_headers_complete(self) -> None:
        self._head_has_come()
        super().on_headers_complete()
        if self._last and self.cycle is not None:
            self.cycle.keep_alive = False  # the answer says so

    def shutdown(self) -> None:
        """The server stops: a request that is on its way here is still answered."""
        self._last = True
        if self._is_idle():
            self.loop.call_later(LINGER_S, self._close_if_idle)
        else:
            super().shutdown()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_if_idle(self) -> None:
        if self._is_idle() and not self.transport.is_closing():
            self.transport.close()
            self.loop.call_later(GOODBYE_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        self._head_has_come()
        self._refuse(400, msg)

    def _expect_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_has_come(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            if self._head_bytes:
                self._refuse(408, f"The request's head did not arrive within {HEAD_TIMEOUT_S:g} s.")
            else:
                self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer outside ASGI, since there is no request, and hang up."""
        body = ApiError(status, message, code="bad_http").body()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
        head += f"content-length: {len(body)}\r\n"
        kept = (b"%s: %s\r\n" % header for header in SECURITY_HEADERS)
        self.transport.write(b"".join([head.encode(), *kept, b"\r\n", body]))
        self.transport.close()


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A listening TCP socket.

    Args:
        port: 0 takes a free one.
        reuse_port: let other processes that ask for it too listen on the same port; the kernel
            spreads the connections.

    Raises:
        PortTakenError: the port is in use or not allowed.
    """
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except socket.gaierror as error:
        why = f"cannot listen on {host} ({error.strerror}); set gateway.host"
        raise PortTakenError(why) from error
    # asyncio sends without delay (TCP_NODELAY) only on sockets whose protocol is named.
    sock = socket.socket(address[0], socket.SOCK_STREAM, address[2])
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address[4])
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        taken = error.errno == errno.EADDRINUSE
        why = "is taken" if taken else f"cannot be used ({error.strerror})"
        raise PortTakenError(f"port {port} on {host} {why}; set gateway.port to another") from error
    sock.setblocking(False)
    return sock


async def serve_gateway(
    app: Any,
    host: str,
    port: int,
    *,
    reuse_port: bool = False,
    keepalive_s: float = KEEPALIVE_S,
    trusted_proxies: Sequence[str] = (),
    tls: TlsFiles | None = None,
) -> Server:
    """Serve an ASGI app from the current event loop; returns once it accepts connections.

    Args:
        app: any ASGI callable.
        port: 0 takes a free one; the server's `port` tells which.
        reuse_port: share the port with other processes that do the same.
        keepalive_s: how long an idle connection is kept.
        trusted_proxies: addresses and networks whose X-Forwarded-For names the client. From anybody
            else the header is the client's own word and changes nothing.
        tls: speak HTTPS only, with these files, which are read again when they change.

    Raises:
        ValueError: the TLS files cannot be used.
        PortTakenError: the port cannot be had.
        RuntimeError: the app's startup failed.
    """
    context = None if tls is None else ReloadingContext(tls)
    headers = [*SECURITY_HEADERS, HSTS] if tls else SECURITY_HEADERS
    config = uvicorn.Config(
        app,
        loop="none",
        http=_Protocol,
        ws="none",
        lifespan="auto",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, round(keepalive_s)),
        # Both are given: uvicorn's defaults believe what FORWARDED_ALLOW_IPS says.
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        headers=[(name.decode(), value.decode()) for name, value in headers],
        ssl_context_factory=None if context is None else lambda *_: context,
    )
    server = Server(_Server(config), bind(host, port, reuse_port=reuse_port))
    await server.started()
    return server
