"""Decision on the numbers of replicas to have now, as a replica takes time to start and costs idle.

A replica that is ordered now serves after `start_s`. Therefore the counts must meet the forecast
for that time (`capacity.need`), and the need from now until then. An unneeded replica is worth
keeping if it is needed again soon: stopping it saves its time from now until it would have to start
again, and costs that start and the drain::

    keep, if the forecast needs it within   start + (start + drain)

all in seconds of a replica's time. There is no other hysteresis.

The last replica is stopped when no request is expected within the cost of a start plus its wait:
`rate (start + start + drain) < 1`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.autoscaling.capacity import (
    ReplicaBounds,
    ReplicaNeed,
    Slo,
    expected_in_time,
    find_need,
)
from headrace.autoscaling.forecast import AHEAD_S, STEP_S, RateForecast
from headrace.disaggregation import TrafficLoad

Forecaster = Callable[[float], RateForecast]
"""Function that returns the forecast for a number of seconds from now."""


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """Cost of starting and stopping a replica, in seconds of a replica's time.

    Attributes:
        start_s: seconds from the order until it serves.
        drain_s: seconds from the order to stop until its engine is free.
    """

    start_s: float
    drain_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("start_s", "drain_s"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")

    @property
    def stop_s(self) -> float:
        """Seconds without need for a replica from which on stopping it saves more than it costs."""
        return self.start_s + self.drain_s


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """Numbers of replicas to have, and the reason."""

    prefill: int
    decode: int
    reason: str

    @property
    def total(self) -> int:
        return self.prefill + self.decode


def decide(
    now: tuple[int, int],
    load: TrafficLoad,
    forecast: Forecaster,
    slo: Slo,
    prices: ReplicaCosts,
    bounds: ReplicaBounds,
) -> ReplicaCounts:
    """Return the counts to have now.

    Args:
        now: current prefill and decode replicas, including starting ones.
        load: means of a request; its rate is not used.
    """
    prefill, decode = _bounded(now, bounds)
    serves_s = STEP_S + prices.start_s  # a replica that the next decision orders
    soon = _most(forecast, serves_s)
    later = _most(forecast, serves_s + prices.stop_s)
    if bounds.decode[0] == 0 and later.rate * (prices.start_s + prices.stop_s) < 1.0:
        return ReplicaCounts(
            bounds.prefill[0], 0, f"idle: {3600 * later.rate:.2g} requests an hour"
        )
    want = find_need(load, soon, slo, bounds, (prefill, decode))
    rates = f"{soon.rate:.3g} requests/s in {prices.start_s:.0f} s"
    have = expected_in_time(load, soon, slo, prefill, decode)
    if have < slo.attainment and (want.in_time > have or want.total > prefill + decode):
        return _with_reason(want, f"{rates}: {have:.1%} in time with {prefill} + {decode}")
    keep = find_need(load, later, slo, bounds, (prefill, decode))
    if keep.total < prefill + decode and keep.in_time >= slo.attainment:
        return _with_reason(keep, f"{rates}, no more than {later.rate:.3g} until a start would pay")
    return ReplicaCounts(prefill, decode, f"{rates}: {have:.1%} in time")


def _with_reason(found: ReplicaNeed, reason: str) -> ReplicaCounts:
    counts = f"{found.prefill} + {found.decode} keep {found.in_time:.1%}"
    return ReplicaCounts(found.prefill, found.decode, f"{reason}; {counts}")


def _bounded(now: tuple[int, int], bounds: ReplicaBounds) -> tuple[int, int]:
    (p_least, p_most), (d_least, d_most) = bounds.prefill, bounds.decode
    return min(max(now[0], p_least), p_most), min(max(now[1], d_least), d_most)


def _most(forecast: Forecaster, until_s: float) -> RateForecast:
    """Return the forecast with the highest rate between now and `until_s`."""
    times = [0.0, *(one for one in AHEAD_S if one < until_s), until_s]
    return max((forecast(one) for one in times), key=lambda one: one.rate)
