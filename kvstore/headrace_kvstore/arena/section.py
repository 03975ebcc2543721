"""The arena's critical section, between all threads and processes that map it.

The header's section word is odd inside a section. If it is odd on entry, a holder died or raised
inside; entering then repairs the arena.
"""

from __future__ import annotations

import logging
from types import TracebackType

from headrace_kvstore.arena import kernels
from headrace_kvstore.arena.geometry import SECTION, Tables
from headrace_kvstore.arena.locking import FileLock

logger = logging.getLogger("headrace.kvstore")


class Refused(ValueError):
    """Raised in a section that has changed nothing."""


class Section:
    """A context manager; entering raises LockBusyError after `patience_s` seconds.

    Args:
        words: the header's words, u64, as a memoryview.
    """

    def __init__(
        self, lock: FileLock, words: memoryview, tables: Tables, patience_s: float
    ) -> None:
        self._lock, self._words, self._t = lock, words, tables
        self._patience_s = patience_s

    def __enter__(self) -> None:
        self._lock.acquire(self._patience_s)
        try:
            if self._words[SECTION] % 2:
                kernels.repair(self._t)
                logger.warning("arena repaired: a process died inside a critical section")
            else:
                self._words[SECTION] += 1
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or kind is Refused:
            self._words[SECTION] += 1
        self._lock.release()
