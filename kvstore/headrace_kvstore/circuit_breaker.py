"""A circuit breaker: whether to try again after failures. Pure; the caller passes the time.

    closed --`failures` in a row--> open --after a pause--> half-open --success--> closed
                                      ^------failure, pause doubled------|

An open breaker allows nothing, so a dead endpoint or peer costs no thread and no waiting. A
half-open breaker allows one try at a time. The caller then reports `success`, `failure` or
`neither`.
"""

from __future__ import annotations

import threading

FAILURES = 5
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0


class CircuitBreaker:
    """Thread-safe. Times are seconds of one clock.

    Args:
        failures: number of failures in a row that open it.
        first_s, last_s: pause before the first probe; each probe that fails doubles it, up to last.
    """

    def __init__(
        self,
        failures: int = FAILURES,
        first_s: float = FIRST_PAUSE_S,
        last_s: float = LAST_PAUSE_S,
    ) -> None:
        self._limit, self._first_s, self._last_s = failures, first_s, last_s
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = first_s
        self._open_until_s: float | None = None
        self._probing = False
        self.opened = 0
        """How often the breaker has opened; a probe that failed counts."""

    @property
    def closed(self) -> bool:
        """Whether the breaker allows every try."""
        return self._open_until_s is None

    def allow(self, now_s: float) -> bool:
        """Whether to try now; after True the caller must report the outcome."""
        with self._lock:
            if self._open_until_s is None:
                return True
            if self._probing or now_s < self._open_until_s:
                return False
            self._probing = True
            return True

    def blocked(self, now_s: float) -> bool:
        """Whether `allow` would return False; takes no probe."""
        with self._lock:
            until_s = self._open_until_s
            return until_s is not None and (self._probing or now_s < until_s)

    def success(self) -> None:
        """Record that a try succeeded."""
        with self._lock:
            self._failures, self._pause_s = 0, self._first_s
            self._open_until_s, self._probing = None, False

    def failure(self, now_s: float) -> None:
        """Record that a try failed through the fault of the peer or endpoint."""
        with self._lock:
            self._failures += 1
            if self._open_until_s is None:
                if self._failures >= self._limit:
                    self._open_until_s = now_s + self._pause_s
                    self.opened += 1
            elif self._probing:
                self._pause_s = min(2 * self._pause_s, self._last_s)
                self._open_until_s = now_s + self._pause_s
                self._probing = False
                self.opened += 1

    def neither(self) -> None:
        """Record that a try was given up without an outcome."""
        with self._lock:
            self._probing = False
