"""The loop of write-behind and prefetchers: one thread that ends batches and starts new ones.

A subclass decides what may start (`_may_start`, `_take`), starts it (`_start`, which calls
`_fly` for each batch of bytes), and ends it (`_end`). `_land` reports a finished batch, from any
thread. An error costs the blocks of one turn and does not stop the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger("headrace.kvstore")

ERROR_PAUSE_S = 0.5


class Batch(Protocol):
    """Something under way; compared by identity."""

    @property
    def bytes(self) -> int: ...


B = TypeVar("B", bound=Batch)
T = TypeVar("T")


class MoveLoop(ABC, Generic[T, B]):
    """The thread; a subclass starts it at the end of its constructor with `_begin`.

    `_wake` guards all fields. `_moving_bytes` is what `_flying`, the batches under way, sum up to.
    """

    def __init__(self, name: str) -> None:
        self._wake = threading.Condition()
        self._flying: dict[int, B] = {}
        self._landed: deque[B] = deque()
        self._moving_bytes = 0
        self._starting = False
        self._counts: Counter[str] = Counter()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # For subclasses to say

    @abstractmethod
    def _may_start(self) -> bool:
        """Whether something waits that there is room for. The lock is held."""

    @abstractmethod
    def _take(self) -> T:
        """What is to be started now. The lock is held."""

    @abstractmethod
    def _start(self, task: T) -> None:
        """Start it."""

    @abstractmethod
    def _end(self, batch: B) -> None:
        """A batch has landed, well or not."""

    @abstractmethod
    def _drop_all(self) -> None:
        """The end has come: forget what waits, call off what is under way. The lock is held."""

    # For subclasses to call

    def _begin(self) -> None:
        self._thread.start()

    def _fly(self, batch: B) -> None:
        with self._wake:
            self._flying[id(batch)] = batch
            self._moving_bytes += batch.bytes

    @property
    def _at_rest(self) -> bool:
        """Nothing is under way, nor on its way to be. The lock is held."""
        return not self._flying and not self._starting

    def _land(self, batch: B) -> None:
        with self._wake:
            self._landed.append(batch)
            self._wake.notify()

    def _count(self, name: str, blocks: int) -> None:
        if blocks:
            with self._wake:
                self._counts[name] += blocks

    def _totals(self) -> dict[str, Any]:
        """The counts, and all that begin with "dropped" as one. The lock is held."""
        dropped = sum(n for name, n in self._counts.items() if name.startswith("dropped"))
        return {"dropped": dropped, **self._counts}

    def close(self, timeout_s: float) -> bool:
        """Move no more; False if bytes may still arrive, or be read, after that time."""
        with self._wake:
            self._stopping = True
            self._drop_all()
            self._wake.notify()
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        while True:
            try:
                if not self._turn():
                    return
            except Exception:
                logger.exception("%s failed; it goes on", self._thread.name)
                time.sleep(ERROR_PAUSE_S)

    def _turn(self) -> bool:
        """End what has landed, start what there is room for; False when all is over."""
        with self._wake:
            while not self._landed and not (self._may_start() and not self._stopping):
                if self._stopping and not self._flying:
                    return False
                self._wake.wait()
            landed = list(self._landed)
            self._landed.clear()
        for batch in landed:
            try:
                self._end(batch)
            finally:
                with self._wake:
                    del self._flying[id(batch)]
                    self._moving_bytes -= batch.bytes
        with self._wake:
            if self._stopping or not self._may_start():
                return True
            task, self._starting = self._take(), True
        try:
            self._start(task)
        finally:
            with self._wake:
                self._starting = False
        return True
