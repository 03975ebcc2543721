"""Daemon threads for I/O that may hang: none of them keeps its process from ending."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("headrace.kvstore")

Task = Callable[[], None]


class DaemonThreadPool:
    """Pool of `count` threads that carry out tasks in order; a task that raises is logged.

    The threads start with the first task.
    """

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]

    def submit(self, task: Task) -> None:
        """Queue a task."""
        with self._lock:
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
        self._tasks.put(task)

    def close(self, timeout_s: float) -> bool:
        """Carry out waiting tasks, then end; return False if a task hangs and is abandoned."""
        deadline = time.monotonic() + timeout_s
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception("%s failed; it goes on", threading.current_thread().name)
