"""Threads that move blocks. Each carries one task out to its end, then takes the next.

Several threads keep several tasks under way, so a task may wait for a disk or a peer. An error
costs the blocks of its task and does not end the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Generic, TypeVar

logger = logging.getLogger("headrace.kvstore")

ERROR_PAUSE_S = 0.5

T = TypeVar("T")


class Crew(ABC, Generic[T]):
    """The threads; a subclass starts them at the end of its constructor with `_begin`.

    `_wake` guards all fields. `_moving_bytes` is the number of bytes under way.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._wake = threading.Condition()
        self._moving_bytes = self._busy = 0
        self._counts: Counter[str] = Counter()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]

    @abstractmethod
    def _take(self) -> T | None:
        """Return the next task; None if nothing waits or there is no room. The lock is held."""

    @abstractmethod
    def _carry_out(self, task: T) -> None:
        """Do a task, and wait for its end."""

    @abstractmethod
    def _drop_all(self) -> None:
        """Drop waiting tasks and call off those under way, at the end. The lock is held."""

    def _begin(self) -> None:
        for thread in self._threads:
            thread.start()

    def _count(self, name: str, blocks: int) -> None:
        if blocks:
            with self._wake:
                self._counts[name] += blocks

    def _totals(self) -> dict[str, Any]:
        """Return the counts, and the sum of all that begin with "dropped". The lock is held."""
        dropped = sum(n for name, n in self._counts.items() if name.startswith("dropped"))
        return {"dropped": dropped, **self._counts}

    def close(self, timeout_s: float) -> bool:
        """Stop moving blocks; return False if bytes may still arrive, or be read, after that
        time."""
        deadline_s = time.monotonic() + timeout_s
        with self._wake:
            self._stopping = True
            self._drop_all()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._carry_out_next()
            except Exception:
                logger.exception("%s failed; it continues", threading.current_thread().name)
                time.sleep(ERROR_PAUSE_S)

    def _carry_out_next(self) -> None:
        """Wait for a task and do it."""
        with self._wake:
            task = None
            while not self._stopping and (task := self._take()) is None:
                self._wake.wait()
            if self._stopping or task is None:
                return
            self._busy += 1
        try:
            self._carry_out(task)
        finally:
            with self._wake:
                self._busy -= 1
                self._wake.notify_all()
