"""Clients of StoreNodes: of this machine's, and of another's. Any thread may ask, no call blocks.

`ask` returns a future; a thread of the client sends and receives. A caller that may block waits
for the future, an event loop wraps it, an engine's step checks whether it is done. Every future
ends: with the node's reply, or with `NodeUnavailable` if there is no node or it does not answer
within `timeout_s`. The client then does not try again for `retry_s`. A request during that time
fails at once, and costs one look at the clock.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.address import connect

MAX_WAITING = 1000
"""Maximum number of requests that wait for the thread or the node; further ones are refused."""
CONNECT_POLL_MS = 50


class NodeUnavailable(TimeoutError):
    """Error: there is no node, or it does not answer in time. `late`: the node is there, but this
    one request took longer than the caller allowed."""

    late = False


@dataclass(eq=False)
class _PendingRequest:
    request: wire.Message
    wants_reply: bool
    limit_s: float | None = None
    """Time limit of this request; None for the client's own. Only if the client's own limit is
    exceeded, the node counts as away."""
    answer: Future[Any] = field(default_factory=Future)
    until_s: float = math.inf
    found: wire.Located | None = None
    """First part of the answer, while the blocks after it are being pulled into DRAM."""

    def resolve(self, reply: Any) -> None:
        if self.found is not None and isinstance(reply, NodeUnavailable):
            self.answer.set_result(self.found)
        elif isinstance(reply, NodeUnavailable):
            self.answer.set_exception(reply)
        else:
            self.answer.set_result(reply)


class Client:
    """Client of a node. Thread-safe. The thread starts with the first request. A forked child makes
    its own client.

    Args:
        endpoint: ZeroMQ's, of the node.
        decode: decodes a frame into id and reply; raises WireError.
        prepare: called with each socket before it connects; may raise OSError.
        timeout_s: maximum wait for an answer.
        retry_s: time for which a node that was away is not asked.
        context: shared with other clients; None for one of its own.
    """

    def __init__(
        self,
        endpoint: str,
        decode: wire.Decode,
        prepare: Callable[[zmq.Socket[bytes]], None],
        timeout_s: float,
        retry_s: float,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        self.endpoint, self.timeout_s, self.retry_s = endpoint, timeout_s, retry_s
        self._decode, self._prepare = decode, prepare
        self._lock = threading.Lock()
        self._outbox: deque[_PendingRequest] = deque()
        self._pending: dict[int, _PendingRequest] = {}
        self._last_id = wire.NO_REPLY
        self._away_until_s = 0.0
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._bell = -1
        self._socket: zmq.Socket[bytes] | None = None
        self._context, self._owns_context = context, context is None
        self._thread: threading.Thread | None = None

    def ask(self, request: wire.Message, limit_s: float | None = None) -> Future[Any]:
        """Send a request; return a future of the reply, which raises `NodeUnavailable` and nothing
        else.

        A `Locate` whose blocks are being pulled is answered once the pull is over or no longer
        worth waiting for. `limit_s` replaces `timeout_s`; the node does not count as away if it is
        exceeded.
        """
        pending = _PendingRequest(request, True, limit_s)
        pending.answer.set_running_or_notify_cancel()
        if not self._queue(pending):
            pending.resolve(NodeUnavailable(f"no store node answers at {self.endpoint}"))
        return pending.answer

    def send(self, request: wire.Message) -> bool:
        """Send a request without an answer; return False if it was not sent: the node is away, the
        queue is full, or the client is closed."""
        return self._queue(_PendingRequest(request, False))

    def stats(self) -> dict[str, Any]:
        """Return JSON-able counts, and whether the node is away."""
        away = time.monotonic() < self._away_until_s
        return {"away": away, "asked": len(self._pending), **self._counts}

    def close(self, wait: bool = True) -> None:
        """Disconnect. Later requests find no node."""
        with self._lock:
            before, self._closed = self._closed, True
            if self._thread is not None and not before:
                os.eventfd_write(self._bell, 1)
        if self._thread is not None and wait:
            self._thread.join()

    def _queue(self, pending: _PendingRequest) -> bool:
        with self._lock:
            full = len(self._outbox) + len(self._pending) >= MAX_WAITING
            if self._closed or full or time.monotonic() < self._away_until_s:
                self._counts["unsent"] += 1
                return False
            if self._thread is None:
                self._context = self._context or zmq.Context()
                self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._run, name="kv-client", daemon=True)
                self._thread.start()
            self._outbox.append(pending)
            os.eventfd_write(self._bell, 1)
            return True

    # The thread

    def _run(self) -> None:
        while not self._closed:
            self._wait()
            while self._outbox:
                self._send(self._outbox.popleft())
            self._receive()
            self._expire()
        self._disconnect("closed")
        with self._lock:
            os.close(self._bell)
        if self._owns_context and self._context is not None:
            self._context.term()

    def _wait(self) -> None:
        """Wait until there is a request to send, a reply to receive, or an overdue answer."""
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, zmq.POLLIN)
        next_s = min((pending.until_s for pending in self._pending.values()), default=math.inf)
        left_s = next_s - time.monotonic()
        poller.poll(None if math.isinf(left_s) else max(0, math.ceil(1e3 * left_s)))
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _send(self, pending: _PendingRequest) -> None:
        self._last_id += pending.wants_reply
        id = self._last_id if pending.wants_reply else wire.NO_REPLY
        if pending.wants_reply:
            pending.until_s = time.monotonic() + (pending.limit_s or self.timeout_s)
            self._pending[id] = pending
        try:
            self._socket = self._socket or self._connect()
            self._socket.send(wire.encode(id, pending.request), zmq.NOBLOCK)
        except (OSError, zmq.ZMQError) as error:
            self._disconnect(str(error))

    def _connect(self) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            # ZeroMQ may refuse frames once half as many wait, and the node would count as away.
            socket.setsockopt(zmq.SNDHWM, 4 * MAX_WAITING)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a node that is not there
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
            self._prepare(socket)
            connect(socket, self.endpoint)
            until_s = time.monotonic() + self.timeout_s
            while not socket.poll(CONNECT_POLL_MS, zmq.POLLOUT):
                if self._closed or time.monotonic() > until_s:
                    raise ConnectionRefusedError("nobody listens")
        except BaseException:
            socket.close(0)
            raise
        return socket

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            try:
                self._on_reply(*self._decode(frame))
            except wire.WireError as error:
                self._counts["unreadable"] += 1
                self._on_reply(error.id, wire.Failed(str(error)))

    def _on_reply(self, id: int, reply: Any) -> None:
        pending = self._pending.get(id)
        if pending is None:
            return
        if isinstance(reply, wire.Located) and reply.pulling > 0 and pending.found is None:
            pending.found = msgspec.structs.replace(reply, pulling=0)
            pending.until_s = time.monotonic() + min(reply.wait_s, wire.MAX_LEASE_S)
            return
        del self._pending[id]
        self._counts["answers"] += 1
        pending.resolve(reply)

    def _expire(self) -> None:
        """Stop waiting for overdue answers. After a late pull the node does not count as away."""
        now_s = time.monotonic()
        for id, pending in [each for each in self._pending.items() if now_s > each[1].until_s]:
            if pending.found is None and pending.limit_s is None:
                self._counts["timeouts"] += 1
                self._disconnect(f"no answer within {self.timeout_s:g} s")
                return
            self._counts["late"] += 1
            late = NodeUnavailable(f"{self.endpoint}: no answer in time")
            late.late = True
            self._pending.pop(id).resolve(late)

    def _disconnect(self, reason: str) -> None:
        """Answer all requests with `NodeUnavailable`. A new socket is made later, so late replies
        are lost."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
        with self._lock:
            self._away_until_s = time.monotonic() + self.retry_s
            waiting = [*self._pending.values(), *(a for a in self._outbox if a.wants_reply)]
            self._pending.clear()
            self._outbox.clear()
        for pending in waiting:
            pending.resolve(NodeUnavailable(f"{self.endpoint}: {reason}"))


class NodeClient(Client):
    """Client of this machine's node.

    Args:
        name: of the arena whose node it is.
        socket_folder: where the node's socket is; None for the system's temporary folder.
        timeout_s, retry_s: as `Client`.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float = 1.0,
        retry_s: float = 3.0,
        socket_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        path = wire.socket_path(name, socket_folder)

        def is_mine(_: zmq.Socket[bytes]) -> None:
            owner = path.stat().st_uid
            if owner != os.geteuid():
                raise PermissionError(f"belongs to user {owner}")

        super().__init__(f"ipc://{path}", wire.decode_reply, is_mine, timeout_s, retry_s)


def call(
    name: str,
    request: wire.Request,
    timeout_s: float = 5.0,
    socket_folder: str | os.PathLike[str] | None = None,
) -> wire.Reply:
    """Ask a node once and wait. Raises NodeUnavailable."""
    client = NodeClient(name, timeout_s=timeout_s, socket_folder=socket_folder)
    try:
        return client.ask(request).result()
    finally:
        client.close()
