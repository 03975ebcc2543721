"""Whether a peer is worth asking: after failures in a row it is left alone for a while. Pure.

closed -> (FAILURES in a row) -> open for `pause_s` -> one try -> closed, or open twice as long, up
to LONGEST times the first pause.
"""

from __future__ import annotations

import math

FAILURES = 3
LONGEST = 16


class Breaker:
    """Of one peer; times are seconds of any one clock."""

    def __init__(self, pause_s: float) -> None:
        self._first_s = self._pause_s = pause_s
        self._failures = 0
        self._open_until_s = -math.inf
        self.opened = 0
        """How often it has opened."""

    def allows(self, now_s: float) -> bool:
        """Whether the peer may be asked."""
        return now_s >= self._open_until_s

    def success(self) -> None:
        """The peer did what it was asked."""
        self._failures, self._pause_s = 0, self._first_s

    def failure(self, now_s: float) -> None:
        """It did not, or was too slow."""
        self._failures += 1
        if self._failures >= FAILURES:
            self._open_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST * self._first_s)
            self.opened += 1
