"""The part of a StoreNode that other nodes see: its port, its peers, and the pulls from them.

A node without `listen` leases nothing. A node with neither `listen` nor `peers` has no peers,
until `open` is called. Only members of the app (`membership`) get an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import zmq

from headrace_kvstore.lookup.availability import OBJECT, REMOTE, AvailableRun
from headrace_kvstore.node.dram_service import DramService
from headrace_kvstore.node.object_service import OBJECTS
from headrace_kvstore.peers.messages import (
    GetTags,
    Lease,
    PeerRequest,
    PollRequest,
    PollResponse,
    decode_request,
)
from headrace_kvstore.peers.peers import Peers
from headrace_kvstore.peers.pull_cost import PullChoice, choose_pull
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.address import bind
from headrace_kvstore.protocol.events import EventPublisher
from headrace_kvstore.protocol.gossip_log import GossipLog
from headrace_kvstore.protocol.membership import Membership
from headrace_kvstore.protocol.server import RpcServer
from headrace_kvstore.settings.node_settings import NodeSettings

PULL_PRIORITY = 0


class PendingPull(NamedTuple):
    """Blocks on their way from a peer, or from objects: their number, how long they are worth
    waiting for, and a future of the number that was loaded."""

    blocks: int
    wait_s: float
    done: Future[int]


class PeerService:
    """The node's port, peers and pulls; active from construction on.

    Args:
        dram: the work on the arena, None while there is none.
        publisher: of the events that peers follow.
        gossip_log: gets the entries of peers' logs; peers get this node's own entries.

    Raises:
        zmq.ZMQError: `listen` cannot be bound.
    """

    def __init__(
        self,
        settings: NodeSettings,
        dram: Callable[[], DramService | None],
        publisher: Callable[[], EventPublisher | None],
        gossip_log: GossipLog,
    ) -> None:
        self._settings, self._dram, self._publisher = settings, dram, publisher
        self._gossip_log = gossip_log
        self.peers: Peers | None = None
        self._server: RpcServer | None = None
        self._listen_error = ""
        self._counts: Counter[str] = Counter()
        if settings.listen is not None or settings.peers:
            self.open(settings.listen)

    def open(self, listen: str | None) -> None:
        """Have peers from now on and, if HOST:PORT is given, lease blocks to them. A port
        that is open already stays open.

        Raises:
            ValueError: there is no secret to know members by.
            zmq.ZMQError: `listen` cannot be bound.
        """
        if self._settings.secret is None:
            raise ValueError("secret: is not set; nodes that share blocks know each other by it")
        members = Membership(self._settings.secret)
        if listen is not None and self._server is None:
            try:
                self._server = RpcServer(
                    *(lambda socket: bind(socket, f"tcp://{listen}"), decode_request, self._answer),
                    slow=(Lease, GetTags),
                    name="kv-lease",
                    members=members,
                )
            except zmq.ZMQError as error:
                self._listen_error = f"cannot listen at {listen}: {error}"
                raise
            self._listen_error = ""
        if self.peers is None:
            self.peers = Peers(
                *(self._settings.peers, members, self._is_own),
                *(self._settings.heal_s, self._gossip_log),
            )

    @property
    def address(self) -> str | None:
        """HOST:PORT at which peers reach this node; None if it leases nothing."""
        return None if self._server is None else self._server.endpoint.removeprefix("tcp://")

    def pull(
        self, digest: bytes, hashes: Sequence[bytes], compute_s: float = 0.0
    ) -> PendingPull | None:
        """Pull the leading run of these blocks into DRAM, from the peer or the objects that save
        most.

        compute_s: seconds to compute a block, 0 if that is not known. Returns None if no peer or
        object has any, or if computing is predicted to be as fast. See `peers.pull_cost`.
        """
        offered = self._offered(digest, hashes, compute_s)
        if offered is None:
            return None
        dram, wanted, choice = offered
        if choice is None:
            self._counts["pulls_not_worth_it"] += 1
            return None
        limit_s = self._settings.pull_limit_s
        if compute_s > 0:
            limit_s = min(limit_s, compute_s * choice.blocks)
        self._counts["pulls"] += 1
        if dram.objects is not None and choice.peer == OBJECTS:
            puller = dram.objects.fetcher
        else:
            assert dram.remote is not None
            puller = dram.remote.puller
        done = puller.fetch(digest, wanted[: choice.blocks], PULL_PRIORITY)
        return PendingPull(choice.blocks, limit_s, done)

    def find_available(
        self, digest: bytes, hashes: Sequence[bytes], compute_s: float
    ) -> list[AvailableRun]:
        """Return the blocks that `pull` would bring, without pulling them."""
        offered = self._offered(digest, hashes, compute_s)
        if offered is None or offered[2] is None:
            return []
        choice = offered[2]
        return [
            AvailableRun(OBJECT if choice.peer == OBJECTS else REMOTE, choice.blocks, choice.pull_s)
        ]

    def _offered(
        self, digest: bytes, hashes: Sequence[bytes], compute_s: float
    ) -> tuple[DramService, list[bytes], PullChoice | None] | None:
        """Return the blocks that the arena lacks, and the best pull of a leading run of them, None
        if none is worth it. Returns None if no peer or object has the first of these blocks."""
        dram, peers = self._dram(), self.peers
        namespace_id = None if dram is None else dram.arena.find_namespace(digest)
        if dram is None or namespace_id is None or not hashes:
            return None
        absent = dram.arena.lookup(namespace_id, hashes) < 0
        wanted = [name for name, gone in zip(hashes, absent, strict=True) if gone]
        runs = []
        if dram.remote is not None and peers is not None:
            runs += peers.runs(digest, wanted)
        if dram.objects is not None:
            runs += dram.objects.runs(digest, wanted)
        if not runs:
            return None
        size = dram.arena.namespace_info(namespace_id).block_bytes
        return dram, wanted, choose_pull(runs, size, compute_s, self._settings.pull_limit_s)

    def set_peers(self, addresses: Sequence[str]) -> None:
        """Make these peers and those of the settings the only peers. Raises ValueError."""
        if self.peers is None:
            return
        wanted = {*addresses, *self._settings.peers}
        for address in self.peers.addresses() - wanted:
            self.peers.remove(address)
        for address in wanted:
            self.peers.add(address)

    def stats(self) -> dict[str, Any]:
        """Return JSON-able state and counts."""
        dram = self._dram()
        work = None if dram is None else dram.remote
        return {
            "state": "off" if work is None else "on",
            "reason": self._listen_error or ("no arena" if dram is None else dram.remote_reason),
            "address": self.address,
            "peers": {} if self.peers is None else self.peers.stats(),
            "blocks_dropped": 0 if self.peers is None else self.peers.blocks_dropped,
            "pulls": self._counts["pulls"],
            "pulls_not_worth_it": self._counts["pulls_not_worth_it"],
            **({} if work is None else work.stats()),
        }

    def stop_listening(self) -> None:
        """Grant no more leases."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Disconnect from all peers. First end the leases and the work on the arena."""
        if self.peers is not None:
            self.peers.close()

    def _answer(self, request: PeerRequest) -> wire.Message | Future[Any]:
        dram, publisher = self._dram(), self._publisher()
        if dram is None or dram.remote is None or publisher is None:
            return wire.Failed("there is no arena to lease from")
        if isinstance(request, PollRequest):
            place = request.after, request.most_bytes
            page = self._gossip_log.read(*place, generation=request.gossip_log, own=True)
            first, batches = publisher.log.read(request.batch, request.most_bytes)
            log = first, batches, publisher.log.next_seq
            return PollResponse(dram.remote.generation, page, *log)
        reply: wire.Message | Future[Any] = dram.remote.answer(request)
        return reply

    def _is_own(self, generation: str) -> bool:
        dram = self._dram()
        work = None if dram is None else dram.remote
        return work is not None and work.generation == generation
