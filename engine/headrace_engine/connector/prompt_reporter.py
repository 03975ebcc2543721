"""Reports of prompts to the arena's eviction policy, off the serving path.

One process at a time uses the policy, and choosing victims may take a while. So the scheduler's
side only queues each prompt with its time, and a separate thread reports them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.daemon_thread_pool import DaemonThreadPool

WAITING_PROMPTS = 1024
"""Maximum number of prompts that wait to be reported; then the oldest is dropped."""


class PromptReporter:
    """Reporter of prompts to the arena, in each of the engine's namespaces, until `close`."""

    def __init__(self, arena: Arena, rows: Iterable[int]) -> None:
        self._arena, self._rows = arena, list(rows)
        self._waiting: deque[tuple[float, Sequence[bytes]]] = deque(maxlen=WAITING_PROMPTS)
        self._worker = DaemonThreadPool(1, "kv-learn")

    def record_prompt(self, hashes: Sequence[bytes]) -> None:
        """Queue a new prompt with these full blocks, root first; return at once."""
        full = len(self._waiting) == WAITING_PROMPTS
        self._waiting.append((time.monotonic(), hashes))
        if not full:
            self._worker.submit(self._report)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Report waiting prompts, as far as time allows, and stop; return False if the arena is
        still used."""
        return self._worker.close(timeout_s)

    def _report(self) -> None:
        at_s, hashes = self._waiting.popleft()
        for row in self._rows:
            self._arena.record_prompt(row, hashes, at_s)
