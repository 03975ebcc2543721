"""How many bytes of request bodies a gateway holds at once, and how many of them a tenant's.

A body counts from its first byte that has come, not from its announced length, so a client that
announces much and sends nothing takes nothing. It counts until no replica can need it again: when
the first byte of the answer has been sent, or the request has ended. A stream that another replica
could take up keeps its body to its end, as long as all streams keep no more than half of the
budget.

A tenant may hold as many bytes as are free. Alone it fills half of the budget. Two tenants fill a
third each, and n of them leave one part of n + 1 free for the next one. That room has to be kept
before the next tenant comes, because bodies are given back only after seconds or minutes. This is
the dynamic threshold of shared-memory switches (Choudhury and Hahne, "Dynamic queue length
thresholds for shared-memory packet switches", 1998) with a factor of 1. Without keys there are no
tenants, and requests may fill the budget.
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
        self.kept_bytes = 0
        self._of_tenant: dict[str, int] = {}

    def hold(self, tenant: str | None = None) -> Held:
        """A request's part, nothing yet; of a tenant, or of the app where tenants are unknown."""
        return Held(self, tenant)

    def _take(self, tenant: str | None, size: int) -> None:
        free = self.limit_bytes - self.held_bytes - size
        if free < 0:
            raise errors.bodies_full(self.limit_bytes)
        if tenant is not None and size:
            held = self._of_tenant.get(tenant, 0) + size
            if held > free:
                raise errors.tenants_bodies_full(held - size)
            self._of_tenant[tenant] = held
        self.held_bytes += size

    def _give(self, tenant: str | None, size: int) -> None:
        self.held_bytes -= size
        if tenant is not None and size:
            left = self._of_tenant[tenant] - size
            if left:
                self._of_tenant[tenant] = left
            else:
                del self._of_tenant[tenant]


class Held:
    """What one request holds."""

    __slots__ = ("_budget", "_kept", "_tenant", "size")

    def __init__(self, budget: BodyBudget, tenant: str | None) -> None:
        self._budget, self._tenant, self.size, self._kept = budget, tenant, 0, 0

    def add(self, size: int) -> None:
        """Hold more bytes.

        Raises:
            ApiError: 429, there is no room for them, or not for this tenant.
        """
        self._budget._take(self._tenant, size)
        self.size += size

    def keep(self, size: int) -> bool:
        """Have so many bytes more for the rest of a stream, of those held or new ones.

        Returns:
            False if there is no room; what was kept before is kept on.
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
        """Hold nothing any more. Idempotent."""
        self._budget.kept_bytes -= self._kept
        self._kept = 0
        self._budget._give(self._tenant, self.size)
        self.size = 0
