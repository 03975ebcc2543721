"""This node's connection to one peer: its identity, its health, its blocks, and requests to it.

Only the thread of `Peers` uses the sockets; other threads put requests into `outbox`. The peer
is greeted every `HELLO_S`. Its answer names its generation, its memory and its event ports. A
new generation means a new peer under the same address, and everything known of the old one is
dropped. Each answer also says how many batches of events there were, so that missed ones are
replayed. New notes on its board are fetched every `BOARD_S`, `BOARD_BYTES` at a time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from headrace_kvstore.breaker import Breaker
from headrace_kvstore.fitting import LinearTime
from headrace_kvstore.peers import messages
from headrace_kvstore.peers.agent import PullError
from headrace_kvstore.peers.directory import Directory
from headrace_kvstore.peers.messages import Failed, Hello, Leased, Notes, Welcome
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.board import Board
from headrace_kvstore.protocol.events import EventBatch

logger = logging.getLogger("headrace.kvstore")

HELLO_S = 1.0
ANSWER_S = 3.0
"""A peer that does not answer a greeting for so long is down."""
REPLAY_S = 5.0
RETRY_S = 0.1
FAILURES, LONGEST = 3, 16
"""Pulls that fail in a row until a peer is left alone; how often the pause doubles, as a factor."""
BOARD_S = 0.2
BOARD_BYTES = 2**19
LINE_QUEUE = 1000

_batches = msgspec.msgpack.Decoder(EventBatch)


@dataclass(frozen=True)
class _Asked:
    answer: Future[Any]
    until_s: float


class Link:
    """One peer.

    Args:
        address: HOST:PORT of its peers' socket.
        directory: told what it holds, under its address.
        board: gets the notes of its board.
        is_own: whether a generation is this node's own: a list of all nodes may name this one too.
        pause_s: of the breaker, at first.
    """

    def __init__(
        self,
        address: str,
        context: zmq.Context[Any],
        directory: Directory,
        board: Board,
        is_own: Callable[[str], bool],
        pause_s: float,
    ) -> None:
        self.address, self._context, self._directory = address, context, directory
        self._board, self._is_own = board, is_own
        self.host = address.rpartition(":")[0]
        self.state = "down"
        self.reason = "not answered yet"
        self.welcome: Welcome | None = None
        self.breaker = Breaker(FAILURES, pause_s, LONGEST * pause_s)
        self.costs: dict[str, LinearTime] = {}
        self.counts: Counter[str] = Counter()
        self.outbox: deque[tuple[wire.Message, Future[Any] | None, float]] = deque()
        self._asked: dict[int, _Asked] = {}
        self._last_id = wire.NO_REPLY
        self._hello: tuple[int, float] | None = None
        self._hello_at_s = 0.0
        self._notes: tuple[int, float] | None = None
        self._notes_at_s = 0.0
        self._read = "", 0
        """Generation of its board, and how far it was read."""
        self._replaying_until_s = 0.0
        self._events: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._line = self._dial(zmq.DEALER, f"tcp://{address}")

    def sockets(self) -> list[zmq.Socket[bytes]]:
        """To be polled."""
        return [s for s in (self._line, self._events, self._replay) if s is not None]

    def turn(self) -> None:
        """Send the outbox, read all answers, greet the peer, and end overdue requests."""
        while self.outbox:
            body, answer, until_s = self.outbox.popleft()
            if answer is None:
                if self.state == "up":
                    self._put(wire.encode(wire.NO_REPLY, body))
                continue
            id = self._send(body) if self.state == "up" else None
            if id is None:
                _fail(answer, "down")
            else:
                self._asked[id] = _Asked(answer, until_s)
        for frames in _received(self._line):
            self._take(frames[-1])
        if self._events is not None:
            for frames in _received(self._events):
                self._take_batch(frames[1:])
        if self._replay is not None:
            for frames in _received(self._replay):
                self._take_batch(frames[2:])
        now_s = time.monotonic()
        for id in [n for n, asked in self._asked.items() if now_s > asked.until_s]:
            self.counts["lease_timeouts"] += 1
            _fail(self._asked.pop(id).answer, "slow")
        if self._hello is not None and now_s > self._hello[1]:
            self._go_down("does not answer")
        if self._hello is None and now_s >= self._hello_at_s:
            id = self._send(Hello())
            self._hello_at_s = now_s + (RETRY_S if id is None else HELLO_S)
            if id is not None:
                self._hello = id, now_s + ANSWER_S
            elif self.state == "up":
                self._go_down("is not there")
        if self.state == "up":
            self._ask_notes(now_s)

    def lost(self) -> None:
        """Its memory is gone, or its connection: greet it anew before it is asked again."""
        self._hello_at_s = 0.0

    def close(self) -> None:
        """Disconnect."""
        self._go_down("closed")
        while self.outbox:
            _, answer, _ = self.outbox.popleft()
            if answer is not None:
                _fail(answer, "down")
        self._line.close(0)

    def stats(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "state": self.state,
            "reason": self.reason,
            "breaker_opened": self.breaker.opened,
            "generation": "" if self.welcome is None else self.welcome.generation,
            "blocks": {m: self._directory.blocks(self.address, m) for m in ("DRAM", "NVME")},
            **self.counts,
        }

    # Inside

    def _dial(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.setsockopt(zmq.RCVHWM, 0)
        else:
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.SNDHWM, LINE_QUEUE)
        socket.connect(endpoint)
        return socket

    def _send(self, body: wire.Message) -> int | None:
        self._last_id += 1
        return self._last_id if self._put(wire.encode(self._last_id, body)) else None

    def _put(self, frame: bytes) -> bool:
        try:
            self._line.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:  # nobody listens there now
            return False
        return True

    def _take(self, frame: bytes) -> None:
        try:
            id, body = messages.decode_reply(frame)
        except wire.WireError as error:
            self.counts["unreadable"] += 1
            id, body = error.id, Failed(str(error))
        if self._hello is not None and id == self._hello[0]:
            self._hello = None
            if isinstance(body, Welcome):
                self._welcomed(body)
            else:
                self._go_down(body.reason if isinstance(body, Failed) else "speaks nonsense")
            return
        if self._notes is not None and id == self._notes[0]:
            self._notes = None
            if isinstance(body, Notes):
                self._take_notes(body)
            return
        asked = self._asked.pop(id, None)
        if asked is None:
            return
        if isinstance(body, Leased):
            asked.answer.set_result(body)
            return
        self.counts["leases_refused"] += 1
        if isinstance(body, Failed) and body.reason == "generation":
            self.lost()
        _fail(asked.answer, "refused")

    def _ask_notes(self, now_s: float) -> None:
        if self._notes is not None and now_s > self._notes[1]:
            self._notes = None
        if self._notes is None and now_s >= self._notes_at_s:
            id = self._send(wire.ReadNotes(*self._read, BOARD_BYTES))
            self._notes_at_s = now_s + BOARD_S
            self._notes = None if id is None else (id, now_s + ANSWER_S)

    def _take_notes(self, page: Notes) -> None:
        for note in page.notes:
            if self._board.post(note, own=False):
                self.counts["notes"] += 1
        self._read = page.generation, page.after

    def _welcomed(self, welcome: Welcome) -> None:
        if self._is_own(welcome.generation):
            self._go_down("is this node itself")
            return
        if not (welcome.events and welcome.replay):
            self._go_down("publishes its events to no TCP port")
            return
        known = self.welcome
        if known is None or known.generation != welcome.generation:
            self._forget()
            self._events = self._dial(zmq.SUB, f"tcp://{self.host}:{welcome.events}")
            self._replay = self._dial(zmq.DEALER, f"tcp://{self.host}:{welcome.replay}")
            logger.info("peer %s is there", self.address)
        self.welcome, self.state, self.reason = welcome, "up", ""
        if welcome.batches > self._directory.wanted(self.address):
            self._ask_replay()

    def _take_batch(self, frames: list[bytes]) -> None:
        """frames: number, batch."""
        if len(frames) != 2:
            return
        seq = int.from_bytes(frames[0], "big", signed=True)
        if seq < 0:  # the end of a replay
            self._replaying_until_s = 0.0
            return
        try:
            events = _batches.decode(frames[1]).events
            taken = self._directory.apply(self.address, seq, events)
        except (ValueError, RecursionError):
            self.counts["unreadable"] += 1
            self._directory.drop(self.address)
            return
        if not taken:
            self._ask_replay()

    def _ask_replay(self) -> None:
        now_s = time.monotonic()
        if self._replay is None or now_s < self._replaying_until_s:
            return
        wanted = self._directory.wanted(self.address)
        try:
            self._replay.send_multipart((b"", wanted.to_bytes(8, "big")), zmq.NOBLOCK)
        except zmq.ZMQError:
            self._hello_at_s = (
                now_s + RETRY_S
            )  # not connected yet: the greeting's answer tries again
            return
        self.counts["replays"] += 1
        self._replaying_until_s = now_s + REPLAY_S

    def _go_down(self, reason: str) -> None:
        if self.state == "up":
            logger.warning("peer %s: %s", self.address, reason)
        self._forget()
        self.state, self.reason = "down", reason

    def _forget(self) -> None:
        self._directory.drop(self.address)
        for asked in self._asked.values():
            _fail(asked.answer, "lost")
        self._asked.clear()
        for socket in (self._events, self._replay):
            if socket is not None:
                socket.close(0)
        self._events = self._replay = None
        self._hello, self._notes, self._replaying_until_s = None, None, 0.0
        self.welcome = None


def _received(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """All messages that have come."""
    got = []
    while True:
        try:
            got.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.ZMQError:
            return got


def _fail(answer: Future[Any], word: str) -> None:
    answer.set_exception(PullError(word))
