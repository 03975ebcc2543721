"""A few threads for requests that may hang: none of them keeps its process from ending."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("headrace.kvstore")

Task = Callable[[], None]


class Workers:
    """`count` daemon threads that do tasks in order; a task that raises is logged."""

    def __init__(self, count: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]

    def start(self) -> None:
        """Begin with what was submitted."""
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        """Have it done."""
        self._tasks.put(task)

    def close(self, timeout_s: float) -> None:
        """Do what waits, then end; tasks that hang are left behind."""
        deadline = time.monotonic() + timeout_s
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception("%s failed; it goes on", threading.current_thread().name)
