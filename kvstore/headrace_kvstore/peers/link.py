"""This node's view of one peer: its identity, its health, its blocks, its board.

This node greets the peer first, and the answer names the peer's generation and memory. Then it asks
every `LOOK_S` for new notes of the peer's board and new batches of its events, `LOOK_BYTES` at a
time. A new generation means a new peer under the same address. This node then drops everything
known of the old one, and greets the peer again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from headrace_kvstore.breaker import Breaker
from headrace_kvstore.fitting import LinearTime
from headrace_kvstore.peers.directory import Directory
from headrace_kvstore.peers.messages import Failed, Hello, Look, News, Welcome
from headrace_kvstore.protocol.board import Board
from headrace_kvstore.protocol.client import Client, NodeAway
from headrace_kvstore.protocol.events import EventBatch

logger = logging.getLogger("headrace.kvstore")

LOOK_S, GREET_S = 0.2, 0.2
FAILURES, LONGEST = 3, 16
"""Number of pulls that fail in a row before a peer is left alone for a pause, and the maximum
factor by which repeated failures lengthen the pause."""
LOOK_BYTES = 2**20

_batches = msgspec.msgpack.Decoder(EventBatch)


class Link:
    """Link to one peer. All but `turn` may be called from any thread.

    Args:
        address: HOST:PORT of the peer's socket for peers.
        client: client for requests to the peer.
        directory: gets the peer's blocks, under its address.
        board: gets the notes of the peer's board.
        is_own: whether a generation is this node's own: a list of all nodes may name this one too.
        pause_s: first pause of the breaker.
    """

    def __init__(
        self,
        address: str,
        client: Client,
        directory: Directory,
        board: Board,
        is_own: Callable[[str], bool],
        pause_s: float,
    ) -> None:
        self.address, self.client, self._directory = address, client, directory
        self._board, self._is_own = board, is_own
        self.state = "down"
        self.reason = "not answered yet"
        self.welcome: Welcome | None = None
        self.breaker = Breaker(FAILURES, pause_s, LONGEST * pause_s)
        self.costs: dict[str, LinearTime] = {}
        self.counts: Counter[str] = Counter()
        self._asked: Future[Any] | None = None
        self._next_s = 0.0
        self._lost = False
        self._read = "", 0
        """Generation of the peer's board, and how far it was read."""

    def turn(self, now_s: float, look_s: float = LOOK_S) -> None:
        """Handle the peer's answer if it has arrived, and send the next request if it is time."""
        if self._asked is not None:
            if not self._asked.done():
                return
            asked, self._asked = self._asked, None
            try:
                self._take(asked.result())
            except NodeAway as error:
                self._go_down(f"does not answer: {error}")
        if now_s < self._next_s:
            return
        known = self.state == "up" and not self._lost
        self._lost, self._next_s = False, now_s + (look_s if known else GREET_S)
        wanted = self._directory.wanted(self.address)
        self._asked = self.client.ask(Look(*self._read, wanted, LOOK_BYTES) if known else Hello())

    def lost(self) -> None:
        """Greet the peer again before the next request: its memory or its connection was lost."""
        self._lost, self._next_s = True, 0.0

    def close(self, wait: bool = True) -> None:
        """Disconnect."""
        self.client.close(wait)
        self._go_down("closed")

    def stats(self) -> dict[str, Any]:
        """Return JSON-able state and counts."""
        return {
            "state": self.state,
            "reason": self.reason,
            "breaker_opened": self.breaker.opened,
            "generation": "" if self.welcome is None else self.welcome.generation,
            "blocks": {m: self._directory.blocks(self.address, m) for m in ("DRAM", "NVME")},
            **self.counts,
        }

    # Inside

    def _take(self, answer: Any) -> None:
        match answer:
            case Welcome():
                self._greeted(answer)
            case News(generation) if self.welcome and generation == self.welcome.generation:
                self._heard(answer)
            case News():
                self._go_down("was replaced")
            case Failed(reason):
                self._go_down(reason)
            case _:
                self._go_down("speaks nonsense")

    def _greeted(self, welcome: Welcome) -> None:
        if self._is_own(welcome.generation):
            self._go_down("is this node itself")
            return
        known = self.welcome
        if known is None or known.generation != welcome.generation:
            self._directory.drop(self.address)
            logger.info("peer %s is there", self.address)
        self.welcome, self.state, self.reason, self._next_s = welcome, "up", "", 0.0

    def _heard(self, news: News) -> None:
        for note in news.notes.notes:
            if self._board.post(note, own=False):
                self.counts["notes"] += 1
        self._read = news.notes.generation, news.notes.after
        try:
            for seq, batch in enumerate(news.batches, news.first):
                if not self._directory.apply(self.address, seq, _batches.decode(batch).events):
                    raise ValueError(f"batch {seq} follows none")
        except (ValueError, RecursionError):
            self.counts["unreadable"] += 1
            self._directory.drop(self.address)
        else:
            if news.batches and news.next > self._directory.wanted(self.address):
                self._next_s = 0.0  # there is more

    def _go_down(self, reason: str) -> None:
        if self.state == "up":
            logger.warning("peer %s: %s", self.address, reason)
        self._directory.drop(self.address)
        self.welcome, self.state, self.reason = None, "down", reason
