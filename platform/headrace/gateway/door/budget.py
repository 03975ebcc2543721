"""How many bytes of request bodies a gateway holds at once.

A body counts from its first byte that has come, not from its announced length, so a client that
announces much and sends nothing takes nothing. It counts until no replica can need it again: when
the first byte of the answer has been sent, or the request has ended.
"""

from __future__ import annotations

from headrace.gateway import errors


class BodyBudget:
    """Bytes held by all requests of one event loop.

    Args:
        limit_bytes: how many there may be.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def hold(self) -> Held:
        """A request's part, nothing yet."""
        return Held(self)


class Held:
    """What one request holds."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self.size = budget, 0

    def add(self, size: int) -> None:
        """Hold more bytes.

        Raises:
            ApiError: 429, there is no room for them.
        """
        budget = self._budget
        if budget.held_bytes + size > budget.limit_bytes:
            raise errors.bodies_full(budget.limit_bytes)
        budget.held_bytes += size
        self.size += size

    def release(self) -> None:
        """Hold nothing any more. Idempotent."""
        self._budget.held_bytes -= self.size
        self.size = 0
