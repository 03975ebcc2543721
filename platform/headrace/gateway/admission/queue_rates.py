"""The rate at which the queue moves, for all tenants and for one.

The rate is the work that the queue sent while requests waited, in predicted seconds of engine time
a second. It therefore follows replicas that start and stop, and a price that is wrong by a factor
cancels out.

A tenant can count on its fair part of that rate. The prediction assumes that each of the other
tenants takes as much as it took recently, and at most an equal part. One more part is reserved,
because another tenant may arrive while a request waits (as in `ingress.body_budget`).
"""

from __future__ import annotations

import math
from collections import OrderedDict

from headrace.gateway.admission.fair_queue import MAX_TENANTS

DECAY_S = 3.0
SUM_INTERVAL_S = 0.1
_ACTIVE = 0.01
"""Share of the rate below which a tenant is not counted."""


class QueueRates:
    """Measured rates of the queue and of its tenants.

    Args:
        one_tenant: whether all requests belong to one tenant.
    """

    def __init__(self, *, one_tenant: bool = False) -> None:
        self._one_tenant = one_tenant
        self._sent_s, self._time_s = 0.0, 0.0
        self._waiting_since_s: float | None = None
        self._used: OrderedDict[str, tuple[float, float, float]] = OrderedDict()
        """Seconds that each tenant took, with exponential decay up to a time; that time; and the
        time of its first request."""
        self._summed_s = -math.inf
        self._count, self._equal, self._others = 0, 0.0, 0.0
        self.prior = 1.0
        """Expected rate before the first request has waited: the number of available engines."""

    @property
    def rate(self) -> float:
        """Rate of the queue in seconds of engine time a second, above 0."""
        return max((self._sent_s + self.prior) / (self._time_s + 1.0), 1e-6)

    def restart(self) -> None:
        """Reset the measurements, because costs are in another unit from now on."""
        self._sent_s = self._time_s = 0.0
        self._used.clear()
        self._summed_s = -math.inf

    def set_waiting(self, now_s: float, *, waiting: bool) -> None:
        """Record whether a request waits from now on."""
        since_s = self._waiting_since_s
        if since_s is not None:
            left = math.exp((since_s - now_s) / DECAY_S)
            self._sent_s *= left
            self._time_s = self._time_s * left + DECAY_S * (1.0 - left)
        self._waiting_since_s = now_s if waiting else None

    def record_sent(self, tenant: str, cost_s: float, now_s: float) -> None:
        """Record that a request was sent."""
        if self._waiting_since_s is not None:
            self._sent_s += cost_s
        if self._one_tenant:
            return
        taken_s, at_s, since_s = self._used.get(tenant, (0.0, now_s, now_s))
        taken_s = taken_s * math.exp((at_s - now_s) / DECAY_S) + cost_s
        self._used[tenant] = taken_s, now_s, since_s
        self._used.move_to_end(tenant)
        if len(self._used) > MAX_TENANTS:
            self._used.popitem(last=False)

    def rate_of(self, tenant: str, now_s: float) -> float:
        """Return the rate that a tenant can count on, in seconds of engine time a second."""
        rate = self.rate
        if self._one_tenant:
            return rate
        if now_s - self._summed_s >= SUM_INTERVAL_S:
            self._sum_up(rate, now_s)
        own = min(self._recent_rate(tenant, now_s), self._equal)
        active = own > 0.0 and own >= _ACTIVE * rate
        count = max(1, self._count + (not active))
        others = min(self._others - (own if active else 0.0), rate * (count - 1) / count)
        return (rate - max(0.0, others)) * count / (count + 1)

    def _recent_rate(self, tenant: str, now_s: float) -> float:
        """Return a tenant's recent rate, averaged over the time since its first request.

        The average decays with time constant `DECAY_S`, so older work hardly counts.
        """
        taken_s, at_s, since_s = self._used.get(tenant, (0.0, now_s, now_s))
        seen_s = DECAY_S * -math.expm1(min(since_s - now_s, -SUM_INTERVAL_S) / DECAY_S)
        return taken_s * math.exp((at_s - now_s) / DECAY_S) / seen_s

    def _sum_up(self, rate: float, now_s: float) -> None:
        """Sum up the rates of all tenants, at most every `SUM_INTERVAL_S`: it takes long."""
        self._summed_s = now_s
        rates = {tenant: self._recent_rate(tenant, now_s) for tenant in self._used}
        for tenant, each in rates.items():
            if each < 1e-4 * rate:
                del self._used[tenant]
        busy = [each for each in rates.values() if each >= _ACTIVE * rate]
        self._count = len(busy)
        self._equal = rate / max(1, self._count)
        self._others = sum(min(each, self._equal) for each in busy)
