"""A response while it arrives: its head, and the body in pieces.

The connection feeds it bytes; one task reads it. The task may register a function that is called
with each piece at once, from the event loop's callback (`Reply.pour`). Under uvloop that saves a
switch of tasks and a second `epoll_pwait` for each piece.

A replica is not trusted to speak correct HTTP. Each of its faults ends in `ReplicaLost`. The memory
for its bytes is limited: for the head, for the unread body, and for bytes that are neither (chunk
extensions, trailers, interim responses). Bytes after the end do not change the response, since it
may be read before they arrive. They end the connection, so that they never answer the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import httptools

from headrace.gateway.errors import Headers

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of a head with the interim responses before it, and of consecutive bytes without a
body."""
MAX_WAITING_BYTES = 64 * 1024
"""Maximum size of the unread body; beyond it, reading from the connection pauses."""
_SWITCHING_PROTOCOLS = 101
_FIRST_FINAL, _BEHIND_LAST = 200, 600


class ReplicaLost(Exception):
    """The error of a replica that did not answer, or not to the end.

    Args:
        why: the cause, for the log.
        sent: whether the replica may have begun to work on the request.
        dying: whether the replica answered with an error, and its health check then failed.
        hangs: whether the replica hangs, by its health check.
    """

    def __init__(self, why: str, *, sent: bool, dying: bool = False, hangs: bool = False) -> None:
        super().__init__(why)
        self.sent = sent
        self.dying = dying
        self.hangs = hangs


class ReplyConnection(Protocol):
    """The connection on which a response arrives."""

    def pause_reading(self) -> None:
        """Stop reading from the replica for now."""

    def resume_reading(self) -> None:
        """Continue to read from the replica."""

    def release(self, *, clean: bool) -> None:
        """End the use of the connection by this response. The response calls it once.

        Args:
            clean: whether the connection may carry another request.
        """


class Reply:
    """A response. `status` and `headers` are set once its head has arrived.

    Args:
        method: method of the request.
        connection: the connection.

    Attributes:
        status: 200 to 599; 0 before the head has arrived.
        headers: headers with names in lower case.
        began: whether a byte of it has arrived.
    """

    def __init__(self, method: str, connection: ReplyConnection) -> None:
        self.status = 0
        self.headers: Headers = []
        self.began = False
        self._connection = connection
        self._bodiless = method == "HEAD"
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._barren_bytes = 0  # consecutive bytes without a body
        self._framed = False  # the body's end is marked
        self._keeps = False
        self._parsed: list[bytes] = []
        self._waiting = b""
        self._paused = False
        self._ended = False
        self._why: str | None = None  # why the response is lost
        self._left = False  # the connection no longer belongs to this response
        self._take: Callable[[bytes], bool] | None = None
        self._waiter: asyncio.Future[bool] | None = None

    # For the task that reads it.

    async def head(self) -> None:
        """Wait for the head.

        Raises:
            ReplicaLost: the connection broke before the head arrived.
        """
        while not self.status:
            self._check()
            await self._arrival()

    async def read_some(self) -> bytes:
        """Wait for bytes and return those that have arrived; `b""` at the end.

        Raises:
            ReplicaLost: the connection broke before the end.
        """
        while not self._waiting and not self._ended:
            self._check()
            await self._arrival()
        return self._taken()

    async def pour(self, take: Callable[[bytes], bool]) -> bool:
        """Call `take` with each piece of the body as it arrives.

        The calls often come from the event loop's callback, so `take` must not block. It takes the
        piece in any case, and returns whether it wants more at once.

        Returns:
            True at the end; False when `take` returned False.

        Raises:
            ReplicaLost: the connection broke before the end.
            Exception: what `take` raises.
        """
        while True:
            if self._waiting:
                if not take(self._taken()):
                    return False
            elif self._ended:
                return True
            else:
                self._check()
                self._take = take
                try:
                    if await self._arrival():
                        return False
                finally:
                    self._take = None

    def close(self) -> None:
        """Break the response off if it has not ended; its connection is then closed."""
        self._leave(clean=False)

    # For the connection that feeds it.

    def feed(self, data: bytes) -> None:
        """Parse bytes that arrived."""
        self.began = True
        why = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            why = f"bad HTTP: {error!r} {error.__context__ or ''}"
        if not self._parsed:
            piece = b""
            self._barren_bytes += len(data)
            if self._barren_bytes > MAX_HEAD_BYTES and not self._ended:
                why = f"more than {MAX_HEAD_BYTES} bytes without a body"
        else:
            piece = self._parsed[0] if len(self._parsed) == 1 else b"".join(self._parsed)
            self._parsed.clear()
            self._barren_bytes = 0
        if self._ended:
            self._leave(clean=self._keeps and why is None)
        elif why is not None:
            self.lose(why)
        if not piece or not self._poured(piece):
            self._waiting += piece
            if len(self._waiting) > MAX_WAITING_BYTES and not self._left and not self._paused:
                self._paused = True
                self._connection.pause_reading()
            self._wake()
        elif self._left:
            self._wake()

    def eof(self) -> None:
        """Handle that the replica closed its side: the end of a body whose end is not marked."""
        if self.status and not self._framed and not self._left:
            self._ended = True
            self._leave(clean=False)
            self._wake()
        else:
            self.lose("the replica hung up")

    def lose(self, why: str) -> None:
        """Record that the response is lost, because the connection broke or the HTTP is bad."""
        if not self._left:
            self._why = why
            self._leave(clean=False)
            self._wake()

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._ended:
            raise ValueError("bytes behind the end")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status:
            return  # a trailer
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"a head of more than {MAX_HEAD_BYTES} bytes")
        name = name.lower()
        if name == b"content-length" or (
            name == b"transfer-encoding" and value.lower().endswith(b"chunked")
        ):
            self._framed = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if _FIRST_FINAL <= status < _BEHIND_LAST:
            self.status = status
            # The parser cannot be told that the answer to HEAD has no body.
            self._keeps = self._parser.should_keep_alive() and not self._bodiless
            self._ended = self._bodiless
        elif 100 <= status < _FIRST_FINAL and status != _SWITCHING_PROTOCOLS:
            self.headers.clear()
            self._framed = False
        else:
            raise ValueError(f"status {status}")

    def on_body(self, data: bytes) -> None:
        if self._ended:
            raise ValueError("a body behind the end")
        self._parsed.append(data)

    def on_message_complete(self) -> None:
        if self.status:
            self._ended = True

    # Internal.

    def _check(self) -> None:
        if self._why is not None:
            raise ReplicaLost(self._why, sent=True)
        if self._left:
            raise ReplicaLost("closed", sent=True)

    def _taken(self) -> bytes:
        piece, self._waiting = self._waiting, b""
        if self._paused:
            self._paused = False
            if not self._left:
                self._connection.resume_reading()
        return piece

    def _poured(self, piece: bytes) -> bool:
        """Call the function given to `pour` with a piece, if the task waits there.

        Returns:
            Whether the function took the piece.
        """
        if self._take is None or self._waiting or self._waiter is None or self._waiter.done():
            return False
        try:
            if not self._take(piece):
                self._waiter.set_result(True)
        except Exception as error:
            self._waiter.set_exception(error)
        return True

    def _leave(self, *, clean: bool) -> None:
        if not self._left:
            self._left = True
            del self._parser  # it refers to this object
            if self._paused:
                self._connection.resume_reading()
            self._connection.release(clean=clean)

    async def _arrival(self) -> bool:
        """Wait for any change. Return whether the function given to `pour` wants no more."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)
