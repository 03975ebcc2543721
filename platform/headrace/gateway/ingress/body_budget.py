"""The budget for bytes of request bodies that a gateway holds at once, in total and per tenant.

A body counts from its first received byte, not by its announced length. A client that announces
much and sends nothing therefore takes nothing. A body counts until no replica can need it again:
until the first byte of the answer is sent, or the request ends. A stream that another replica could
resume keeps its body to its end, as long as all streams keep no more than half of the budget.

A tenant may hold as many bytes as are free. A single tenant fills half of the budget. Two tenants
fill a third each. n tenants fill one part of n + 1 each, which leaves one part free for the next
tenant. That room has to be free before the next tenant arrives, because bodies are released only
after seconds or minutes. This is the dynamic threshold of shared-memory switches (Choudhury and
Hahne, "Dynamic queue length thresholds for shared-memory packet switches", 1998) with a factor of
1. Without keys there are no tenants, and requests may fill the budget.
"""

from __future__ import annotations

from headrace.gateway import errors


class BodyBudget:
    """Bytes held by all requests of one event loop.

    Args:
        limit_bytes: maximum number of bytes held.

    Attributes:
        held_bytes: number of bytes held now.
        kept_bytes: those of them that streams keep to their end.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.kept_bytes = 0
        self._held_by_tenant: dict[str, int] = {}

    def reserve(self, tenant: str | None = None) -> BodyReservation:
        """Return a request's part, empty at first; None stands for an unknown tenant."""
        return BodyReservation(self, tenant)

    def _add(self, tenant: str | None, size: int) -> None:
        free = self.limit_bytes - self.held_bytes - size
        if free < 0:
            raise errors.bodies_full(self.limit_bytes)
        if tenant is not None and size:
            held = self._held_by_tenant.get(tenant, 0) + size
            if held > free:
                raise errors.tenants_bodies_full(held - size)
            self._held_by_tenant[tenant] = held
        self.held_bytes += size

    def _release(self, tenant: str | None, size: int) -> None:
        self.held_bytes -= size
        if tenant is not None and size:
            left = self._held_by_tenant[tenant] - size
            if left:
                self._held_by_tenant[tenant] = left
            else:
                del self._held_by_tenant[tenant]


class BodyReservation:
    """The part of the budget that one request holds."""

    __slots__ = ("_budget", "_kept", "_tenant", "size")

    def __init__(self, budget: BodyBudget, tenant: str | None) -> None:
        self._budget, self._tenant, self.size, self._kept = budget, tenant, 0, 0

    def add(self, size: int) -> None:
        """Hold more bytes.

        Raises:
            ApiError: 429, there is no room for them, or no room for this tenant.
        """
        self._budget._add(self._tenant, size)
        self.size += size

    def keep(self, size: int) -> bool:
        """Keep `size` more bytes for the rest of a stream, of the bytes held or new ones.

        Returns:
            False if there is no room; bytes that were kept before stay kept.
        """
        budget = self._budget
        if 2 * (budget.kept_bytes + size) > budget.limit_bytes:
            return False
        try:
            self.add(max(0, self._kept + size - self.size))
        except errors.ApiError:
            return False
        self._kept += size
        budget.kept_bytes += size
        return True

    def release(self) -> None:
        """Release all bytes. Idempotent."""
        self._budget.kept_bytes -= self._kept
        self._kept = 0
        self._budget._release(self._tenant, self.size)
        self.size = 0
