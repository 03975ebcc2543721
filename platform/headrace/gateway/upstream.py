"""The connection to a replica's HTTP server: one request out, one byte stream back."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp
from yarl import URL

from headrace.gateway.errors import Headers

# Below uvicorn's default of 5 s, so that the replica is never the one to close an idle connection
# just as a request goes out on it.
KEEPALIVE_S = 4.0
_SKIP = frozenset({"User-Agent", "Accept", "Accept-Encoding", "Content-Type"})


class ReplicaLost(Exception):
    """The replica did not answer, or not to the end.

    Args:
        why: what happened, for the log.
        sent: whether the replica may have begun to work on the request.
        dying: whether the replica is there and says that it cannot go on.
        hangs: whether its health check has failed already.
    """

    def __init__(self, why: str, *, sent: bool, dying: bool = False, hangs: bool = False) -> None:
        super().__init__(why)
        self.sent = sent
        self.dying = dying
        self.hangs = hangs


class Reply:
    """A response whose head has arrived."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._readany = response.content.readany
        self.status = response.status
        self.headers: Headers = [(name.lower(), value) for name, value in response.raw_headers]

    async def read_some(self) -> bytes:
        """The bytes that have arrived, at least one; `b""` at the end.

        Raises:
            ReplicaLost: the connection broke before the end.
        """
        try:
            return await self._readany()
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(repr(error), sent=True) from error

    def close(self) -> None:
        """Give the connection back after the end of the response; break it off before."""
        self._response.close()


class Upstream:
    """A pool of kept-alive connections to replicas, bound to the event loop that it is made in.

    Args:
        connect_timeout_s: limit for each attempt to connect.
    """

    def __init__(self, connect_timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEPALIVE_S, socket_factory=_socket
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_SKIP,
            trust_env=False,
        )
        self._urls: dict[tuple[str, str], URL] = {}

    async def send(
        self, base_url: str, method: str, target: str, headers: Headers, body: bytes
    ) -> Reply:
        """Send a request and wait for the head of its response.

        Args:
            base_url: `http://ip:port`.
            target: path and query.

        Raises:
            ReplicaLost: no connection, or no response on it.
        """
        key = (base_url, target)
        url = self._urls.get(key)
        if url is None:
            url = URL(base_url + target, encoded=True)
            if len(self._urls) < 1000:
                self._urls[key] = url
        text = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        try:
            response = await self._session.request(
                method, url, data=body or None, headers=text, allow_redirects=False
            )
        except aiohttp.ClientConnectorError as error:
            raise ReplicaLost(repr(error), sent=False) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise ReplicaLost(repr(error), sent=False) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaLost(repr(error), sent=True) from error
        return Reply(response)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._session.close()


def _socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket that notices within about 30 s that the other machine is gone without a word."""
    sock = socket.socket(family=address[0], type=address[1], proto=address[2])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return sock
