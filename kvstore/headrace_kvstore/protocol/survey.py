"""What a machine's StoreNode could supply of a prompt: asked by the planner, answered at once.

The node knows what lies on its disk, follows its peers' events, and lists the object store; it
prices what would have to be pulled. A survey reads, leases and counts nothing. A node that does not
answer within `limit_s`, or has no tier below DRAM, is not asked again for `retry_s`: until then the
planner knows of DRAM only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence

from headrace_kvstore.protocol import wire
from headrace_kvstore.protocol.client import NodeClient
from headrace_kvstore.supply import Supply, common

logger = logging.getLogger("headrace.kvstore")

MOST_BLOCKS = 1024
"""Asked for at once, as by an engine."""
LIMIT_S, RETRY_S = 0.01, 1.0
"""A node that lives answers within a millisecond."""


class Surveyor:
    """Asks the node of one arena, from an event loop.

    Attributes:
        failures: questions without an answer, by what came in its place.

    Args:
        name: of the arena.
        limit_s: longest wait for an answer.
        retry_s: for how long a node that gave none, or has no tier below DRAM, is not asked again.
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

    async def supplies(
        self, digests: Sequence[bytes], hashes: Sequence[bytes], compute_s: float
    ) -> list[Supply]:
        """The leading run of these blocks that every worker could be supplied with, by medium;
        empty where the node is away. Never raises.

        Args:
            digests: namespaces, one a worker.
            compute_s: seconds of computing a block; a pull that takes as long is left out.
        """
        if not digests or not hashes or time.monotonic() < self._retry_at_s:
            return []
        names = [bytes(name) for name in hashes[:MOST_BLOCKS]]
        asked = [self._client.ask(wire.Survey(digest, names, compute_s)) for digest in digests]
        replies = await asyncio.gather(*map(asyncio.wrap_future, asked), return_exceptions=True)
        surveyed = [reply for reply in replies if isinstance(reply, wire.Surveyed)]
        for reply in replies:
            if not isinstance(reply, wire.Surveyed):
                self._failed(reply)
        if len(surveyed) < len(digests) or not all(reply.below for reply in surveyed):
            self._retry_at_s = time.monotonic() + self._retry_s
        if len(surveyed) < len(digests):
            return []
        return common([[Supply(*run) for run in reply.runs] for reply in surveyed])

    def _failed(self, reply: object) -> None:
        """Count what came in the place of an answer, and log the first of each kind."""
        kind = type(reply).__name__
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            logger.warning("a plan does without the store below DRAM: %r", reply)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()
