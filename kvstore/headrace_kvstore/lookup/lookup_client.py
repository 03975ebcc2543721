"""Lookups: the planner asks a machine's StoreNode which blocks of a prompt it could supply.

The node answers at once. It knows the blocks on its disk, follows its peers' events, and lists the
object store; it prices the blocks that it would have to pull. A lookup reads, leases and counts
nothing. A node that does not answer within `limit_s`, or has no tier below DRAM, is not asked again
for `retry_s`. Until then the planner knows only of DRAM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence

from headrace_kvstore.lookup.availability import AvailableRun
from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import NodeClient

logger = logging.getLogger("headrace.kvstore")

MAX_BLOCKS = 1024
"""Maximum number of blocks asked for at once, as by an engine."""
LIMIT_S, RETRY_S = 0.01, 1.0
"""Time limit, and time until a silent node is asked again. A living node answers within 1 ms."""


class LookupClient:
    """Client of the node of one arena, for an event loop.

    Attributes:
        failures: number of questions without an answer, by the error or reply in its place.

    Args:
        name: of the arena.
        limit_s: maximum wait for an answer.
        retry_s: time for which a node that gave none, or has no tier below DRAM, is not asked
            again.
        socket_folder: where the node's socket is; None for the system's temporary folder.
    """

    def __init__(
        self,
        name: str,
        *,
        limit_s: float = LIMIT_S,
        retry_s: float = RETRY_S,
        socket_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._client = NodeClient(
            name, timeout_s=limit_s, retry_s=retry_s, socket_folder=socket_folder
        )
        self._retry_s, self._retry_at_s = retry_s, 0.0
        self.failures: Counter[str] = Counter()

    async def available_runs(
        self, digest: bytes, hashes: Sequence[bytes], compute_s: float
    ) -> list[AvailableRun]:
        """Return the leading run of these blocks that the node could supply, by medium; empty if
        the node is away. Never raises.

        Args:
            digest: the blocks' namespace.
            compute_s: seconds of computing a block; a pull that takes as long is left out.
        """
        names = [bytes(name) for name in hashes[:MAX_BLOCKS]]
        reply = await self._ask(names, wire.Lookup(digest, names, compute_s))
        if not isinstance(reply, wire.LookupReply):
            return []
        if not reply.below:
            self._retry_at_s = time.monotonic() + self._retry_s
        return [AvailableRun(*run) for run in reply.runs]

    async def find_held(self, digest: bytes, hashes: Sequence[bytes]) -> set[bytes]:
        """Return which of these blocks a tier below DRAM has; none if the node is away. Never
        raises.

        Args:
            digest: as `available_runs`.
        """
        names = [bytes(name) for name in hashes[:MAX_BLOCKS]]
        reply = await self._ask(names, wire.FindHeld(digest, names))
        if not isinstance(reply, wire.HeldBlocks):
            return set()
        return {names[i] for i in reply.positions if i < len(names)}

    async def _ask(self, names: Sequence[bytes], request: wire.Lookup | wire.FindHeld) -> object:
        """Return the node's answer about these blocks; None if it is not asked or gives none."""
        if not names or time.monotonic() < self._retry_at_s:
            return None
        reply: object
        try:
            reply = await asyncio.wrap_future(self._client.ask(request))
        except Exception as error:
            reply = error
        if isinstance(reply, wire.LookupReply | wire.HeldBlocks):
            return reply
        self._failed(reply)
        self._retry_at_s = time.monotonic() + self._retry_s
        return None

    def _failed(self, reply: object) -> None:
        """Count an error or a reply that is no answer, and log the first of each kind."""
        kind = type(reply).__name__
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            logger.warning("a plan does without the store below DRAM: %r", reply)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
