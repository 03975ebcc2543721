"""A node's peers: one thread polls all of them, and keeps the blocks that each of them holds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import zmq

from headrace_kvstore.peers.block_directory import MEDIA, BlockDirectory
from headrace_kvstore.peers.messages import (
    Failed,
    GetTags,
    HandshakeResponse,
    Lease,
    Leased,
    Tags,
    decode_reply,
)
from headrace_kvstore.peers.nixl_agent import PullError
from headrace_kvstore.peers.peer_link import POLL_INTERVAL_S, PeerLink
from headrace_kvstore.peers.pull_cost import PeerRun, pull_cost
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import Client, NodeUnavailable
from headrace_kvstore.protocol.gossip_log import GossipLog
from headrace_kvstore.protocol.membership import Membership
from headrace_kvstore.settings.node_settings import is_address

logger = logging.getLogger("headrace.kvstore")
T = TypeVar("T")

TICK_S = 0.05
MAX_POLLS_PER_S = 40
"""Maximum number of requests a second to all peers together: with more than eight peers, each is
asked less often."""
ANSWER_S, RETRY_S = 3.0, 0.5
"""Time without an answer after which a peer is down, and time until it is tried again."""


class Peers:
    """Peers of a node. Thread-safe. Addresses are HOST:PORT.

    Args:
        addresses: the first peers; this node's own address may be among them.
        members: lets this node in at its peers.
        is_own: whether a generation is this node's own.
        pause_s: first pause in which a peer that fails is left alone.
        gossip_log: gets the entries of peers' logs.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        members: Membership,
        is_own: Callable[[str], bool],
        pause_s: float,
        gossip_log: GossipLog,
    ) -> None:
        self._members = members
        self._is_own, self._pause_s, self._gossip_log = is_own, pause_s, gossip_log
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self._directory = BlockDirectory()
        self._links: dict[str, PeerLink] = {}
        self._stop = threading.Event()
        for address in addresses:
            self.add(address)
        self._thread = threading.Thread(target=self._run, name="kv-peers", daemon=True)
        self._thread.start()

    def add(self, address: str) -> None:
        """Add a peer to pull from. Raises ValueError."""
        if not is_address(address):
            raise ValueError(f"{address!r} is no address of a node; give HOST:PORT")
        with self._lock:
            if address not in self._links:
                client = Client(
                    *(f"tcp://{address}", decode_reply, self._members.enter),
                    *(ANSWER_S, RETRY_S, self._context),
                )
                self._links[address] = PeerLink(
                    *(address, client, self._directory, self._gossip_log),
                    *(self._is_own, self._pause_s),
                )

    def remove(self, address: str) -> None:
        """Stop pulling from a peer."""
        with self._lock:
            link = self._links.pop(address, None)
        if link is not None:
            link.close(wait=False)

    def addresses(self) -> set[str]:
        """Return the addresses of all current peers."""
        with self._lock:
            return set(self._links)

    def runs(self, digest: bytes, hashes: Sequence[bytes]) -> list[PeerRun]:
        """Return, for each peer that may be asked, the leading run of these blocks that it
        holds."""
        now_s, runs = time.monotonic(), []
        for link in self._all():
            if link.state != "up" or link.breaker.blocked(now_s):
                continue
            found = self._directory.leading(link.address, digest, hashes, MEDIA)
            if found:
                parts = tuple(
                    (medium, sum(1 for _ in run), link.costs.setdefault(medium, pull_cost()))
                    for medium, run in groupby(found)
                )
                runs.append(PeerRun(link.address, parts))
        return runs

    def contains(self, digest: bytes, hashes: Sequence[bytes]) -> np.ndarray:
        """Return for each block whether a peer that may be asked has it, bool (n,)."""
        now_s, held = time.monotonic(), np.zeros(len(hashes), np.bool_)
        for link in self._all():
            if link.state == "up" and not link.breaker.blocked(now_s):
                held |= self._directory.contains(link.address, digest, hashes)
        return held

    def handshake(self, address: str) -> HandshakeResponse | None:
        """Return how a peer's memory is read, if it may be tried now. The caller must then report
        the outcome to `succeeded` or `failed`."""
        with self._lock:
            link = self._links.get(address)
            handshake = None if link is None else link.handshake
            if link is None or handshake is None or not link.breaker.allow(time.monotonic()):
                return None
            return handshake

    def lease(self, address: str, request: Lease, limit_s: float) -> Future[Leased]:
        """Ask a peer for a lease; the future raises `PullError`."""
        return self._ask(address, request, Leased, limit_s)

    def tags(self, address: str, lease: int, limit_s: float) -> Future[Tags]:
        """Ask a peer for the tags of a lease's blocks; the future raises `PullError`."""
        return self._ask(address, GetTags(lease), Tags, limit_s)

    def _ask(
        self, address: str, request: wire.Message, wanted: type[T], limit_s: float
    ) -> Future[T]:
        answer: Future[T] = Future()
        with self._lock:
            link = self._links.get(address)
        if link is None or link.state != "up":
            answer.set_exception(PullError("down"))
            return answer

        def answered(asked: Future[Any]) -> None:
            error, reply = asked.exception(), None
            if error is None:
                reply = asked.result()
            if isinstance(reply, wanted):
                answer.set_result(reply)
                return
            if isinstance(reply, Failed) and reply.reason == "generation":
                link.reconnect()
            late = isinstance(error, NodeUnavailable) and error.late
            link.counts["lease_timeouts" if late else "leases_refused"] += 1
            answer.set_exception(PullError("slow" if late else "lost" if error else "refused"))

        link.client.ask(request, limit_s).add_done_callback(answered)
        return answer

    def send(self, address: str, body: wire.Message) -> None:
        """Send a message that has no answer."""
        with self._lock:
            link = self._links.get(address)
        if link is not None and link.state == "up":
            link.client.send(body)

    def succeeded(self, address: str, medium: str, size_bytes: int, seconds: float) -> None:
        """Record a peer's success, and the seconds that its bytes took, if there were any."""
        with self._lock:
            link = self._links.get(address)
            if link is not None:
                link.breaker.success()
                if size_bytes:
                    link.costs.setdefault(medium, pull_cost()).observe(size_bytes, seconds)
                link.counts["pulled_bytes"] += size_bytes

    def failed(self, address: str, word: str) -> None:
        """Record that a pull or a lease has failed."""
        with self._lock:
            link = self._links.get(address)
            if link is not None:
                link.breaker.failure(time.monotonic())
                link.counts[f"failed_{word}"] += 1
                link.reconnect()

    @property
    def blocks_dropped(self) -> int:
        """Number of the peers' blocks that are not remembered, as `BlockDirectory.dropped`."""
        return self._directory.dropped

    def stats(self) -> dict[str, Any]:
        """Return JSON-able statistics by address."""
        now_s = time.monotonic()
        return {
            link.address: {
                **link.stats(),
                "left_alone": link.breaker.blocked(now_s),
                "cost": {
                    medium: {"latency_s": cost.fixed_s, "s_per_byte": cost.each_s}
                    for medium, cost in link.costs.items()
                },
            }
            for link in self._all()
        }

    def close(self, timeout_s: float = 2.0) -> None:
        """Disconnect from all peers."""
        self._stop.set()
        self._thread.join(timeout_s)
        links = self._all()
        for wait in (False, True):
            for link in links:
                link.close(wait)
        self._context.term()

    def _all(self) -> list[PeerLink]:
        with self._lock:
            return list(self._links.values())

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            links = self._all()
            poll_interval_s = max(POLL_INTERVAL_S, len(links) / MAX_POLLS_PER_S)
            for link in links:
                try:
                    link.poll(time.monotonic(), poll_interval_s)
                except Exception:  # one peer's fault must not affect the others
                    logger.exception("talking to peer %s failed; it goes on", link.address)
                    link.counts["errors"] += 1
