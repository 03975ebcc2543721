"""Servers that answer the requests of clients and peers, with one thread for each socket.

Requests that take microseconds are answered at once. Others go to another thread, and their
replies are sent when they are ready. No frame, whatever it holds, ends the thread.

There is one node for each name. A file beside the socket is locked while the node lives, and the
kernel releases the lock when it dies. So the next node takes over the socket of a killed node,
but never that of a living one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from headrace_kvstore.lock_file import acquire_lock_file
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.membership import Membership
from headrace_kvstore.protocol.wakeup import WakeupSignal

logger = logging.getLogger("headrace.kvstore")

SLOW_AT_ONCE, STAGED_AT_ONCE = 64, 1024
"""Maximum number of requests that wait for the other thread, and of second replies that wait for a
pull."""
CLIENT_QUEUE = 64
"""Maximum number of frames in ZeroMQ's queue for one client, or from it."""
UNSENT_AT_ONCE = 2048
"""Maximum number of replies that wait for room in these queues; further ones are lost."""
BUSY_POLL_MS = 5


class StagedReply(NamedTuple):
    """A reply at once, and another one under the same id when there is more."""

    now: wire.Body
    later: Future[Any]


Handle = Callable[[Any], "wire.Body | Future[Any] | StagedReply"]


class NodeAlreadyRunning(RuntimeError):
    """Error: another node listens at this socket."""


class RpcServer:
    """Server of frames, which listens from the start. `handle` gives each reply, or a future of it,
    or both.

    Args:
        bind: binds the ROUTER socket that it is given; its errors are passed on.
        decode: decodes a frame into id and request; raises WireError.
        slow: kinds of requests whose reply may be a future; they are refused while `SLOW_AT_ONCE`
            wait, and no other kind is.
        name: of the thread.
        counts: gets the number of requests of each kind.
        members: the app's members, the only ones let in; None lets in all that reach the socket.
    """

    def __init__(
        self,
        bind: Callable[[zmq.Socket[bytes]], object],
        decode: wire.Decode,
        handle: Handle,
        slow: tuple[type[wire.Message], ...],
        name: str = "kv-node",
        counts: Counter[str] | None = None,
        members: Membership | None = None,
    ) -> None:
        self._decode, self._handle, self._kinds = decode, handle, slow
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._guard = None if members is None else members.guard(self._socket)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_REQUEST_BYTES)
            self._socket.set_hwm(CLIENT_QUEUE)
            # Without it ZeroMQ drops replies to a client whose queue is full, and says nothing.
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            bind(self._socket)
            self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self._destroy()
            raise
        self._slow: list[tuple[bytes, int, Future[Any]]] = []
        self._staged: list[tuple[bytes, int, Future[Any]]] = []
        self._unsent: dict[bytes, deque[bytes]] = {}
        self.counts = Counter() if counts is None else counts
        self._stop, self._wake = threading.Event(), WakeupSignal()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop listening for requests."""
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._wake.close()
            self._destroy()

    def _destroy(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                busy = self._slow or self._staged or self._unsent
                if self._socket in dict(self._poller.poll(BUSY_POLL_MS if busy else None)):
                    self._receive()
                self._slow = self._send_ready(self._slow)
                self._staged = self._send_ready(self._staged)
                self._send_waiting()
            except Exception:
                logger.exception("a request to the store node failed; it goes on")

    def _receive(self) -> None:
        client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        try:
            if len(frames) != 1:
                raise wire.WireError(f"a message is one frame, not {len(frames)}")
            id, request = self._decode(frames[0])
        except wire.WireError as error:
            self.counts["malformed"] += 1
            # The sender's id may be unreadable: answer under the id that was read, if any.
            self._send(client, error.id, wire.Failed(str(error)))
            return
        self.counts[type(request).__name__.lower()] += 1
        if len(self._slow) >= SLOW_AT_ONCE and isinstance(request, self._kinds):
            self.counts["busy"] += 1
            self._answer(client, id, wire.Failed("the node is busy"))
            return
        try:
            reply = self._handle(request)
        except Exception as error:
            logger.exception("request %s failed", type(request).__name__)
            reply = wire.Failed(repr(error))
        self._answer(client, id, reply)

    def _answer(self, client: bytes, id: int, reply: wire.Body | Future[Any] | StagedReply) -> None:
        if isinstance(reply, StagedReply):
            if len(self._staged) < STAGED_AT_ONCE:
                self._staged.append((client, id, reply.later))
            reply = reply.now
        if isinstance(reply, Future):
            self._slow.append((client, id, reply))
        elif id != wire.NO_REPLY:
            self._send(client, id, reply)

    def _send_ready(
        self, queue: list[tuple[bytes, int, Future[Any]]]
    ) -> list[tuple[bytes, int, Future[Any]]]:
        """Send the replies that are ready; return those that are not."""
        waiting = []
        for client, id, future in queue:
            if not future.done():
                waiting.append((client, id, future))
                continue
            error = future.exception()
            if error is not None:
                self.counts["failed"] += 1
                logger.warning("a request failed: %r", error)
            self._answer(client, id, wire.Failed(repr(error)) if error else future.result())
        return waiting

    def _send(self, client: bytes, id: int, reply: wire.Body) -> None:
        """Send a reply, after those that wait for the same client."""
        frame, waiting = wire.encode(id, reply), self._unsent.get(client)
        if waiting is None and self._is_sent(client, frame):
            return
        if sum(map(len, self._unsent.values())) >= UNSENT_AT_ONCE:
            self.counts["unsent"] += 1
            return
        self._unsent.setdefault(client, deque()).append(frame)

    def _send_waiting(self) -> None:
        """Send the replies for which there is room by now."""
        for client, frames in list(self._unsent.items()):
            while frames and self._is_sent(client, frames[0]):
                frames.popleft()
            if not frames:
                del self._unsent[client]

    def _is_sent(self, client: bytes, frame: bytes) -> bool:
        """Send a frame; return False if its client's queue is full. A client that has disconnected
        gets none."""
        try:
            self._socket.send_multipart((client, frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            self.counts["unsent"] += 1
        return True


class NodeServer(RpcServer):
    """Server at the socket that engines know by the arena's name.

    Raises:
        NodeAlreadyRunning: another node has this socket.
    """

    def __init__(self, path: Path, handle: Handle, counts: Counter[str] | None = None) -> None:
        self.path = path
        try:
            self._lock_fd = acquire_lock_file(path.with_suffix(".lock"))
        except BlockingIOError as error:
            raise NodeAlreadyRunning(f"another store node listens at {path}") from error
        try:
            super().__init__(
                *(lambda s: _bind_private(s, path), wire.decode_request, handle, wire.SLOW),
                counts=counts,
            )
        except BaseException:
            self._disown()
            raise

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop listening for requests, and remove the socket."""
        super().close(timeout_s)
        self._disown()

    def _disown(self) -> None:
        self.path.unlink(missing_ok=True)
        self.path.with_suffix(".lock").unlink(missing_ok=True)
        os.close(self._lock_fd)


def _bind_private(socket: zmq.Socket[bytes], path: Path) -> None:
    """Bind with mode 0600 from the first moment."""
    before = os.umask(0o177)
    try:
        socket.bind(f"ipc://{path}")
    finally:
        os.umask(before)
