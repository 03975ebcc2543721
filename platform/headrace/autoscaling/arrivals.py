"""The number of requests that arrived in each step, from the totals that replicas report.

Replicas report the number of their requests now and then, with the time. A replica's total at the
end of a step is read off the line through its last two reports, extended by up to `AHEAD_S`. So a
step does not look fuller than another because more reports came in it. The next step corrects an
estimate that was too low or too high.

Pure: no Ray, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headrace.autoscaling.forecast import BIN_S, STEP_S
from headrace.autoscaling.replica_metrics import AGE_S, AT_S, REQUESTS

METRICS_DELAY_S = 5.0
"""Seconds between the end of a step and its count. Ray Serve's replicas take their numbers every
6 s and send them every 10 s, so a part of most steps is estimated."""
AHEAD_S = 20.0
"""Seconds after a report for which a replica's rate is taken to go on."""
REPLICA_TIMEOUT_S = 3600.0
"""Seconds within which a replica that Serve does not list as running may return."""
LONG_PAUSE_S = 3600.0
MAX_REPLICAS = 4096


@dataclass(slots=True)
class RequestTotal:
    """A replica's requests since its start.

    Attributes:
        requests, at_s: its last report, and the report's time.
        rate: requests a second between its last two reports.
        counted: requests that closed steps have.
        read_s: when the report was read.
    """

    requests: float
    at_s: float
    counted: float
    read_s: float
    rate: float = 0.0

    def report(self, requests: float, at_s: float) -> None:
        """Note a new report."""
        if at_s <= self.at_s:
            return
        new, seconds = requests - self.requests, at_s - self.at_s
        if new < 0.0:  # it has started again
            self.counted += new
            new = 0.0
        if seconds > BIN_S:  # after a long pause, only the requests of the last minute count
            self.counted += new * (1.0 - BIN_S / seconds)
        self.requests, self.at_s, self.rate = requests, at_s, new / seconds

    def count_until(self, at_s: float) -> float:
        """Return the requests until a time that were not counted before."""
        total = self.requests + self.rate * min(AHEAD_S, at_s - self.at_s)
        new = max(0.0, total - self.counted)
        self.counted += new
        return new


@dataclass(slots=True)
class ArrivalCounter:
    """Counter of arrivals, by step.

    Attributes:
        totals: by replica, in the order of their last reading.
        end_s: end of the open step; None before the first reading.
    """

    totals: dict[str, RequestTotal] = field(default_factory=dict)
    end_s: float | None = None
    _since_s: float = math.inf

    def record(self, metrics: Mapping[str, Mapping[str, float]], now_s: float) -> None:
        """Read the reports of all replicas.

        Args:
            metrics: numbers by name (`replica_metrics`), by replica.
        """
        self._since_s = min(self._since_s, now_s)
        if self.end_s is None or now_s - self.end_s > LONG_PAUSE_S:
            self.end_s = now_s + STEP_S
        for name, one in metrics.items():
            requests, at_s = one.get(REQUESTS, 0.0), min(now_s, one.get(AT_S, now_s))
            if not (0.0 <= requests < math.inf and at_s > -math.inf):
                continue
            total = self.totals.pop(name, None) or self._first(one, requests, at_s, now_s)
            total.report(requests, at_s)
            total.read_s = now_s
            self.totals[name] = total
        while self.totals and (
            len(self.totals) > MAX_REPLICAS or self._oldest_s() < now_s - REPLICA_TIMEOUT_S
        ):
            del self.totals[next(iter(self.totals))]

    def closed(self, now_s: float) -> Iterator[tuple[float, float]]:
        """Yield count and end of each step that ended `METRICS_DELAY_S` ago, and begin the next."""
        while self.end_s is not None and now_s >= self.end_s + METRICS_DELAY_S:
            end_s = self.end_s
            yield sum(each.count_until(end_s) for each in self.totals.values()), end_s
            self.end_s += STEP_S

    def _first(
        self, metrics: Mapping[str, float], requests: float, at_s: float, now_s: float
    ) -> RequestTotal:
        """Make the entry of a replica that was not seen before.

        A replica that is older than this counter served requests before anything was read: it
        counts from now on.
        """
        age_s = metrics.get(AGE_S, math.inf)
        if 0.0 < age_s <= now_s - self._since_s:
            return RequestTotal(0.0, at_s - age_s, 0.0, now_s)
        return RequestTotal(requests, at_s, requests, now_s)

    def _oldest_s(self) -> float:
        return next(iter(self.totals.values())).read_s
