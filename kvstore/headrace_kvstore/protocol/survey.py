"""What a machine's StoreNode could supply of a prompt: asked by whoever plans, answered at once.

The node knows what lies on its disk, follows its peers' events with replay, and lists the object
store; it prices what would have to be pulled. A survey reads, leases and counts nothing. The line
waits `limit_s` at most, without blocking its event loop. A node that does not answer, or has no
tier below DRAM, is left alone for `retry_s`: whoever plans then knows of DRAM only.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio

from headrace_kvstore.protocol import wire
from headrace_kvstore.supply import Supply, common

MOST_BLOCKS = 1024
"""Asked for at once, as by an engine."""
LIMIT_S, RETRY_S = 0.01, 1.0
"""A node that lives answers within a millisecond."""


class Surveyor:
    """The line to the node of one arena; used from one event loop.

    Args:
        name: of the arena.
        limit_s: longest wait for an answer.
        retry_s: for how long a node that gave none, or has no tier below DRAM, is not asked again.
        socket_folder: where the node's socket is; None for the system's temporary folder.
    """

    def __init__(
        self,
        name: str,
        *,
        limit_s: float = LIMIT_S,
        retry_s: float = RETRY_S,
        socket_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._path = wire.socket_path(name, socket_folder)
        self._limit_s, self._retry_s, self._retry_at_s = limit_s, retry_s, 0.0
        self._context: zmq.asyncio.Context | None = None
        self._idle: list[zmq.asyncio.Socket] = []

    async def supplies(
        self, digests: Sequence[bytes], hashes: Sequence[bytes], compute_s: float
    ) -> list[Supply]:
        """The leading run of these blocks that every worker's part of could be had, by medium;
        nothing where the node is away. Never raises.

        Args:
            digests: namespaces, one a worker.
            compute_s: what computing a block takes: what is pulled in no less counts as nothing.
        """
        if not digests or not hashes or time.monotonic() < self._retry_at_s or not self._is_ours():
            return []
        names = [bytes(name) for name in hashes[:MOST_BLOCKS]]
        asked = (self._ask(wire.Survey(digest, names, compute_s)) for digest in digests)
        return common(await asyncio.gather(*asked))

    def close(self) -> None:
        """Hang up."""
        context, self._context = self._context, None
        if context is not None:
            context.destroy(0)
        self._idle.clear()

    def _is_ours(self) -> bool:
        try:
            return self._path.stat().st_uid == os.geteuid()
        except OSError:
            return False

    async def _ask(self, question: wire.Survey) -> list[Supply]:
        """One question at a time on a socket, and one that got no answer is closed: no answer that
        comes late is taken for another's."""
        socket = self._idle.pop() if self._idle else self._dial()
        try:
            await socket.send(wire.encode(1, question))
            if await socket.poll(int(1e3 * self._limit_s)):
                _, reply = wire.decode_reply(await socket.recv())
                if isinstance(reply, wire.Surveyed):
                    self._idle.append(socket)
                    if not reply.below:
                        self._pause()
                    return [Supply(*run) for run in reply.runs]
        except (zmq.ZMQError, wire.WireError):
            pass
        finally:
            if socket not in self._idle:
                socket.close(0)
        self._pause()
        return []

    def _pause(self) -> None:
        self._retry_at_s = time.monotonic() + self._retry_s

    def _dial(self) -> zmq.asyncio.Socket:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.connect(f"ipc://{self._path}")
        return socket
