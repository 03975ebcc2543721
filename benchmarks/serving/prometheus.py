"""Reading histograms out of Prometheus' text format, and quantiles out of histograms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_BOUND = re.compile(r'(?:^|,)le="([^"]*)"')


@dataclass(frozen=True)
class Histogram:
    """Counts up to each upper bound (`inf` is all of them), and the sum of what was observed."""

    counts: Mapping[float, float]
    total: float

    @property
    def count(self) -> int:
        """How many were observed."""
        return round(self.counts.get(math.inf, 0))

    @property
    def mean(self) -> float:
        """NaN of nothing."""
        return self.total / self.count if self.count else math.nan

    def since(self, before: Histogram) -> Histogram:
        """Return the observations after `before` was read."""
        counts = {b: n - before.counts.get(b, 0) for b, n in self.counts.items()}
        return Histogram(counts, self.total - before.total)

    def quantile(self, q: float) -> float:
        """Return a quantile by linear interpolation within a bucket, as Prometheus does; NaN if
        there are no observations.

        A quantile in the last bucket is the greatest finite bound: it is at least that.
        """
        rank, below, lower = q * self.count, 0.0, 0.0
        if self.count == 0:
            return math.nan
        for bound, count in sorted(self.counts.items()):
            if count >= rank and count > below:
                if math.isinf(bound):
                    return lower
                return lower + (bound - lower) * (rank - below) / (count - below)
            below, lower = count, bound
        return lower


def histogram(text: str, name: str) -> Histogram:
    """Return the histogram `name`, summed over all its label sets; empty if it is not there."""
    counts: dict[float, float] = {}
    total = 0.0
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        metric, labels, value = found.groups()
        if metric == f"{name}_sum":
            total += float(value)
        elif metric == f"{name}_bucket" and (bound := _BOUND.search(labels or "")):
            at = float(bound.group(1))
            counts[at] = counts.get(at, 0.0) + float(value)
    return Histogram(counts, total)
