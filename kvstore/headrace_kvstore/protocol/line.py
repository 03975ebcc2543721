"""A line to the node of this machine for a thread of its own that may wait; `client` has the one
for threads that may not."""

from __future__ import annotations

import os

import zmq

from headrace_kvstore.protocol import wire


class NodeAway(Exception):
    """No node is there, it does not answer in time, or it cannot do what it is asked."""


class Line:
    """One thread at a time; connects when it is used first.

    Args:
        name: of the arena whose node it is.
        socket_folder: where the node's socket is; None for the system's temporary folder.
        timeout_s: longest wait for the node, and then for its answer.
    """

    def __init__(
        self,
        name: str,
        socket_folder: str | os.PathLike[str] | None = None,
        timeout_s: float = 1.0,
    ) -> None:
        self._path = wire.socket_path(name, socket_folder)
        self._timeout_ms = int(1e3 * timeout_s)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._last_id = wire.NO_REPLY

    def ask(self, request: wire.Request) -> wire.Reply:
        """The node's answer. Raises NodeAway."""
        self._last_id += 1
        try:
            socket = self._socket = self._socket or self._dial()
            socket.send(wire.encode(self._last_id, request))
            id, reply = wire.decode_reply(socket.recv())
        except (OSError, zmq.ZMQError, wire.WireError) as error:
            self.hang_up()
            raise NodeAway(f"{self._path}: {error}") from error
        if id != self._last_id or isinstance(reply, wire.Failed):
            self.hang_up()
            raise NodeAway(f"{self._path}: {reply}")
        return reply

    def hang_up(self) -> None:
        """With a new connection later, no late answer comes through."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def close(self) -> None:
        """For good."""
        self.hang_up()
        self._context.term()

    def _dial(self) -> zmq.Socket[bytes]:
        """The socket must be there, and this user's."""
        owner = self._path.stat().st_uid
        if owner != os.geteuid():
            raise PermissionError(f"belongs to user {owner}")
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a node that is not there
        socket.setsockopt(zmq.SNDTIMEO, self._timeout_ms)
        socket.setsockopt(zmq.RCVTIMEO, self._timeout_ms)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.connect(f"ipc://{self._path}")
        return socket
