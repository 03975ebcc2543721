"""A node's peers: one thread talks to all of them, knows what they hold, and whom to pull from."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby
from typing import Any

import zmq

from headrace_kvstore.node_settings import is_address
from headrace_kvstore.peers.agent import PullError
from headrace_kvstore.peers.directory import Directory
from headrace_kvstore.peers.link import RETRY_S, Link
from headrace_kvstore.peers.messages import Lease, Leased, Welcome
from headrace_kvstore.peers.pull_price import Run, pull_cost
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.board import Board
from headrace_kvstore.protocol.events import DRAM, NVME

logger = logging.getLogger("headrace.kvstore")

MEDIA = (DRAM, NVME)
"""Fastest first."""


class Peers:
    """Thread-safe. Addresses are HOST:PORT.

    Args:
        addresses: to begin with; this node's own may be among them.
        is_own: whether a generation is this node's own.
        pause_s: for how long a peer that fails is left alone at first.
        board: gets what is posted on peers' boards.
    """

    def __init__(
        self, addresses: Sequence[str], is_own: Callable[[str], bool], pause_s: float, board: Board
    ) -> None:
        self._is_own, self._pause_s, self._board = is_own, pause_s, board
        self._context = zmq.Context()
        self._lock = threading.RLock()
        self._directory = Directory()
        self._links: dict[str, Link] = {}
        self._leaving: list[Link] = []
        self._bell_in = self._context.socket(zmq.PAIR)
        self._bell_in.bind("inproc://bell")
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.connect("inproc://bell")
        self._stop = threading.Event()
        for address in addresses:
            self.add(address)
        self._thread = threading.Thread(target=self._run, name="kv-peers", daemon=True)
        self._thread.start()

    def add(self, address: str) -> None:
        """Pull from this node too. Raises ValueError."""
        if not is_address(address):
            raise ValueError(f"{address!r} is no address of a node; give HOST:PORT")
        with self._lock:
            if address not in self._links:
                self._links[address] = Link(
                    *(address, self._context, self._directory, self._board),
                    *(self._is_own, self._pause_s),
                )
            self._ring()

    def remove(self, address: str) -> None:
        """Stop pulling from it."""
        with self._lock:
            link = self._links.pop(address, None)
            if link is not None:
                self._leaving.append(link)
            self._ring()

    def addresses(self) -> set[str]:
        """All that there are now."""
        with self._lock:
            return set(self._links)

    def runs(self, digest: bytes, hashes: Sequence[bytes]) -> list[Run]:
        """Of each peer that may be asked, the leading run of these blocks that it holds."""
        now_s, runs = time.monotonic(), []
        with self._lock:
            links = list(self._links.items())
        for address, link in links:
            if link.state != "up" or link.breaker.blocked(now_s):
                continue
            found = self._directory.leading(address, digest, hashes, MEDIA)
            if found:
                parts = tuple(
                    (medium, sum(1 for _ in run), link.costs.setdefault(medium, pull_cost()))
                    for medium, run in groupby(found)
                )
                runs.append(Run(address, parts))
        return runs

    def welcome(self, address: str) -> Welcome | None:
        """How a peer's memory is read, if it may be tried now; then `succeeded` or `failed` must
        tell how it went."""
        with self._lock:
            link = self._links.get(address)
            welcome = None if link is None else link.welcome
            if link is None or welcome is None or not link.breaker.allow(time.monotonic()):
                return None
            return welcome

    def lease(self, address: str, request: Lease, limit_s: float) -> Future[Leased]:
        """Ask a peer; the future raises `PullError`."""
        answer: Future[Leased] = Future()
        with self._lock:
            link = self._links.get(address)
            if link is None:
                answer.set_exception(PullError("down"))
            else:
                link.outbox.append((request, answer, time.monotonic() + limit_s))
                self._ring()
        return answer

    def tell(self, address: str, body: wire.Message) -> None:
        """Send a message that has no answer."""
        with self._lock:
            link = self._links.get(address)
            if link is not None:
                link.outbox.append((body, None, 0.0))
                self._ring()

    def succeeded(self, address: str, medium: str, size_bytes: int, seconds: float) -> None:
        """A peer did what it was asked: what the bytes cost, if there were any."""
        with self._lock:
            link = self._links.get(address)
            if link is not None:
                link.breaker.success()
                if size_bytes:
                    link.costs.setdefault(medium, pull_cost()).observe(size_bytes, seconds)
                link.counts["pulled_bytes"] += size_bytes

    def failed(self, address: str, word: str) -> None:
        """A pull, or a lease, has failed."""
        with self._lock:
            link = self._links.get(address)
            if link is not None:
                link.breaker.failure(time.monotonic())
                link.counts[f"failed_{word}"] += 1
                link.lost()
        self._ring()

    def stats(self) -> dict[str, Any]:
        """JSON-able, by address."""
        now_s = time.monotonic()
        with self._lock:
            return {
                address: {
                    **link.stats(),
                    "left_alone": link.breaker.blocked(now_s),
                    "cost": {
                        medium: {"latency_s": cost.fixed_s, "s_per_byte": cost.each_s}
                        for medium, cost in link.costs.items()
                    },
                }
                for address, link in self._links.items()
            }

    def close(self, timeout_s: float = 2.0) -> None:
        """Disconnect from all peers."""
        self._stop.set()
        self._ring()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return
        with self._lock:
            for link in (*self._links.values(), *self._leaving):
                link.close()
            self._links.clear()
            self._context.destroy(0)

    def _ring(self) -> None:
        with self._lock:
            if not self._bell.closed:
                with suppress(zmq.Again):  # it rings already
                    self._bell.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._wait()
                with self._lock:
                    leaving, self._leaving = self._leaving, []
                    links = list(self._links.values())
                for link in leaving:
                    link.close()
                for link in links:  # without the lock: a peer's whole state may take a while
                    self._turn(link)
            except Exception:
                logger.exception("talking to peers failed; it goes on")
                time.sleep(0.1)

    @staticmethod
    def _turn(link: Link) -> None:
        try:
            link.turn()
        except Exception:  # one peer's fault is not another's
            logger.exception("talking to peer %s failed; it goes on", link.address)
            link.counts["errors"] += 1

    def _wait(self) -> None:
        """Until something has come, or it is time to greet."""
        poller = zmq.Poller()
        poller.register(self._bell_in, zmq.POLLIN)
        with self._lock:
            for link in self._links.values():
                for socket in link.sockets():
                    poller.register(socket, zmq.POLLIN)
        poller.poll(int(1e3 * RETRY_S))
        while self._bell_in.poll(0):
            self._bell_in.recv()
