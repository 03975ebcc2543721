"""Several NIXL agents over the same memory: each read goes to the agent with the fewest bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from headrace_kvstore.peers.agent import Agent, Pull, PullError


class Readers:
    """Agents that a peer cannot tell apart: its metadata is all that a reader needs."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        self._agents = agents
        self._lock = threading.Lock()
        self._bytes = [0] * len(agents)

    def meet(self, metadata: bytes, limit_s: float) -> str:
        """As `Agent.meet`, of all. Raises PullError."""
        each = [agent.meet(metadata) for agent in self._agents]
        try:
            names = [met.result(limit_s) for met in each]
        except TimeoutError:
            raise PullError("slow") from None
        return names[0]

    def forget(self, peer: str) -> None:
        """Cut the connections."""
        for agent in self._agents:
            agent.forget(peer)

    def read(
        self, peer: str, local: np.ndarray, remote: np.ndarray, lengths: np.ndarray, limit_s: float
    ) -> Pull:
        """As `Agent.read`."""
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
        """As `Agent.close`, of all."""
        until_s = time.monotonic() + timeout_s
        closed = [agent.close(max(0.0, until_s - time.monotonic())) for agent in self._agents]
        return all(closed)
