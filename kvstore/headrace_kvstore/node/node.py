"""StoreNode: what one machine's KV store needs beside the engines that use it.

Engines copy blocks into and out of the arena by themselves; no byte of theirs passes through here.
The node writes the arena's blocks to NVMe, tells readers where those lie and keeps them there for a
while, brings blocks back into DRAM ahead of their use, also from other nodes, lends them its own,
and publishes what each tier holds. It may die at any time: engines then do without NVMe, peers and
prefetch, and the next node finds arena and files as they were.

It is a plain object with threads of its own: by itself `python -m headrace_kvstore node`, or inside
whatever process wants one.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import numpy as np

from headrace_kvstore import supply
from headrace_kvstore.arena.locking import LockBusyError
from headrace_kvstore.checksum import prepare
from headrace_kvstore.node import tier_stats as node_stats
from headrace_kvstore.node.changes import Contents, NodeEvents, arena_contents
from headrace_kvstore.node.dram_work import DramWork
from headrace_kvstore.node.neighbours import Neighbours, Pulling
from headrace_kvstore.node.object_work import open_tier
from headrace_kvstore.node.requests import Requests
from headrace_kvstore.node.tier_keeper import TierKeeper
from headrace_kvstore.node.worth import Uses, Worth, below_dram
from headrace_kvstore.node_settings import NodeSettings
from headrace_kvstore.nvme.mover import Mover
from headrace_kvstore.nvme.nvme_tier import NvmeTier
from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.objects.object_tier import ObjectTier
from headrace_kvstore.peers.peers import Peers
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.board import Board
from headrace_kvstore.protocol.server import NodeRunning, NodeServer
from headrace_kvstore.staging.write_behind import Admit

logger = logging.getLogger("headrace.kvstore")

TIERS = ("dram", "nvme")
CLEARABLE = (*TIERS, "object")
"""The object tier only by name: others may share what is there."""
PROMOTION_PRIORITY, WARM_PRIORITY = -64, -128
"""Of prefetches that nobody asked for."""
CHECK_S = 1.0
"""Between looks whether the arena was replaced."""


class StoreNode:
    """One machine's node; made by its constructor, running from `start` to `close`. Thread-safe.

    A missing arena or disk is no error: the node does what is left, and `stats` says what is not.

    Args:
        settings: what is stored where.
        admit: which stored blocks are worth writing to NVMe; None has the policy decide.
        mover: shared with others; None makes one of its own where there is an NVMe tier.

    Attributes:
        board: notes that this machine's processes leave for each other.
    """

    def __init__(
        self, settings: NodeSettings, *, admit: Admit | None = None, mover: Mover | None = None
    ) -> None:
        self.settings = settings
        self._worth = Worth(lambda: self._dram)
        self._admit = admit or self._worth.writing
        self._mover, self._owns_mover = mover, mover is None
        self._uses = Uses()
        self._counts: Counter[str] = Counter()
        self.board = Board(settings.board_bytes, secrets.token_hex(8))
        self._dram_lock = threading.Lock()
        self._dram: DramWork | None = None
        self._dram_reason = "opening"
        self._keeper: TierKeeper | None = None
        self._nvme_reason = "no nvme_folder is given"
        self._objects: ObjectTier | None = None
        self._objects_reason = "no object_url is given"
        self._events = NodeEvents(settings, self._in_arena, self._tier, lambda: self._objects)
        self._server: NodeServer | None = None
        self._neighbours: Neighbours | None = None
        self._lending = threading.Lock()
        self._slow = ThreadPoolExecutor(1, "kv-node-slow")
        self._stop = threading.Event()
        self._checker = threading.Thread(target=self._check, name="kv-arena-keeper", daemon=True)
        self._started_s = time.monotonic()

    def start(self) -> StoreNode:
        """Begin to work and to listen.

        Raises:
            NodeRunning: this arena has a node already.
            ValueError: the object store's URL or options are wrong.
            zmq.ZMQError: an event endpoint cannot be bound.
        """
        settings = self.settings
        prepare()
        path = wire.socket_path(settings.name, settings.socket_folder)
        self._server = NodeServer(path, Requests(self, self._slow).answer)
        try:
            self._events.open(settings.listen)
            self._neighbours = Neighbours(
                settings, lambda: self._dram, lambda: self._events.publisher, self.board
            )
            if settings.nvme_folder is not None:
                self._open_nvme()
            if settings.object_url is not None:
                self._open_objects()
            self._open_arena()
        except BaseException:
            self.close()
            raise
        self._checker.start()
        logger.info("store node of %s listens at %s", settings.name, path)
        return self

    def _open_nvme(self) -> None:
        try:
            if self._mover is None:
                self._mover = Mover()
        except (ImportError, RuntimeError) as error:
            self._nvme_reason = f"no mover of files: {error}"
            logger.exception("there is no NVMe tier")
            return
        self._keeper = TierKeeper(
            self.settings, self._mover, self._events.nvme_changed, self._nvme_opened
        )

    def _open_objects(self) -> None:
        try:
            self._objects = open_tier(
                self.settings, self._events.objects_changed, self._tier_opened
            )
        except ImportError as error:
            self._objects_reason = f"{error}: pip install headrace[object]"
            logger.exception("there is no object tier")

    def close(self) -> bool:
        """End within about `close_s`; what was not written by then is not.

        Returns False if a disk hangs: then threads and memory are left behind, and only the end of
        the process frees them.
        """
        deadline = time.monotonic() + self.settings.close_s
        self._stop.set()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        neighbours, self._neighbours = self._neighbours, None
        if neighbours is not None:
            neighbours.deafen()
        if self._checker.is_alive():
            self._checker.join(self.settings.close_s)
        self._slow.shutdown(wait=False, cancel_futures=True)
        ended = True
        with self._dram_lock:
            dram, self._dram, self._dram_reason = self._dram, None, "closed"
            if dram is not None:
                if not self.settings.keep_arena:
                    dram.arena.unlink()
                ended &= dram.close(_left(deadline), flush=True)
        if neighbours is not None:
            neighbours.close()
        if self._objects is not None:
            ended &= self._objects.close(_left(deadline))
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            ended &= keeper.close(_left(deadline))
        if self._owns_mover and self._mover is not None:
            ended &= self._mover.close(_left(deadline))
        self._events.close()
        return ended

    # What clients ask for

    def locate(
        self, digest: bytes, hashes: Sequence[bytes], lease_s: float = 30.0, request_key: str = ""
    ) -> list[Location]:
        """The leading run of these blocks that NVMe has, kept there for `lease_s`.

        With a lease it counts as a use, and a block that a second request uses is brought into DRAM
        in the background.
        """
        tier = self._tier()
        found: list[Location] = []
        if tier is not None:
            for block_hash in hashes:
                place = tier.locate(digest, block_hash, lease_s)
                if place is None or (found and place.shape != found[0].shape):
                    break
                found.append(place)
        if lease_s > 0:
            self._counts["nvme_hits"] += len(found)
            self._counts["nvme_misses"] += len(hashes) - len(found)
            self._promote(digest, hashes[: len(found)], request_key)
        return found

    def survey(
        self, digest: bytes, hashes: Sequence[bytes], compute_s: float = 0.0
    ) -> list[supply.Supply]:
        """Where the leading run of these blocks would come from: DRAM and NVMe, and behind these
        what `pull` would bring. Nothing is read, leased or counted."""
        dram, tier = self._dram, self._tier()
        row = None if dram is None else dram.arena.row_of(digest)
        in_dram = on_nvme = np.zeros(len(hashes), np.bool_)
        if dram is not None and row is not None:
            in_dram = dram.arena.lookup(row, hashes) >= 0
        if tier is not None:
            on_nvme = tier.contains(digest, hashes)
        here = int(np.append(in_dram | on_nvme, False).argmin())
        media = [supply.DRAM if fast else supply.NVME for fast in in_dram[:here]]
        found = [supply.Supply(medium, len(list(run))) for medium, run in groupby(media)]
        neighbours = self._neighbours
        if neighbours is not None:
            found += neighbours.survey(digest, hashes[here:], compute_s)
        return found

    @property
    def has_more_than_dram(self) -> bool:
        """Whether `survey` can find blocks anywhere else."""
        peers = self._peers()
        return (
            self._keeper is not None
            or self._objects is not None
            or (peers is not None and bool(peers.addresses()))
        )

    @property
    def neighbours(self) -> Neighbours | None:
        """The part that other nodes see; None before `start` and after `close`."""
        return self._neighbours

    @property
    def peer_address(self) -> str | None:
        """HOST:PORT that peers reach this node at; None if it lends nothing."""
        return None if self._neighbours is None else self._neighbours.address

    def lend(self, listen: str) -> str:
        """Lend to peers from now on, at HOST:PORT as in the settings, which go before; the address.

        Events that the settings publish without TCP or replay stay so, and then no peer follows.

        Raises:
            RuntimeError: the node is closed.
            zmq.ZMQError: the address cannot be bound.
        """
        with self._lending:
            neighbours = self._neighbours
            if neighbours is None:
                raise RuntimeError("the store node is closed")
            if neighbours.address is None:
                neighbours.open(listen)
                self._events.open(listen)
            assert neighbours.address is not None
            return neighbours.address

    def follow(self, addresses: Sequence[str]) -> None:
        """Pull from these peers, HOST:PORT, and those of the settings, and from no others; without
        effect before `lend`. Raises ValueError."""
        if self._neighbours is not None:
            self._neighbours.follow(addresses)

    def pull(
        self, digest: bytes, hashes: Sequence[bytes], compute_s: float = 0.0
    ) -> Pulling | None:
        """Have the leading run of blocks brought into DRAM, from a peer or from objects, if that is
        worth it."""
        neighbours = self._neighbours
        return None if neighbours is None else neighbours.pull(digest, hashes, compute_s)

    def prefetch(self, digest: bytes, hashes: Sequence[bytes], priority: int = 0) -> int:
        """Have blocks brought from NVMe into DRAM, those that only objects hold from there; returns
        how many were queued."""
        dram = self._dram
        return 0 if dram is None else dram.prefetch(digest, hashes, priority)

    def report_bad(self, digest: bytes, hashes: Sequence[bytes], tier: str) -> int:
        """Drop blocks from one tier, whose bytes did not verify; returns how many were there.

        Raises ValueError for a tier that there is not.
        """
        _known(tier)
        self._counts[f"{tier}_reported_bad"] += len(hashes)
        if tier == "dram":
            return self._in_dram(digest, lambda dram, row: dram.arena.discard(row, hashes))
        nvme = self._tier()
        return 0 if nvme is None else sum(nvme.discard(digest, h, "corrupt") for h in hashes)

    def pin(self, digest: bytes, hashes: Sequence[bytes], pinned: bool = True) -> int:
        """Keep blocks from eviction in each tier, or let them go; how many were found in any."""
        found = np.zeros(len(hashes), np.bool_)

        def in_dram(dram: DramWork, row: int) -> int:
            found[:] = dram.arena.pin(row, hashes, pinned)
            return 0

        self._in_dram(digest, in_dram)
        nvme = self._tier()
        if nvme is not None:
            found |= [nvme.pin(digest, block_hash, pinned) for block_hash in hashes]
        if self._objects is not None:
            found |= [self._objects.pin(digest, block_hash, pinned) for block_hash in hashes]
        return int(found.sum())

    def warm(self) -> int:
        """Have the most valuable blocks of NVMe and the objects brought into DRAM's free room; how
        many were queued."""
        with self._dram_lock:
            room = 0 if self._dram is None else self._dram.arena.free_bytes()
        best = self._worth.best(list(below_dram(self._tier(), self._objects)), room)
        return sum(self.prefetch(digest, hashes, WARM_PRIORITY) for digest, hashes in best)

    def clear(self, digest: bytes | None = None, tiers: Sequence[str] = TIERS) -> int:
        """Drop all blocks of a namespace, or of all, also pinned and leased ones; how many. Of
        objects, where "object" is named, those that this node's writer made.

        Raises ValueError for a tier that there is not.
        """
        for tier in tiers:
            _known(tier, CLEARABLE)
        dropped = 0
        if "object" in tiers and self._objects is not None:
            dropped += self._objects.clear(digest)
        nvme = self._tier()
        if "nvme" in tiers and nvme is not None:
            for owner, rows in nvme.contents():
                if digest in (None, owner):
                    dropped += sum(nvme.discard(owner, row["hash"].tobytes()) for row in rows)
        if "dram" in tiers:
            if digest is not None:
                dropped += self._in_dram(digest, lambda dram, row: dram.arena.clear(row))
            else:
                with self._dram_lock:
                    dropped += 0 if self._dram is None else self._dram.arena.clear()
        return dropped

    def stats(self) -> dict[str, Any]:
        """JSON-able: each tier's state, sizes and hits, and what the node does."""
        counts, server = self._counts, self._server
        of_nvme = node_stats.nvme_tier(
            *(self._keeper, self._nvme_reason, self.settings.nvme_bytes),
            *(counts["nvme_hits"], counts["nvme_misses"]),
        )
        with self._dram_lock:
            dram = self._dram
            of_dram = node_stats.dram_tier(dram, self._dram_reason)
            work = {} if dram is None else dram.stats()
        return {
            "name": self.settings.name,
            "pid": os.getpid(),
            "protocol": wire.PROTOCOL,
            "uptime_s": time.monotonic() - self._started_s,
            "tiers": {
                "dram": of_dram,
                "nvme": of_nvme,
                "object": node_stats.object_tier(self._objects, self._objects_reason, dram),
            },
            **work,
            "remote": {} if self._neighbours is None else self._neighbours.stats(),
            "board": self.board.stats(),
            "promoted": counts["promoted"],
            "reported_bad": {tier: counts[f"{tier}_reported_bad"] for tier in TIERS},
            "requests": {} if server is None else dict(server.counts),
            "events": self._events.stats(),
        }

    def quiesce(self, timeout_s: float) -> bool:
        """Wait until everything stored so far is told, and written or dropped; for tests."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            dram = self._dram
            if dram is not None and dram.idle and (self._keeper is None or self._keeper.ready):
                return True
            time.sleep(0.005)
        return False

    # Inside

    def _tier(self) -> NvmeTier | None:
        keeper = self._keeper
        return None if keeper is None else keeper.tier

    def _in_dram(self, digest: bytes, act: Callable[[DramWork, int], int]) -> int:
        """`act` on a namespace's row of the arena, if there are both."""
        with self._dram_lock:
            row = None if self._dram is None else self._dram.arena.row_of(digest)
            return 0 if self._dram is None or row is None else act(self._dram, row)

    def _promote(self, digest: bytes, hashes: Sequence[bytes], request_key: str) -> None:
        again = self._uses.again(digest, hashes, request_key)
        if again:
            self._counts["promoted"] += self.prefetch(digest, again, PROMOTION_PRIORITY)

    def _check(self) -> None:
        """Open the arena once it can be had, and again when it was replaced."""
        while True:
            dram = self._dram
            if self._stop.wait(self.settings.retry_s if dram is None else CHECK_S):
                return
            try:
                if dram is not None and dram.arena.replaced():
                    logger.warning("arena %s was replaced", self.settings.name)
                    with self._dram_lock:
                        self._dram = None
                        dram.close(self.settings.close_s)
                if self._dram is None:
                    self._open_arena()
                else:
                    self._dram.share(self._peers())
            except Exception:
                logger.exception("looking after the arena failed; it goes on")

    def _open_arena(self) -> None:
        settings = self.settings
        try:
            dram = DramWork(
                *(settings, self._mover, self._tier, self._admit),
                *(self._events.publish, self._events.resync, self._peers(), self._objects),
            )
        except (OSError, ValueError, LockBusyError) as error:
            if self._dram_reason != str(error):
                logger.error("no arena %s: %s; it is tried again", settings.name, error)
            self._dram_reason = str(error)
            return
        self._dram = dram
        self._events.resync()
        if settings.warm:
            self._slow.submit(self.warm)

    def _peers(self) -> Peers | None:
        neighbours = self._neighbours
        return None if neighbours is None else neighbours.peers

    def _nvme_opened(self) -> None:
        tier = self._tier()
        if tier is not None:
            tier.value = self._worth.keeping
        dram = self._dram
        if dram is not None:
            dram.follower.sweep_soon()
        self._tier_opened()

    def _tier_opened(self) -> None:
        """A tier that others or an earlier node filled can be read."""
        self._events.resync()
        if self.settings.warm:
            self._slow.submit(self.warm)

    def _in_arena(self) -> Contents:
        with self._dram_lock:
            return [] if self._dram is None else arena_contents(self._dram.arena)


def _known(tier: str, tiers: Sequence[str] = TIERS) -> None:
    if tier not in tiers:
        raise ValueError(f"{tier!r} is no tier; there are {', '.join(tiers)}")


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


__all__ = ["NodeRunning", "NodeSettings", "StoreNode"]
