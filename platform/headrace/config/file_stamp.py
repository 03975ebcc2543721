"""Decides when a file is read again: after a change, and later again after a failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Stamp = tuple[int, ...] | None

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0
"""A failed read is tried again after the first time, then after twice as long each time."""


def stamp_of(file: Path) -> Stamp:
    """Return a value that changes with the file, its owner or its mode; None if it is missing."""
    try:
        found = file.stat()
    except OSError:
        return None
    # A change of owner or mode moves the ctime only, and may make a file readable again.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


class ReloadSchedule:
    """Decides when files are read again: at once after a change, later again after a failure.

    A stamp counts as read only after a read of these contents succeeded.

    Args:
        stamp: of the files, taken before they were read for the first time.
        now_s: a monotonic clock.
    """

    def __init__(self, stamp: object, now_s: Callable[[], float]) -> None:
        self._read, self._now_s = stamp, now_s
        self._failed: object = stamp
        self._retry_s, self._next_s = FIRST_RETRY_S, 0.0

    @property
    def is_stale(self) -> bool:
        """Whether the files have changed and could not be read since."""
        return self._failed != self._read

    def is_due(self, stamp: object) -> bool:
        """Return whether the files should be read now.

        Args:
            stamp: of the files as they are.
        """
        if stamp == self._read:
            self._failed = self._read  # the change that could not be read was undone
            return False
        return stamp != self._failed or self._now_s() >= self._next_s

    def record_success(self, stamp: object) -> None:
        """Record that the files were read.

        Args:
            stamp: of the files, taken before the read.
        """
        self._read = self._failed = stamp

    def record_failure(self, stamp: object) -> None:
        """Record that the files could not be read.

        Args:
            stamp: of the files, taken before the read.
        """
        self._retry_s = (
            min(2 * self._retry_s, MAX_RETRY_S) if stamp == self._failed else FIRST_RETRY_S
        )
        self._failed = stamp
        self._next_s = self._now_s() + self._retry_s
