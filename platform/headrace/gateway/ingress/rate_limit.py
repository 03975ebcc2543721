"""The rate limit of one API key: requests under way, and requests a minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from headrace.gateway import errors


@dataclass(slots=True, eq=False)
class RateLimit:
    """A key's limits and its present usage.

    Attributes:
        name: the key's name, for errors.
        max_concurrent: maximum number of requests under way; None for no limit.
        requests_per_minute: size and refill of the token bucket; None for no limit.
        running: number of the key's requests under way.
    """

    name: str = ""
    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    running: int = 0
    _tokens: float = field(default=0.0, repr=False)
    _since_s: float = field(default=0.0, repr=False)

    @contextmanager
    def request(self, now_s: float, *, makes_work: bool = True) -> Iterator[None]:
        """Count one request until it ends.

        Args:
            makes_work: if False, the request only reads, ends or deletes what is there. It counts
                toward the requests a minute, not toward those under way: a client whose only place
                is taken by a background response can still ask for it and cancel it.

        Raises:
            ApiError: 429, the key is at a limit; the error has the time after which to try again.
        """
        if not makes_work:
            self._take_token(now_s)
            yield
            return
        if self.max_concurrent is not None and self.running >= self.max_concurrent:
            raise errors.key_is_busy(self.name, self.max_concurrent)
        self._take_token(now_s)
        with self.hold():
            yield

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Count as one request under way, without the limits: it follows from a counted one."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _take_token(self, now_s: float) -> None:
        """Take a token for one request from the bucket.

        The bucket fills evenly, and holds at most the requests of one minute.
        """
        maximum = self.requests_per_minute
        if maximum is None:
            return
        filled = maximum if not self._since_s else (now_s - self._since_s) * maximum / 60.0
        self._tokens = min(float(maximum), self._tokens + filled)
        self._since_s = now_s
        if self._tokens < 1.0:
            wait_s = (1.0 - self._tokens) * 60.0 / maximum
            raise errors.key_is_too_fast(self.name, maximum, wait_s)
        self._tokens -= 1.0
