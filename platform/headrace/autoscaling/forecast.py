"""Forecasts the request rate, minutes to an hour ahead, from the counts of each minute.

It averages four simple forecasts:

- the level of the last minutes: Holt's method with a weight of a tenth for each new minute, more at
  high rates, and with the trend added each minute;
- the mean of the last half hour;
- the level plus its trend;
- the level times the change at this time of day on the days before.

Which one is best depends on the traffic and on the time ahead. Therefore the squared error of each
forecast is measured for each of `AHEAD_S`, and sets its weight::

    weight = 1 / error^8,   error = mean of (forecast - count)^2 over about the last three hours

Errors are computed with the square roots of the counts. Their noise is 1/2 for independent arrivals
at any load, so errors that were learned at night also hold by day. `RateForecaster.at_horizon`
returns the expected rate and the standard deviation of the square root of a count.

Memory is bounded: one number for each five minutes of the day, and an hour of forecasts that are
not yet compared.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BIN_S = 60.0
AHEAD_S = (60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0, 3600.0)
DAY_S = 86_400.0
SEASONS = 288
"""Number of parts of a day with their own mean count."""
_MIN_LEVEL, _MAX_LEVEL, _DRIFT = 0.1, 0.5, 0.005
"""Minimum and maximum weight of a new minute in the level, and the drift that sets the weight. The
weight is the steady gain of a Kalman filter for a level that drifts by this fraction of itself each
minute, and whose counts' square roots have a noise of 1/2."""
_MEAN, _TREND = 1 / 30, 0.2
_DAMP = 0.97
"""Factor of a trend for each minute ahead: no trend has continued for an hour."""
_LEARN, _LEARN_DAY = 1 / 180, 0.5
_SMOOTH = np.array([1, 2, 3, 4, 3, 2, 1]) / 16
_AHEAD_S = np.array(AHEAD_S)
_MAX_RATIO = 10.0
_SHARP = 8
"""Power of the errors in the weights. Most of an error is the noise of the counts, which all
forecasts share, so the error of a clearly worse forecast is only a tenth larger."""
_LEAST = 0.05
"""Minimum squared error of square roots in the weights: independent arrivals have 0.25."""


@dataclass(frozen=True, slots=True)
class RateForecast:
    """A forecast.

    Attributes:
        rate: expected requests a second.
        root_sd: standard deviation of the square root of a bin's count.
        bin_s: seconds of a bin.
    """

    rate: float
    root_sd: float
    bin_s: float = BIN_S

    def at(self, deviations: float) -> float:
        """Return the rate `deviations` standard deviations above the expected one; at least 0."""
        root = math.sqrt(self.rate * self.bin_s) + deviations * self.root_sd
        return max(0.0, root) ** 2 / self.bin_s


@dataclass(slots=True)
class RateForecaster:
    """Forecaster that learns the counts of bins, in order, and forecasts from the last bin's end.

    Attributes:
        seasonal: whether the days before are used.
    """

    seasonal: bool = True
    _bins: int = 0
    level: float = 0.0
    _mean: float = 0.0
    _trend: float = 0.0
    _day: NDArray[np.float64] = field(default_factory=lambda: np.full(SEASONS, np.nan))
    _profile: NDArray[np.float64] = field(default_factory=lambda: np.full(SEASONS, np.nan))
    _part: list[float] = field(default_factory=list)
    _errors: NDArray[np.float64] = field(default_factory=lambda: np.full((len(AHEAD_S), 5), 1.0))
    _open: list[deque[tuple[int, NDArray[np.float64]]]] = field(
        default_factory=lambda: [deque() for _ in AHEAD_S]
    )

    @property
    def known_s(self) -> float:
        """Seconds of observed traffic."""
        return self._bins * BIN_S

    def observe(self, count: float, at_s: float) -> None:
        """Learn the number of requests in the bin that ended at `at_s`.

        Args:
            count: requests in the bin.
            at_s: time on a clock whose days have 86,400 s, such as Unix time.

        Raises:
            ValueError: the count is below 0 or no number.
        """
        if not 0.0 <= count < math.inf:
            raise ValueError(f"a bin's count must be 0 or more, not {count}")
        self._bins += 1
        self._compare(count)
        if self._bins == 1:
            self.level = self._mean = count
        before = self.level
        gain = min(_MAX_LEVEL, max(_MIN_LEVEL, _DRIFT * math.sqrt(self.level)))
        self.level += self._trend
        self.level = max(0.0, self.level + gain * (count - self.level))
        self._mean += max(_MEAN, 1.0 / self._bins) * (count - self._mean)
        self._trend += _TREND * gain * (self.level - before - self._trend)
        self._learn_day(count, at_s)
        found = self._each(_AHEAD_S, at_s)
        mixed = (self._weights() * found).sum(axis=1, keepdims=True)
        for open_, ahead_s, row in zip(self._open, AHEAD_S, np.hstack([found, mixed]), strict=True):
            open_.append((self._bins + round(ahead_s / BIN_S), row))

    def at_horizon(self, ahead_s: float, now_s: float) -> RateForecast:
        """Return the forecast for `ahead_s` seconds after the last bin's end."""
        if self._bins == 0:
            return RateForecast(0.0, 0.5)
        at = int(np.argmin(np.abs(_AHEAD_S - ahead_s)))
        found = self._each(np.array([ahead_s]), now_s)[0]
        count = float(self._weights()[at] @ found)
        return RateForecast(count / BIN_S, math.sqrt(float(self._errors[at, 4])))

    def _each(self, ahead_s: NDArray[np.float64], now_s: float) -> NDArray[np.float64]:
        """Return the four forecasts of a bin's count, [times, 4]."""
        steps = ahead_s / BIN_S
        trend = self._trend * _DAMP * (1.0 - _DAMP**steps) / (1.0 - _DAMP)
        ratio = np.ones(len(ahead_s))
        if self.seasonal:
            now, then = self._season(now_s), self._season(now_s + ahead_s)
            known = np.isfinite(now) & np.isfinite(then) & (now > 0.0)
            ratio = np.where(known, then / np.where(known, now, 1.0), 1.0)
        found = np.empty((len(ahead_s), 4))
        found[:, 0], found[:, 1] = self.level, self._mean
        found[:, 2] = np.maximum(0.0, self.level + trend)
        found[:, 3] = self.level * np.minimum(ratio, _MAX_RATIO)
        return found

    def _weights(self) -> NDArray[np.float64]:
        """Return the weights of the four forecasts for each of `AHEAD_S`; each row's sum is 1."""
        weights = 1.0 / np.maximum(self._errors[:, :4], _LEAST) ** _SHARP
        normed: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        return normed

    def _compare(self, count: float) -> None:
        """Learn the errors of the forecasts that were made for this bin."""
        for at, open_ in enumerate(self._open):
            while open_ and open_[0][0] <= self._bins:
                _, found = open_.popleft()
                wrong = (np.sqrt(found) - math.sqrt(count)) ** 2
                self._errors[at] += _LEARN * (wrong - self._errors[at])

    def _season(self, at_s: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean counts of the days before around these times; nan if unknown."""
        part = (np.asarray(at_s) % DAY_S / DAY_S * SEASONS).astype(int)
        profile: NDArray[np.float64] = self._profile[part]
        return profile

    def _learn_day(self, count: float, at_s: float) -> None:
        """Add a bin to its part of the day; at the end of the part, update the daily profile."""
        self._part.append(count)
        size_s = DAY_S / SEASONS
        if int(at_s // size_s) == int((at_s - BIN_S) // size_s):
            return
        part = int((at_s - BIN_S) % DAY_S / DAY_S * SEASONS)
        mean = sum(self._part) / len(self._part)
        self._part.clear()
        old = self._day[part]
        self._day[part] = mean if math.isnan(old) else old + _LEARN_DAY * (mean - old)
        reach = len(_SMOOTH) // 2
        around = np.concatenate([self._day[-reach:], self._day, self._day[:reach]])
        self._profile = np.convolve(around, _SMOOTH, "valid")
