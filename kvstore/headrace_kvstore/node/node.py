"""StoreNode: the process of one machine that serves its KV store to the engines.

Engines copy blocks into and out of the arena directly; their bytes do not pass through the node.
The node writes the arena's blocks to NVMe, tells readers where they lie, and keeps them there for
the time of a lease. It brings blocks back into DRAM before they are used, from NVMe, other nodes or
objects. It leases its own blocks to peers, and publishes events of each tier's blocks. A node may
die at any time: engines then work without NVMe, peers and prefetch, and the next node finds the
arena and the files.

This module covers a node's life: start, close, leases, opening tiers. `operations` serves the
clients' requests. A node is a plain object with its own threads: it runs as a process of its own
(`python -m headrace_kvstore node`) or inside another process.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.arena.locking import LockBusyError
from headrace_kvstore.blocks.checksum import prepare
from headrace_kvstore.node.block_value import BlockValue
from headrace_kvstore.node.dram_service import DramService
from headrace_kvstore.node.node_events import NodeEvents
from headrace_kvstore.node.nvme_tier_manager import NvmeTierManager
from headrace_kvstore.node.object_service import open_tier
from headrace_kvstore.node.operations import Operations
from headrace_kvstore.node.peer_service import PeerService
from headrace_kvstore.node.tiers import Tiers
from headrace_kvstore.nvme.file_io import FileIo
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.gossip_log import GossipLog
from headrace_kvstore.protocol.server import NodeServer
from headrace_kvstore.settings.node_settings import NodeSettings

logger = logging.getLogger("headrace.kvstore")

CHECK_S = 1.0
"""Time between checks whether the arena was replaced."""
ARENA_S = 10.0
"""Maximum wait of `start` for the arena. Making one takes about a quarter of a second per GiB."""


class StoreNode:
    """One machine's node, running from `start` to `close`. Thread-safe.

    A missing arena or disk is no error: the node works without it, and `stats` shows it.

    Args:
        settings: what is stored where.
        file_io: shared with other users; None makes one of its own if there is an NVMe tier.

    Attributes:
        tiers: those that exist now.
        operations: the requests of clients.
    """

    def __init__(self, settings: NodeSettings, *, file_io: FileIo | None = None) -> None:
        self.settings = settings
        self.tiers = Tiers()
        self._block_value = BlockValue(lambda: self.tiers.dram)
        self._file_io, self._owns_file_io = file_io, file_io is None
        self._events = NodeEvents(settings, self.tiers)
        self._gossip_log = gossip_log = GossipLog(settings.gossip_bytes, secrets.token_hex(8))
        self._slow = ThreadPoolExecutor(1, "kv-node-slow")
        self.operations = Operations(
            settings, self.tiers, self._block_value, gossip_log, self._events, self._slow
        )
        self._server: NodeServer | None = None
        self._serving_lock = threading.Lock()
        self._engines_end = False
        self._stop, self._first_attempt = threading.Event(), threading.Event()
        self._checker = threading.Thread(target=self._check, name="kv-arena-keeper", daemon=True)

    def start(self) -> StoreNode:
        """Begin to work and to listen.

        Raises:
            NodeAlreadyRunning: this arena has a node already.
            ValueError: the object store's URL or options are wrong.
            zmq.ZMQError: an event endpoint cannot be bound.
        """
        settings = self.settings
        prepare()
        path = wire.socket_path(settings.name, settings.socket_folder)
        self._server = NodeServer(path, self.operations.answer, self.operations.requests)
        try:
            self._events.open(for_peers=settings.listen is not None)
            self.tiers.peer_service = PeerService(
                *(settings, lambda: self.tiers.dram, lambda: self._events.publisher),
                self.operations.gossip_log,
            )
            if settings.nvme_folder is not None:
                self._open_nvme()
            if settings.object_url is not None:
                self._open_objects()
            self._checker.start()
        except BaseException:
            self.close()
            raise
        self._first_attempt.wait(ARENA_S)
        logger.info("store node of %s listens at %s", settings.name, path)
        return self

    def _open_nvme(self) -> None:
        self._file_io = self._file_io or FileIo()
        self.tiers.nvme_manager = NvmeTierManager(
            self.settings, self._file_io, self._events.on_nvme_event, self._nvme_opened
        )

    def _open_objects(self) -> None:
        try:
            self.tiers.objects = open_tier(self.settings, self._objects_opened)
        except ImportError as error:
            self.tiers.reasons["object"] = f"{error}: pip install headrace[object]"
            logger.exception("there is no object tier")

    def close(self, engines_end: bool = False) -> bool:
        """End within about `close_s`; blocks that are not written by then are not written at all.

        Args:
            engines_end: whether the engines of this machine end, too. Then the arena is removed
                unless it is to be kept. Otherwise only an arena that no other process uses is
                removed.

        Returns False if a disk hangs: then threads and memory are left behind, and only the end of
        the process frees them.
        """
        deadline = time.monotonic() + self.settings.close_s
        self._engines_end |= engines_end
        self._stop.set()
        dram = self.tiers.dram
        if dram is not None:
            self._remove(dram.arena)  # first: the caller may not wait for the rest
        server, self._server = self._server, None
        if server is not None:
            server.close()
        peer_service, self.tiers.peer_service = self.tiers.peer_service, None
        if peer_service is not None:
            peer_service.stop_listening()
        if self._checker.is_alive():
            self._checker.join(self.settings.close_s)
        self._slow.shutdown(wait=False, cancel_futures=True)
        ended = True
        with self.tiers.arena_lock:
            dram, self.tiers.dram, self.tiers.reasons["dram"] = self.tiers.dram, None, "closed"
            if dram is not None:
                ended &= self._end(dram, _left(deadline), flush=True)
        if peer_service is not None:
            peer_service.close()
        if self.tiers.objects is not None:
            self.tiers.objects.close(_left(deadline))
        nvme_manager, self.tiers.nvme_manager = self.tiers.nvme_manager, None
        if nvme_manager is not None:
            ended &= nvme_manager.close(_left(deadline))
        if self._owns_file_io and self._file_io is not None:
            ended &= self._file_io.close(_left(deadline))
        self._events.close()
        return ended

    # Other nodes

    def serve_peers(self, listen: str) -> str:
        """Lease blocks to peers from now on, at HOST:PORT; return the address. An address in the
        settings takes precedence.

        Raises:
            RuntimeError: the node is closed.
            ValueError: there is no secret to know members by.
            zmq.ZMQError: the address cannot be bound.
        """
        with self._serving_lock:
            peer_service = self.tiers.peer_service
            if peer_service is None:
                raise RuntimeError("the store node is closed")
            if peer_service.address is None:
                peer_service.open(listen)
                self._events.open(for_peers=True)
            assert peer_service.address is not None
            return peer_service.address

    def set_peers(self, addresses: Sequence[str]) -> None:
        """Pull from these peers, HOST:PORT, and those of the settings, and from no others. Without
        effect if the node has no peers yet: call `serve_peers` before. Raises ValueError."""
        if self.tiers.peer_service is not None:
            self.tiers.peer_service.set_peers(addresses)

    # Inside

    def _check(self) -> None:
        """Open the arena as soon as possible, and again when it was replaced; renew its slots."""
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            dram = self.tiers.dram
            try:
                if dram is not None and dram.arena.replaced():
                    logger.warning("arena %s was replaced", self.settings.name)
                    with self.tiers.arena_lock:
                        self.tiers.dram = None
                        dram.close(self.settings.close_s)
                if self.tiers.dram is None:
                    self._open_arena()
                else:
                    self.tiers.dram.connect_peers(self.tiers.peers)
                    self.tiers.dram.renew()
            except Exception:
                logger.exception("looking after the arena failed; it goes on")
            self._first_attempt.set()
            pause_s = self.settings.retry_s if self.tiers.dram is None else CHECK_S

    def _open_arena(self) -> None:
        settings = self.settings
        try:
            dram = DramService(
                *(settings, lambda: self.tiers.nvme, self._events.publish),
                *(self._events.resync, self.tiers.peers, self.tiers.objects),
            )
        except (OSError, ValueError, LockBusyError) as error:
            if self.tiers.reasons["dram"] != str(error):
                logger.error("no arena %s: %s; it is tried again", settings.name, error)
            self.tiers.reasons["dram"] = str(error)
            return
        with self.tiers.arena_lock:
            if self._stop.is_set():  # the node was closed while the arena was opened
                self._end(dram, settings.close_s)
                return
            self.tiers.dram = dram
        self._events.resync()
        if settings.warm:
            self._slow.submit(self.operations.warm)

    def _remove(self, arena: Arena) -> None:
        """Remove the arena's name, unless it is to be kept or engines continue to use it."""
        if self.settings.keep_arena:
            return
        if self._engines_end:
            arena.unlink()
            return
        try:
            if not arena.unlink_unused():
                logger.info("the arena %s stays: other processes use it", self.settings.name)
        except LockBusyError as error:
            logger.warning("the arena %s stays: %s", self.settings.name, error)

    def _end(self, dram: DramService, timeout_s: float, flush: bool = False) -> bool:
        self._remove(dram.arena)
        return dram.close(timeout_s, flush)

    def _nvme_opened(self) -> None:
        tier = self.tiers.nvme
        if tier is not None:
            tier.value = self._block_value.value_on_nvme
        dram = self.tiers.dram
        if dram is not None:
            dram.follower.sweep_soon()
        self._events.resync()
        self._objects_opened()

    def _objects_opened(self) -> None:
        """Warm DRAM, since a tier that other nodes or an earlier one filled can be read."""
        if self.settings.warm:
            self._slow.submit(self.operations.warm)


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
