"""A server for an ASGI app on a socket of our own, inside an event loop that already runs.

uvicorn does the work. This module adds a clear error for a port that is taken, and ports shared
between processes, and it leaves the process's signals alone. `ingress.connection` limits each
connection and answers faults of HTTP in OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import uvicorn

from headrace.config.tls_files import TlsFiles
from headrace.gateway.ingress.connection import SECURITY_HEADERS, SEND_TIMEOUT_S, Connection
from headrace.gateway.ingress.start_limiter import StartLimiter
from headrace.gateway.ingress.tls import ReloadingContext

BACKLOG = 2048
KEEPALIVE_S = 75.0
HSTS = (b"strict-transport-security", b"max-age=31536000")
"""Header of each answer over TLS: a browser that has seen it uses no plain HTTP here for a year."""
GATEWAY_READS_S = 3600.0
"""Seconds for a gateway to read an answer of a replica. A gateway stops reading while its own
client does, and ends such a client's connection itself."""
UNSENT_BYTES = 128 * 1024
"""Maximum bytes of an unread answer in the kernel (TCP_NOTSENT_LOWAT). By default these are
megabytes, and it takes long until a server notices that the client does not read."""


class PortTakenError(OSError):
    """The error of an address that is in use or cannot be used; its message is one line, and says
    what to do."""


class Server:
    """A server that runs as a task of the current loop; `serve_gateway` makes it."""

    def __init__(self, server: uvicorn.Server, sock: socket.socket) -> None:
        self.uvicorn_server = server
        self.host: str = sock.getsockname()[0]
        self.port: int = sock.getsockname()[1]
        self._task = asyncio.get_running_loop().create_task(server.serve(sockets=[sock]))

    async def started(self) -> None:
        """Wait until connections are accepted.

        Raises:
            RuntimeError: the app's startup failed.
        """
        while not self.uvicorn_server.started:
            if self._task.done():
                raise RuntimeError("the HTTP server did not start; the log says why")
            await asyncio.sleep(0.005)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Stop accepting connections, let requests end for `grace_s` seconds, then cancel them."""
        self.uvicorn_server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self.uvicorn_server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers; its shutdown resets no connection."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Run uvicorn's `shutdown`, but accept waiting clients before the sockets close.

        Closing the sockets would reset their connections. On a busy loop there are many.
        """
        waiting = [conn for sock in sockets or () for conn in _waiting_at(sock)]
        taken = [asyncio.ensure_future(self._take(conn)) for conn in waiting]
        await super().shutdown(sockets)
        await asyncio.gather(*taken, return_exceptions=True)

    async def _take(self, conn: socket.socket) -> None:
        config, loop = self.config, asyncio.get_running_loop()

        def protocol() -> Any:
            make: Any = config.http_protocol_class
            return make(config, self.server_state, self.lifespan.state)

        _, made = await loop.connect_accepted_socket(protocol, conn, ssl=config.ssl)
        made.shutdown()


def _waiting_at(sock: socket.socket) -> Iterator[socket.socket]:
    """Accept and yield the waiting connections of a socket."""
    while True:
        try:
            yield sock.accept()[0]
        except OSError:
            return


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Return a listening TCP socket.

    Args:
        host: name or address; `::` is all addresses of IPv6 and IPv4, or of IPv4 alone if IPv6 is
            switched off.
        port: number of the port; 0 takes a free one.
        reuse_port: let other processes that also set this listen on the same port; the kernel
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
    if host == "::" and not _has_ipv6():
        return bind("0.0.0.0", port, reuse_port=reuse_port)
    # asyncio sends without delay (TCP_NODELAY) only on sockets whose protocol is named.
    sock = socket.socket(address[0], socket.SOCK_STREAM, address[2])
    try:
        if host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # accepted sockets inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        sock.bind(address[4])
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        taken = error.errno == errno.EADDRINUSE
        why = "is taken" if taken else f"cannot be used ({error.strerror})"
        raise PortTakenError(f"port {port} on {host} {why}; set gateway.port to another") from error
    sock.setblocking(False)
    return sock


def _has_ipv6() -> bool:
    """Return whether this machine has IPv6, and it is not switched off."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


async def serve_gateway(
    app: Any,
    host: str,
    port: int,
    *,
    reuse_port: bool = False,
    keepalive_s: float = KEEPALIVE_S,
    trusted_proxies: Sequence[str] = (),
    tls: TlsFiles | None = None,
    max_body_bytes: int | None = None,
    long_bodies: Mapping[str, int] | None = None,
    send_timeout_s: float = SEND_TIMEOUT_S,
) -> Server:
    """Serve an ASGI app from the current event loop; returns once it accepts connections.

    Args:
        app: any ASGI callable.
        host: see `bind`.
        port: number of the port; 0 takes a free one, which is the server's `port`.
        reuse_port: share the port with other processes that do the same.
        keepalive_s: time for which an idle connection is kept.
        trusted_proxies: addresses and networks whose X-Forwarded-For names the client. From other
            clients the header is ignored.
        tls: speak HTTPS only, with these files, which are read again when they change.
        max_body_bytes: maximum body of one request, for bodies that the app does not refuse first.
            The app's own refusal is in the shape of its API.
        long_bodies: that of the requests for some paths, if it is larger, by path.
        send_timeout_s: time for which a client may leave an answer unread.

    Raises:
        ValueError: the TLS files cannot be used.
        PortTakenError: the port is in use or not allowed.
        RuntimeError: the app's startup failed.
    """
    context = None if tls is None else ReloadingContext(tls)
    headers = [*SECURITY_HEADERS, HSTS] if tls else SECURITY_HEADERS
    config = uvicorn.Config(
        StartLimiter(app),
        loop="none",
        http=partial(  # type: ignore[arg-type]
            Connection,
            max_body_bytes=max_body_bytes,
            long_bodies=long_bodies,
            send_timeout_s=send_timeout_s,
        ),
        ws="none",
        lifespan="auto",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, round(keepalive_s)),
        # Both are set, because uvicorn's default is the environment variable FORWARDED_ALLOW_IPS.
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        headers=[(name.decode(), value.decode()) for name, value in headers],
        ssl_context_factory=None if context is None else lambda *_: context,
    )
    server = Server(_Server(config), bind(host, port, reuse_port=reuse_port))
    await server.started()
    return server
