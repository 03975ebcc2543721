"""This node's view of one peer: its identity, its health, its blocks, its gossip log.

This node greets the peer first, and the answer names the peer's generation and memory. Then it asks
every `POLL_INTERVAL_S` for new entries of the peer's gossip log and new batches of its events,
`POLL_BYTES` at a time. A new generation means a new peer under the same address. This node then
drops everything known of the old one, and greets the peer again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from headrace_kvstore.circuit_breaker import CircuitBreaker
from headrace_kvstore.least_squares import LinearTime
from headrace_kvstore.peers.block_directory import BlockDirectory
from headrace_kvstore.peers.messages import (
    Failed,
    HandshakeRequest,
    HandshakeResponse,
    PollRequest,
    PollResponse,
)
from headrace_kvstore.protocol.client import Client, NodeUnavailable
from headrace_kvstore.protocol.events import EventBatch
from headrace_kvstore.protocol.gossip_log import GossipLog

logger = logging.getLogger("headrace.kvstore")

POLL_INTERVAL_S, HANDSHAKE_INTERVAL_S = 0.2, 0.2
FAILURES, MAX_PAUSE_FACTOR = 3, 16
"""Number of pulls that fail in a row before a peer is left alone for a pause, and the maximum
factor by which repeated failures lengthen the pause."""
POLL_BYTES = 2**20

_batches = msgspec.msgpack.Decoder(EventBatch)


class PeerLink:
    """Link to one peer. All but `poll` may be called from any thread.

    Args:
        address: HOST:PORT of the peer's socket for peers.
        client: client for requests to the peer.
        directory: gets the peer's blocks, under its address.
        gossip_log: gets the entries of the peer's log.
        is_own: whether a generation is this node's own: a list of all nodes may name this one too.
        pause_s: first pause of the breaker.
    """

    def __init__(
        self,
        address: str,
        client: Client,
        directory: BlockDirectory,
        gossip_log: GossipLog,
        is_own: Callable[[str], bool],
        pause_s: float,
    ) -> None:
        self.address, self.client, self._directory = address, client, directory
        self._gossip_log, self._is_own = gossip_log, is_own
        self.state = "down"
        self.reason = "not answered yet"
        self.handshake: HandshakeResponse | None = None
        self.breaker = CircuitBreaker(FAILURES, pause_s, MAX_PAUSE_FACTOR * pause_s)
        self.costs: dict[str, LinearTime] = {}
        self.counts: Counter[str] = Counter()
        self._asked: Future[Any] | None = None
        self._next_s = 0.0
        self._reconnect = False
        self._read = "", 0
        """Generation of the peer's gossip log, and how far it was read."""

    def poll(self, now_s: float, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        """Handle the peer's answer if it has arrived, and send the next request if it is time."""
        if self._asked is not None:
            if not self._asked.done():
                return
            asked, self._asked = self._asked, None
            try:
                self._on_answer(asked.result())
            except NodeUnavailable as error:
                self._go_down(f"does not answer: {error}")
        if now_s < self._next_s:
            return
        known = self.state == "up" and not self._reconnect
        self._reconnect = False
        self._next_s = now_s + (poll_interval_s if known else HANDSHAKE_INTERVAL_S)
        wanted = self._directory.wanted(self.address)
        self._asked = self.client.ask(
            PollRequest(*self._read, wanted, POLL_BYTES) if known else HandshakeRequest()
        )

    def reconnect(self) -> None:
        """Greet the peer again before the next request: its memory or its connection was lost."""
        self._reconnect, self._next_s = True, 0.0

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
            "generation": "" if self.handshake is None else self.handshake.generation,
            "blocks": {m: self._directory.blocks(self.address, m) for m in ("DRAM", "NVME")},
            **self.counts,
        }

    # Inside

    def _on_answer(self, answer: Any) -> None:
        match answer:
            case HandshakeResponse():
                self._on_handshake(answer)
            case PollResponse(generation) if (
                self.handshake and generation == self.handshake.generation
            ):
                self._apply_poll_response(answer)
            case PollResponse():
                self._go_down("was replaced")
            case Failed(reason):
                self._go_down(reason)
            case _:
                self._go_down("unexpected reply type")

    def _on_handshake(self, handshake: HandshakeResponse) -> None:
        if self._is_own(handshake.generation):
            self._go_down("is this node itself")
            return
        known = self.handshake
        if known is None or known.generation != handshake.generation:
            self._directory.drop(self.address)
            logger.info("peer %s is there", self.address)
        self.handshake, self.state, self.reason, self._next_s = handshake, "up", "", 0.0

    def _apply_poll_response(self, response: PollResponse) -> None:
        for entry in response.entries.entries:
            if self._gossip_log.append(entry, own=False):
                self.counts["entries"] += 1
        self._read = response.entries.generation, response.entries.after
        try:
            for seq, batch in enumerate(response.batches, response.first):
                if not self._directory.apply(self.address, seq, _batches.decode(batch).events):
                    raise ValueError(f"batch {seq} follows none")
        except (ValueError, RecursionError):
            self.counts["unreadable"] += 1
            self._directory.drop(self.address)
        else:
            if response.batches and response.next > self._directory.wanted(self.address):
                self._next_s = 0.0  # there is more

    def _go_down(self, reason: str) -> None:
        if self.state == "up":
            logger.warning("peer %s: %s", self.address, reason)
        self._directory.drop(self.address)
        self.handshake, self.state, self.reason = None, "down", reason
