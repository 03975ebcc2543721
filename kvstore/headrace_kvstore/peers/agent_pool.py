"""Several NIXL agents over the same memory: each read goes to the agent with the fewest bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from headrace_kvstore.peers.nixl_agent import NixlAgent, Pull, PullError


class AgentPool:
    """Agents that are interchangeable for a peer: a reader needs only the peer's metadata."""

    def __init__(self, agents: Sequence[NixlAgent]) -> None:
        self._agents = agents
        self._lock = threading.Lock()
        self._bytes = [0] * len(agents)

    def connect(self, metadata: bytes, limit_s: float) -> str:
        """Connect all agents to a peer, as `NixlAgent.connect`. Raises PullError."""
        each = [agent.connect(metadata) for agent in self._agents]
        try:
            names = [met.result(limit_s) for met in each]
        except TimeoutError:
            raise PullError("slow") from None
        return names[0]

    def disconnect(self, peer: str) -> None:
        """Cut the connections."""
        for agent in self._agents:
            agent.disconnect(peer)

    def read(
        self, peer: str, local: np.ndarray, remote: np.ndarray, lengths: np.ndarray, limit_s: float
    ) -> Pull:
        """Start a read on the agent with the fewest bytes, as `NixlAgent.read`."""
        with self._lock:
            which = min(range(len(self._agents)), key=self._bytes.__getitem__)
            size = int(lengths.sum())
            self._bytes[which] += size
        pull = self._agents[which].read(peer, local, remote, lengths, limit_s)

        def over(_: Future[Any]) -> None:
            with self._lock:
                self._bytes[which] -= size

        pull.add_done_callback(over)
        return pull

    def close(self, timeout_s: float) -> bool:
        """End all agents, as `NixlAgent.close`."""
        until_s = time.monotonic() + timeout_s
        closed = [agent.close(max(0.0, until_s - time.monotonic())) for agent in self._agents]
        return all(closed)
