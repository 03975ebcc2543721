"""State of the autoscaler of one model, in Serve's controller; its roles' policies share it.

Serve calls each deployment's policy separately, about ten times a second. The decode role's policy
records its replicas' metrics; both policies read the counts that were decided. `AutoscalerState`
counts the requests of each quarter minute, measures how long replicas take to start, and decides
after each, or when a replica was added or removed.

After a restart of Serve's controller no traffic is known. Nothing is decided in the first minute,
and no replica is stopped before the load was observed for `ReplicaCosts.stop_s`.

Pure: no Ray, no clock. Serve's controller calls it from one thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low

from headrace.autoscaling.arrivals import METRICS_DELAY_S, ArrivalCounter
from headrace.autoscaling.capacity import ReplicaBounds, Slo
from headrace.autoscaling.forecast import BIN_S, RateForecast, RateForecaster
from headrace.autoscaling.load_average import decayed_average
from headrace.autoscaling.replica_counts import ReplicaCosts, ReplicaCounts, decide
from headrace.autoscaling.replica_metrics import decode_metrics
from headrace.disaggregation import TrafficLoad, load_of

ROLES = ("prefill", "decode")
POLL_INTERVAL_S = 5.0
"""Seconds between two reads of the replicas' metrics."""
AVERAGING_S = 3600.0
"""Seconds over which means of requests are averaged. Over less time, single long prompts would
change the means."""
RECENT_STARTS = 9
"""Number of recent starts whose median is the expected start time. A single start that waited for a
machine or for a quota does not change the median."""
MAX_STARTS = 256


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """Serve's counts of one role: replicas that run, and replicas that Serve wants."""

    running: int
    wanted: int


@dataclass(slots=True)
class AutoscalerState:
    """State of one model of an app.

    Attributes:
        counts: the last decision; None while too little is known.
    """

    slo: Slo
    prices: ReplicaCosts
    bounds: ReplicaBounds
    counts: ReplicaCounts | None = None
    forecast: RateForecaster = field(default_factory=RateForecaster)
    load: TrafficLoad | None = None
    _loads: int = 0
    _seen: dict[str, RoleStatus] = field(default_factory=dict)
    arrivals: ArrivalCounter = field(default_factory=ArrivalCounter)
    _started_s: float = -math.inf
    _starts: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STARTS))
    _end_s: float = -math.inf
    _polled_s: float = -1e18
    _decided_for: tuple[tuple[int, int], float] | None = None
    _orders: dict[str, deque[float]] = field(
        default_factory=lambda: {role: deque(maxlen=MAX_STARTS) for role in ROLES}
    )

    def record_replicas(self, role: str, seen: RoleStatus, now_s: float) -> None:
        """Record Serve's counts of a role.

        Each replica that started to run since the last call closes the oldest open order.
        """
        before, orders = self._seen.get(role), self._orders[role]
        self._seen[role] = seen
        if before is None:
            return
        for _ in range(min(max(0, seen.wanted - before.wanted), MAX_STARTS)):
            orders.append(now_s)
        for _ in range(min(len(orders), max(0, seen.running - before.running))):
            self._learn_start(orders.popleft(), now_s)
        while len(orders) > max(0, seen.wanted - seen.running):
            orders.pop()

    def _learn_start(self, ordered_s: float, now_s: float) -> None:
        """Learn the duration of a start of either role.

        A start that was under way when the last counted start ended is skipped, since both waited
        for the same cause.
        """
        if ordered_s < self._started_s:
            return
        self._started_s = now_s
        if not self._starts:
            self._starts.append(self.prices.start_s)
        self._starts.append(now_s - ordered_s)
        self.prices = replace(self.prices, start_s=median_low(self._starts))

    def is_poll_due(self, now_s: float) -> bool:
        """Return whether the decode replicas' metrics should be read again."""
        return now_s - self._polled_s >= POLL_INTERVAL_S

    def record_metrics(self, metrics: Mapping[str, Mapping[str, float]], now_s: float) -> None:
        """Learn from the current metrics of all decode replicas.

        Args:
            metrics: numbers by name, by replica.
        """
        self._polled_s = now_s
        self.arrivals.record(metrics, now_s)
        for count, end_s in self.arrivals.closed(now_s):
            self.forecast.observe(count)
            self._end_s = end_s
        routers = [
            router for one in metrics.values() if (router := decode_metrics(one)) is not None
        ]
        if (load := load_of(routers)) is not None:
            self._loads += 1
            part = max(1.0 / self._loads, POLL_INTERVAL_S / AVERAGING_S)
            self.load = decayed_average(self.load, load, part)

    def decide(self) -> ReplicaCounts | None:
        """Return the counts to have; None while too little is known."""
        known_s = self.forecast.known_s
        if self.load is None or known_s < BIN_S or len(self._seen) < len(ROLES):
            return None
        there = tuple(max(self._seen[role].running, self._seen[role].wanted) for role in ROLES)
        now = (there[0], there[1])
        if self.counts is None or self._decided_for != (now, self._end_s):
            self.counts = decide(now, self.load, self._ahead, self.slo, self.prices, self.bounds)
            if known_s < self.prices.stop_s:
                self.counts = _no_fewer(self.counts, now, self.bounds)
            self._decided_for = now, self._end_s
        return self.counts

    def _ahead(self, ahead_s: float) -> RateForecast:
        """Return the forecast from now on; the last closed step ended some time ago."""
        return self.forecast.at_horizon(METRICS_DELAY_S + ahead_s)


def _no_fewer(counts: ReplicaCounts, now: tuple[int, int], bounds: ReplicaBounds) -> ReplicaCounts:
    """Return counts that stop no replica that runs within its role's bounds."""
    prefill = max(counts.prefill, min(now[0], bounds.prefill[1]))
    decode = max(counts.decode, min(now[1], bounds.decode[1]))
    if (prefill, decode) == (counts.prefill, counts.decode):
        return counts
    return ReplicaCounts(
        prefill,
        decode,
        f"{counts.reason}; the traffic is not known for long enough to stop a replica",
    )


_STATES: dict[tuple[str, str], AutoscalerState] = {}


def state_of(
    app: str, slo: Slo, prices: ReplicaCosts, bounds: ReplicaBounds, model: str = ""
) -> AutoscalerState:
    """Return the state of a model, with these bounds and targets; its learned state stays.

    Args:
        model: its name in the configuration; empty if the app serves one model.
    """
    state = _STATES.setdefault((app, model), AutoscalerState(slo, prices, bounds))
    state.slo, state.bounds = slo, bounds
    return state
