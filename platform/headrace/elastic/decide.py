"""The counts of replicas to have now, since a replica takes time to start and costs while it idles.

A replica ordered now serves after `start_s`. So what must be there is what the forecast for then
needs (`capacity.need`), and never less than what is needed now. A replica that could go is worth
keeping if it is needed again soon: stopping it saves its time from now until it would have to start
again, and costs that start, the drain, and what its cache would have saved::

    keep, if the forecast needs it within   start + (start + drain + cache)

all in seconds of a replica's time. That is all the hysteresis there is: it follows from the price.

The last replica goes when the next request is not expected within the time that a start costs, its
own wait counted: `rate (start + start + drain + cache) < 1`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.advice import Load
from headrace.elastic.capacity import Bounds, Need, Slo, expected_in_time, need
from headrace.elastic.forecast import AHEAD_S, Ahead

Forecaster = Callable[[float], Ahead]
"""The forecast for so many seconds from now."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What it costs to start and to stop a replica.

    Attributes:
        start_s: from the order until it serves.
        drain_s: from the order to stop until its engine is free.
        cache_s: seconds that the engines compute again because its KV cache is gone; what the
            store keeps costs nothing.
    """

    start_s: float
    drain_s: float = 0.0
    cache_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("start_s", "drain_s", "cache_s"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")

    @property
    def stop_s(self) -> float:
        """Seconds that a replica must not be needed for, so that stopping it pays."""
        return self.start_s + self.drain_s + self.cache_s


@dataclass(frozen=True, slots=True)
class Counts:
    """How many replicas there should be, and why."""

    prefill: int
    decode: int
    reason: str

    @property
    def total(self) -> int:
        return self.prefill + self.decode


def decide(
    now: tuple[int, int],
    load: Load,
    forecast: Forecaster,
    slo: Slo,
    prices: Prices,
    bounds: Bounds,
) -> Counts:
    """The counts to have now.

    Args:
        now: prefill and decode replicas that there are, those that start included.
        load: means of a request; its rate is not used.
    """
    prefill, decode = _bounded(now, bounds)
    soon = _most(forecast, prices.start_s)
    later = _most(forecast, prices.start_s + prices.stop_s)
    if bounds.decode[0] == 0 and later.rate * (prices.start_s + prices.stop_s) < 1.0:
        return Counts(bounds.prefill[0], 0, f"idle: {3600 * later.rate:.2g} requests an hour")
    want = need(load, soon, slo, bounds, (prefill, decode))
    rates = f"{soon.rate:.3g} requests/s in {prices.start_s:.0f} s"
    have = expected_in_time(load, soon, slo, prefill, decode)
    if have < slo.share and (want.in_time > have or want.total > prefill + decode):
        return _told(want, f"{rates}: {have:.1%} in time with {prefill} + {decode}")
    keep = need(load, later, slo, bounds, (prefill, decode))
    if keep.total < prefill + decode and keep.in_time >= slo.share:
        return _told(keep, f"{rates}, no more than {later.rate:.3g} until a start would pay")
    return Counts(prefill, decode, f"{rates}: {have:.1%} in time")


def _told(found: Need, reason: str) -> Counts:
    counts = f"{found.prefill} + {found.decode} keep {found.in_time:.1%}"
    return Counts(found.prefill, found.decode, f"{reason}; {counts}")


def _bounded(now: tuple[int, int], bounds: Bounds) -> tuple[int, int]:
    (p_least, p_most), (d_least, d_most) = bounds.prefill, bounds.decode
    return min(max(now[0], p_least), p_most), min(max(now[1], d_least), d_most)


def _most(forecast: Forecaster, until_s: float) -> Ahead:
    """The forecast with the highest rate from now until then."""
    times = [0.0, *(one for one in AHEAD_S if one < until_s), until_s]
    return max((forecast(one) for one in times), key=lambda one: one.rate)
