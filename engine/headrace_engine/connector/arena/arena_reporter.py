"""Reports to the arena, off the serving path: prompts, for its eviction policy, and retention.

One process at a time uses the policy, and choosing victims may take a while. To retain blocks, the
arena reads its whole table. So the scheduler's side only queues each report, and a separate thread
carries it out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from headrace_kvstore.arena.arena import Arena
from headrace_kvstore.blocks.slot_record import tenant_number
from headrace_kvstore.daemon_thread_pool import DaemonThreadPool

WAITING_REPORTS = 1024
"""Maximum number of reports that wait; then the oldest is dropped."""

Report = Callable[[int], object]
"""Carries out a report in the namespace with this id."""


class ArenaReporter:
    """Reporter to the arena, in the engine's namespace, until `close`."""

    def __init__(self, arena: Arena, row: int) -> None:
        self._arena, self._row = arena, row
        self._waiting: deque[Report] = deque(maxlen=WAITING_REPORTS)
        self._worker = DaemonThreadPool(1, "kv-report")

    def record_prompt(self, hashes: Sequence[bytes]) -> None:
        """Queue a new prompt with these full blocks, root first, if the policy learns from prompts;
        return at once."""
        at_s = time.monotonic()
        if self._arena.policy.learns:
            self._queue(lambda row: self._arena.record_prompt(row, hashes, at_s))

    def retain(self, hashes: Sequence[bytes], until_s: float, salt: str) -> None:
        """Queue the retention of blocks, root first, until a time of `time.monotonic`; return at
        once.

        Args:
            salt: their request's.
        """
        tenant = tenant_number(salt)
        self._queue(lambda row: self._arena.retain(row, hashes, until_s, tenant))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Carry out waiting reports, as far as time allows, and stop; return False if the arena is
        still used."""
        return self._worker.close(timeout_s)

    def _queue(self, report: Report) -> None:
        full = len(self._waiting) == WAITING_REPORTS
        self._waiting.append(report)
        if not full:
            self._worker.submit(self._report)

    def _report(self) -> None:
        self._waiting.popleft()(self._row)
