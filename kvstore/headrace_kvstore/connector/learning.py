"""Reports prompts to the arena's eviction policy, off the serving path.

One process at a time uses the policy, and choosing victims may take a while. So the scheduler half
only queues each prompt with its time; a thread of its own reports them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from headrace_kvstore.arena.arena import Arena

logger = logging.getLogger("headrace.kvstore")

WAITING_PROMPTS = 1024
"""Prompts that may wait to be told; of more the oldest are forgotten."""


class PromptLearner:
    """Tells the arena of prompts, in each of the engine's namespaces; runs until `close`."""

    def __init__(self, arena: Arena, rows: Iterable[int]) -> None:
        self._arena, self._rows = arena, list(rows)
        self._waiting: deque[tuple[float, Sequence[bytes]]] = deque(maxlen=WAITING_PROMPTS)
        self._wake = threading.Condition()
        self._stopping = False
        self.told = 0
        self._thread = threading.Thread(target=self._run, name="kv-learn", daemon=True)
        self._thread.start()

    def prompted(self, hashes: Sequence[bytes]) -> None:
        """A prompt came whose full blocks are these, root first; returns at once."""
        with self._wake:
            self._waiting.append((time.monotonic(), hashes))
            self._wake.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """Tell what waits, as far as time allows, and stop."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._stopping:
                    self._wake.wait()
                if not self._waiting:
                    return
                at_s, hashes = self._waiting.popleft()
            try:
                for row in self._rows:
                    self._arena.prompted(row, hashes, at_s)
                self.told += 1
            except Exception:
                logger.exception("a prompt was not learned; it goes on")
