"""The scheduler side's questions to the local StoreNode: which blocks its tiers below DRAM hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

from headrace_kvstore.nvme.segment import Location
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import NodeClient, NodeUnavailable
from headrace_kvstore.settings.store_settings import StoreSettings

logger = logging.getLogger("headrace.kvstore")

FORGOTTEN_AT = 1024
"""Maximum number of open questions; older ones are dropped, as their requests may have ended."""


class NodeTiers:
    """The node's tiers below DRAM. Without a node, every answer is empty. No call waits.

    Args:
        settings: of the store; the node has the same name.
        digest: of the engine's namespace.

    Attributes:
        unanswered: number of blocks asked for without a usable answer: the node is away, or its
            answer makes no sense.
        lease_s: how long located blocks stay where they are, from the question on.
    """

    def __init__(self, settings: StoreSettings, digest: bytes) -> None:
        self._client = NodeClient(
            settings.name,
            timeout_s=settings.node_timeout_s,
            socket_folder=settings.socket_folder,
        )
        self.unanswered = 0
        self._answers: bool | None = None
        self._digest, self.lease_s = digest, min(settings.lease_s, wire.MAX_LEASE_S)
        self._asked: dict[str, tuple[list[bytes], Future[wire.Reply]]] = {}
        self._finding: dict[str, tuple[list[bytes], Future[wire.Reply]]] = {}

    def ask(self, request_id: str, hashes: Sequence[bytes], compute_s: float) -> None:
        """Ask which leading ones of these blocks the node can supply. Computing one takes
        `compute_s` in the mean, 0 if that is not known or does not matter."""
        names = [bytes(name) for name in hashes]
        request = wire.Locate(request_id, self._digest, names, self.lease_s, compute_s)
        self._asked[request_id] = names, self._client.ask(request)
        while len(self._asked) > FORGOTTEN_AT:
            self._asked.pop(next(iter(self._asked)))

    def answer(self, request_id: str) -> list[Location] | None:
        """Return where the leading blocks lie; empty for a question that was dropped. None until
        the node has answered, or while it is worth waiting for blocks on their way to DRAM."""
        if request_id not in self._asked:
            return []
        names, asked = self._asked[request_id]
        if not asked.done():
            return None
        del self._asked[request_id]
        try:
            reply = asked.result()
            if not isinstance(reply, wire.Located):
                raise wire.WireError(f"it answers {reply}")
            found = wire.unpack_locations(reply, self._digest, names)
        except (NodeUnavailable, wire.WireError) as error:
            self._record_failure(len(names), error)
            return []
        self._record_answer()
        return found

    def find_held(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Ask which of these blocks the node or its peers have below DRAM."""
        names = [bytes(name) for name in hashes]
        self._finding[request_id] = names, self._client.ask(wire.FindHeld(self._digest, names))
        while len(self._finding) > FORGOTTEN_AT:
            self._finding.pop(next(iter(self._finding)))

    def held(self, request_id: str) -> frozenset[bytes] | None:
        """Return the blocks that are there; none for a question that was dropped. None until the
        node has answered."""
        if request_id not in self._finding:
            return frozenset()
        names, asked = self._finding[request_id]
        if not asked.done():
            return None
        del self._finding[request_id]
        try:
            reply = asked.result()
            if not isinstance(reply, wire.HeldBlocks):
                raise wire.WireError(f"it answers {reply}")
        except (NodeUnavailable, wire.WireError) as error:
            self._record_failure(len(names), error)
            return frozenset()
        self._record_answer()
        return frozenset(names[i] for i in reply.positions if i < len(names))

    def _record_failure(self, blocks: int, error: Exception) -> None:
        self.unanswered += blocks
        # One late answer is not worth a warning: the node is busy.
        if self._answers is not False and not getattr(error, "late", False):
            self._answers = False
            logger.warning(
                "the store below DRAM is not used: %s. If this machine runs no StoreNode, set "
                "node: false; if it runs one, give both the same name and socket_folder",
                error,
            )

    def _record_answer(self) -> None:
        if self._answers is False:
            logger.warning("the StoreNode answers again: the store below DRAM is used")
        self._answers = True

    def report_bad(self, blocks: Sequence[wire.BadBlock]) -> None:
        """Have the node check blocks whose bytes were wrong. It drops those that are damaged.
        Blocks beyond the size of one report are reported when they are read again."""
        self._client.send(wire.ReportBad(self._digest, [*blocks[: wire.MAX_REPORTED]]))

    def close(self) -> None:
        self._client.close()
