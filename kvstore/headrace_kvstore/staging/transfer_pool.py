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


class TransferPool(ABC, Generic[T]):
    """The threads; a subclass starts them at the end of its constructor with `_start_threads`.

    `_condition` guards all fields. `_bytes_in_flight` is the number of bytes under way.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._condition = threading.Condition()
        self._bytes_in_flight = self._busy = 0
        self._counts: Counter[str] = Counter()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]

    @abstractmethod
    def _next_task(self) -> T | None:
        """Return the next task; None if nothing waits or there is no room. The lock is held."""

    @abstractmethod
    def _run_task(self, task: T) -> None:
        """Do a task, and wait for its end."""

    @abstractmethod
    def _cancel_all(self) -> None:
        """Drop waiting tasks and call off those under way, at the end. The lock is held."""

    def _start_threads(self) -> None:
        for thread in self._threads:
            thread.start()

    def _count(self, name: str, blocks: int) -> None:
        if blocks:
            with self._condition:
                self._counts[name] += blocks

    def _totals(self) -> dict[str, Any]:
        """Return the counts, and the sum of all that begin with "dropped". The lock is held."""
        dropped = sum(n for name, n in self._counts.items() if name.startswith("dropped"))
        return {"dropped": dropped, **self._counts}

    def close(self, timeout_s: float) -> bool:
        """Stop moving blocks; return False if bytes may still arrive, or be read, after that
        time."""
        deadline_s = time.monotonic() + timeout_s
        with self._condition:
            self._stopping = True
            self._cancel_all()
            self._condition.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._run_next()
            except Exception:
                logger.exception("%s failed; it continues", threading.current_thread().name)
                time.sleep(ERROR_PAUSE_S)

    def _run_next(self) -> None:
        """Wait for a task and do it."""
        with self._condition:
            task = None
            while not self._stopping and (task := self._next_task()) is None:
                self._condition.wait()
            if self._stopping or task is None:
                return
            self._busy += 1
        try:
            self._run_task(task)
        finally:
            with self._condition:
                self._busy -= 1
                self._condition.notify_all()
