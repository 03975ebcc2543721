"""An engine's line to its node's StoreNode: asks without waiting, and does without a dead node.

No call blocks or raises. Each `ask_locate` gets an answer through `poll`: the node's, or "nothing"
once the node is known to be absent or has not answered within `timeout_s`. Then the line is *down*:
asking costs a look at the clock, and every `retry_s` a ping finds out whether a node is there
again. No request is sent before that ping was answered, so none waits for a node that is not known
to live.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import zmq

from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.protocol import wire

LINE_QUEUE = 1000
"""Messages that may wait for a node that does not read; more are not sent."""


@dataclass(frozen=True)
class Answer:
    """Where the leading blocks of an `ask_locate` lie; none if the node has none or is away."""

    request_key: str
    locations: list[Location]


@dataclass(frozen=True, slots=True)
class _Asked:
    request_key: str
    digest: bytes
    hashes: list[bytes]
    until_s: float
    found: list[Location] | None = None
    """Said already, while a peer's blocks are being pulled into DRAM."""


class NodeClient:
    """Thread-safe. One process: a forked child makes its own.

    Args:
        name: of the arena whose node it is.
        timeout_s: longest wait for an answer, and for a ping's.
        retry_s: time between looks for a node that was away.
        socket_folder: where the node's socket is; None for the system's temporary folder.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float = 0.05,
        retry_s: float = 3.0,
        socket_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.timeout_s, self.retry_s = timeout_s, retry_s
        self._path = wire.socket_path(name, socket_folder)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._state: Literal["up", "trying", "down", "closed"] = "down"
        self._try_until_s = self._retry_at_s = 0.0
        self._ping_id = wire.NO_REPLY
        self._last_id = wire.NO_REPLY
        self._asked: dict[int, _Asked] = {}
        self._answers: list[Answer] = []
        self._counts: Counter[str] = Counter()
        with self._lock:
            self._turn()

    @property
    def up(self) -> bool:
        """Whether a node is known to be there."""
        with self._lock:
            self._turn()
            return self._state == "up"

    def ask_locate(
        self,
        request_key: str,
        digest: bytes,
        hashes: Sequence[bytes],
        lease_s: float = 30.0,
        compute_s: float = 0.0,
    ) -> None:
        """Ask which leading blocks can be read from NVMe, and to keep those for `lease_s`.

        If the node has more of them pulled into DRAM from a peer, the answer comes once that is
        over, or no longer worth waiting for. compute_s: what computing a block takes; 0: unknown.
        """
        with self._lock:
            self._turn()
            names = [bytes(name) for name in hashes]
            lease_s = min(lease_s, wire.MAX_LEASE_S)
            id = self._send(wire.Locate(request_key, digest, names, lease_s, compute_s), reply=True)
            if id is None:
                self._answers.append(Answer(request_key, []))
            else:
                until_s = time.monotonic() + self.timeout_s
                self._asked[id] = _Asked(request_key, digest, names, until_s)

    def poll(self) -> list[Answer]:
        """Answers that have come since the last call."""
        with self._lock:
            self._turn()
            answers, self._answers = self._answers, []
            return answers

    def prefetch(self, digest: bytes, hashes: Sequence[bytes], priority: int = 0) -> bool:
        """Have blocks brought into DRAM; False if there is no node to do it."""
        return self._tell(wire.Prefetch(digest, [bytes(h) for h in hashes], priority))

    def report_bad(self, digest: bytes, hashes: Sequence[bytes], tier: str = "nvme") -> bool:
        """Have blocks dropped whose bytes did not verify; False if there is no node to do it."""
        return self._tell(wire.ReportBad(digest, [bytes(h) for h in hashes], tier))

    def pin(self, digest: bytes, hashes: Sequence[bytes]) -> bool:
        """Have blocks kept in every tier where they are; False if there is no node to do it."""
        return self._tell(wire.Pin(digest, [bytes(h) for h in hashes]))

    def unpin(self, digest: bytes, hashes: Sequence[bytes]) -> bool:
        """Let pinned blocks go again; False if there is no node to do it."""
        return self._tell(wire.Pin(digest, [bytes(h) for h in hashes], pinned=False))

    def stats(self) -> dict[str, Any]:
        """JSON-able: the line's state, and counts."""
        with self._lock:
            return {"state": self._state, "asked": len(self._asked), **self._counts}

    def close(self) -> None:
        """Hang up. Later calls find no node."""
        with self._lock:
            self._hang_up()
            self._state = "closed"
            self._context.term()

    # The lock is held in all that follows.

    def _tell(self, body: wire.Message) -> bool:
        with self._lock:
            self._turn()
            return self._send(body, reply=False) is not None

    def _turn(self) -> None:
        """Read what has come, and see what is overdue."""
        if self._state == "closed":
            return
        now_s = time.monotonic()
        if self._state == "down":
            if now_s < self._retry_at_s:
                return
            self._dial(now_s)
        self._receive()
        if self._state == "trying":
            if not self._ping_id:
                self._ping()
            if now_s > self._try_until_s:
                self._go_down(now_s)
        else:
            self._give_up(now_s)

    def _give_up(self, now_s: float) -> None:
        """Wait no longer for what is overdue: for a pull without the node being to blame."""
        for id, asked in [each for each in self._asked.items() if now_s > each[1].until_s]:
            if asked.found is None:
                self._counts["timeouts"] += 1
                self._go_down(now_s)
                return
            self._counts["pull_timeouts"] += 1
            del self._asked[id]
            self._answers.append(Answer(asked.request_key, asked.found))

    def _dial(self, now_s: float) -> None:
        """Look for a node: its socket must be there, and this user's."""
        try:
            ours = self._path.stat().st_uid == os.geteuid()
        except OSError:
            ours = False
        if not ours:
            self._retry_at_s = now_s + self.retry_s
            return
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a node that is not there
        self._socket.setsockopt(zmq.SNDHWM, LINE_QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        self._socket.connect(f"ipc://{self._path}")
        self._state, self._try_until_s = "trying", now_s + self.timeout_s
        self._ping()

    def _ping(self) -> None:
        self._ping_id = self._put(wire.Ping(), reply=True) or wire.NO_REPLY

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            try:
                id, body = wire.decode_reply(frames[-1])
                self._take(id, body)
            except wire.WireError:
                self._counts["unreadable"] += 1

    def _take(self, id: int, body: wire.Reply) -> None:
        if id and id == self._ping_id:
            if isinstance(body, wire.Done):
                self._state = "up"
            else:  # a node of another version
                self._go_down(time.monotonic())
            return
        asked = self._asked.pop(id, None)
        if asked is None:
            return
        locations: list[Location] = []
        waits = False
        try:
            if isinstance(body, wire.Located):
                locations = wire.unpack_locations(body, asked.digest, asked.hashes)
                waits = body.pulling > 0
        finally:
            if not waits:
                self._answers.append(Answer(asked.request_key, locations))
        if isinstance(body, wire.Located) and waits:
            until_s = time.monotonic() + min(body.wait_s, wire.MAX_LEASE_S)
            self._asked[id] = replace(asked, until_s=until_s, found=locations)
            return
        self._counts["answers"] += 1

    def _send(self, body: wire.Message, reply: bool) -> int | None:
        id = self._put(body, reply) if self._state == "up" else None
        if id is None:
            self._counts["unsent"] += 1
            if self._state == "up":
                self._go_down(time.monotonic())
        return id

    def _put(self, body: wire.Message, reply: bool) -> int | None:
        """Send, if that takes no waiting; the message's id."""
        assert self._socket is not None
        if reply:
            self._last_id += 1
        id = self._last_id if reply else wire.NO_REPLY
        try:
            self._socket.send(wire.encode(id, body), zmq.NOBLOCK)
        except zmq.ZMQError:
            return None
        return id

    def _go_down(self, now_s: float) -> None:
        self._hang_up()
        self._state, self._retry_at_s = "down", now_s + self.retry_s

    def _hang_up(self) -> None:
        """With a new line later, no late reply comes through."""
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
        self._ping_id = wire.NO_REPLY
        self._answers += [Answer(asked.request_key, []) for asked in self._asked.values()]
        self._asked.clear()


def call(
    name: str,
    request: wire.Request,
    timeout_s: float = 5.0,
    socket_folder: str | os.PathLike[str] | None = None,
) -> wire.Reply:
    """Ask a node once and wait: for tools and tests, not for engines.

    Raises:
        TimeoutError: no answer in time, or no node.
        wire.WireError: an answer that cannot be read.
    """
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{wire.socket_path(name, socket_folder)}")
        socket.send(wire.encode(1, request))
        if not socket.poll(int(1e3 * timeout_s)):
            raise TimeoutError(f"the store node of {name} did not answer within {timeout_s} s")
        return wire.decode_reply(socket.recv())[1]
    finally:
        context.destroy(0)
