"""Forecasts the request rate, a minute to an hour ahead, from the counts of each quarter minute.

It averages five simple forecasts:

- the level of the last minutes: Holt's method with a weight of a tenth for each new minute, more at
  high rates, and with the trend added;
- the mean of the last half hour;
- the level plus its trend;
- the level times the change at this time of day on the days before;
- for bursts, a fast level plus its trend: Holt's method over about a minute.

Which one is best depends on the traffic and on the time ahead. Therefore the squared error of each
forecast is measured for each of `AHEAD_S`, and sets its weight::

    weight = 1 / error^8,   error = mean of (forecast - count)^2 over about the last three hours

Errors are computed with the square roots of a minute's counts. Their noise is 1/2 for independent
arrivals at any load, so errors that were learned at night also hold by day.
`RateForecaster.at_horizon` returns the expected rate and the standard deviation of the square root
of a minute's count.

Memory is bounded: one number for each five minutes of the day, and an hour of forecasts that are
not yet compared.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BIN_S, STEP_S = 60.0, 15.0
"""Seconds of the counts that are forecast, and between two observations."""
_STEPS = round(BIN_S / STEP_S)
AHEAD_S = (60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0, 3600.0)
DAY_S = 86_400.0
SEASONS = 288
"""Number of parts of a day with their own mean count."""
_MIN_LEVEL, _MAX_LEVEL, _DRIFT = 0.1 / _STEPS, 0.5 / _STEPS, 0.005 / _STEPS
"""Minimum and maximum weight of a new count in the level, and the drift that sets the weight. The
weight is the steady gain of a Kalman filter for a level that drifts by 0.005 of itself each minute,
and whose minutes' square roots have a noise of 1/2."""
_MEAN, _TREND = 1 / 30 / _STEPS, 0.2
_FAST, _FAST_TREND = 0.3, 0.5
"""Weights of a new count in the fast level and its trend: of a grid, those with the smallest error
one to three minutes ahead for `benchmarks.autoscaling.burst`."""
_DAMP, _FAST_DAMP = 0.97 ** (1 / _STEPS), 0.8 ** (1 / _STEPS)
"""Factors of the trends for each step ahead: no trend has continued for an hour, and no burst for
ten minutes."""
_LEARN, _LEARN_DAY = 1 / 180 / _STEPS, 0.5
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
    """Forecaster that learns the counts of steps, in order, and forecasts from the last step's end.

    Attributes:
        seasonal: whether the days before are used.
    """

    seasonal: bool = True
    _steps: int = 0
    level: float = 0.0
    _mean: float = 0.0
    _trend: float = 0.0
    _fast: float = 0.0
    _fast_trend: float = 0.0
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _day: NDArray[np.float64] = field(default_factory=lambda: np.full(SEASONS, np.nan))
    _profile: NDArray[np.float64] = field(default_factory=lambda: np.full(SEASONS, np.nan))
    _part: list[float] = field(default_factory=list)
    _errors: NDArray[np.float64] = field(default_factory=lambda: np.full((len(AHEAD_S), 6), 1.0))
    _open: list[deque[tuple[int, NDArray[np.float64]]]] = field(
        default_factory=lambda: [deque() for _ in AHEAD_S]
    )

    @property
    def known_s(self) -> float:
        """Seconds of observed traffic."""
        return self._steps * STEP_S

    def observe(self, count: float, at_s: float) -> None:
        """Learn the number of requests in the step that ended at `at_s`.

        Args:
            count: requests in the step.
            at_s: time on a clock whose days have 86,400 s, such as Unix time.

        Raises:
            ValueError: the count is below 0 or no number.
        """
        if not 0.0 <= count < math.inf:
            raise ValueError(f"a step's count must be 0 or more, not {count}")
        self._steps += 1
        self._last.append(count)
        self._compare()
        a_minute = count * _STEPS
        if self._steps == 1:
            self.level = self._mean = self._fast = a_minute
        before = self.level
        gain = min(_MAX_LEVEL, max(_MIN_LEVEL, _DRIFT * math.sqrt(self.level)))
        self.level += self._trend
        self.level = max(0.0, self.level + gain * (a_minute - self.level))
        self._mean += max(_MEAN, 1.0 / self._steps) * (a_minute - self._mean)
        self._trend += _TREND * gain * (self.level - before - self._trend)
        wrong = a_minute - self._fast - self._fast_trend
        self._fast = max(0.0, self._fast + self._fast_trend + _FAST * wrong)
        self._fast_trend += _FAST * _FAST_TREND * wrong
        self._learn_day(a_minute, at_s)
        found = self._each(_AHEAD_S, at_s)
        mixed = (self._weights() * found).sum(axis=1, keepdims=True)
        for open_, ahead_s, row in zip(self._open, AHEAD_S, np.hstack([found, mixed]), strict=True):
            open_.append((self._steps + round(ahead_s / STEP_S) + _STEPS // 2, row))

    def at_horizon(self, ahead_s: float, now_s: float) -> RateForecast:
        """Return the forecast for `ahead_s` seconds after the last step's end."""
        if self._steps == 0:
            return RateForecast(0.0, 0.5)
        at = int(np.argmin(np.abs(_AHEAD_S - ahead_s)))
        found = self._each(np.array([ahead_s]), now_s)[0]
        count = float(self._weights()[at] @ found)
        return RateForecast(count / BIN_S, math.sqrt(float(self._errors[at, -1])))

    def _each(self, ahead_s: NDArray[np.float64], now_s: float) -> NDArray[np.float64]:
        """Return the five forecasts of a minute's count, [times, 5]."""
        steps = ahead_s / STEP_S
        slow, fast = (damp * (1.0 - damp**steps) / (1.0 - damp) for damp in (_DAMP, _FAST_DAMP))
        ratio = np.ones(len(ahead_s))
        if self.seasonal:
            now, then = self._season(now_s), self._season(now_s + ahead_s)
            known = np.isfinite(now) & np.isfinite(then) & (now > 0.0)
            ratio = np.where(known, then / np.where(known, now, 1.0), 1.0)
        found = np.empty((len(ahead_s), 5))
        found[:, 0], found[:, 1] = self.level, self._mean
        found[:, 2] = np.maximum(0.0, self.level + self._trend * slow)
        found[:, 3] = self.level * np.minimum(ratio, _MAX_RATIO)
        found[:, 4] = np.maximum(0.0, self._fast + self._fast_trend * fast)
        return found

    def _weights(self) -> NDArray[np.float64]:
        """Return the weights of the five forecasts for each of `AHEAD_S`; each row's sum is 1."""
        weights = 1.0 / np.maximum(self._errors[:, :-1], _LEAST) ** _SHARP
        normed: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        return normed

    def _compare(self) -> None:
        """Learn the errors of the forecasts for the middle of the minute that ends now."""
        if len(self._last) < _STEPS:
            return
        count = sum(self._last)
        for at, open_ in enumerate(self._open):
            while open_ and open_[0][0] <= self._steps:
                _, found = open_.popleft()
                wrong = (np.sqrt(found) - math.sqrt(count)) ** 2
                self._errors[at] += _LEARN * (wrong - self._errors[at])

    def _season(self, at_s: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean counts of the days before around these times; nan if unknown."""
        part = (np.asarray(at_s) % DAY_S / DAY_S * SEASONS).astype(int)
        profile: NDArray[np.float64] = self._profile[part]
        return profile

    def _learn_day(self, count: float, at_s: float) -> None:
        """Add a count to its part of the day; at the end of the part, update the daily profile."""
        self._part.append(count)
        size_s = DAY_S / SEASONS
        if int(at_s // size_s) == int((at_s - STEP_S) // size_s):
            return
        part = int((at_s - STEP_S) % DAY_S / DAY_S * SEASONS)
        mean = sum(self._part) / len(self._part)
        self._part.clear()
        old = self._day[part]
        self._day[part] = mean if math.isnan(old) else old + _LEARN_DAY * (mean - old)
        reach = len(_SMOOTH) // 2
        around = np.concatenate([self._day[-reach:], self._day, self._day[:reach]])
        self._profile = np.convolve(around, _SMOOTH, "valid")
