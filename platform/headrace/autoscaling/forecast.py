"""Forecasts the request rate, a minute to an hour ahead, from the counts of each quarter minute.

It averages two forecasts, each a level and its damped trend (Holt's method): a slow one of the last
ten minutes, faster at high rates, and a fast one of the last minute, for bursts. Which one is right
depends on the traffic and on the time ahead. Therefore the squared error of each is measured for
each of `AHEAD_S`, and sets its weight::

    weight = 1 / error^8,   error = mean of (forecast - count)^2 over about the last three hours

Errors are computed with the square roots of a minute's counts. Their noise is 1/2 for independent
arrivals at any load, so errors that were learned at night also hold by day.
`RateForecaster.at_horizon` returns the expected rate and the standard deviation of the square root
of a minute's count.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

BIN_S, STEP_S = 60.0, 15.0
"""Seconds of the counts that are forecast, and between two observations."""
_STEPS = round(BIN_S / STEP_S)
AHEAD_S = (60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0, 3600.0)
_MIN_LEVEL, _MAX_LEVEL, _DRIFT = 0.1 / _STEPS, 0.5 / _STEPS, 0.005 / _STEPS
"""Minimum and maximum weight of a new count in the slow level, and the drift that sets the weight.
The weight is the steady gain of a Kalman filter for a level that drifts by 0.005 of itself each
minute, and whose minutes' square roots have a noise of 1/2."""
_TREND = 0.2
_FAST, _FAST_TREND = 0.3, 0.5
"""Weights of a new count in the fast level and its trend: of a grid, those with the smallest error
one to three minutes ahead for `benchmarks.autoscaling.burst`."""
_DAMP, _FAST_DAMP = 0.97 ** (1 / _STEPS), 0.8 ** (1 / _STEPS)
"""Factors of the trends for each step ahead: no trend has continued for an hour, and no burst for
ten minutes."""
_LEARN = 1 / 180 / _STEPS
_SHARP = 8
"""Power of the errors in the weights. Most of an error is the noise of the counts, which both
forecasts share, so the error of a clearly worse forecast is only a tenth larger."""
_LEAST = 0.05
"""Minimum squared error of square roots in the weights: independent arrivals have 0.25."""


@dataclass(frozen=True, slots=True)
class RateForecast:
    """A forecast.

    Attributes:
        rate: expected requests a second.
        root_sd: standard deviation of the square root of a minute's count.
    """

    rate: float
    root_sd: float

    def at(self, deviations: float) -> float:
        """Return the rate `deviations` standard deviations above the expected one; at least 0."""
        root = math.sqrt(self.rate * BIN_S) + deviations * self.root_sd
        return max(0.0, root) ** 2 / BIN_S


@dataclass(slots=True)
class _Trend:
    """Level of the counts a minute, and its trend a step."""

    damp: float
    level: float = 0.0
    trend: float = 0.0

    def learn(self, count: float, level_weight: float, trend_weight: float) -> None:
        wrong = count - self.level - self.trend
        self.level = max(0.0, self.level + self.trend + level_weight * wrong)
        self.trend += trend_weight * level_weight * wrong

    def at(self, ahead_s: float) -> float:
        steps = ahead_s / STEP_S
        damped = self.damp * (1.0 - self.damp**steps) / (1.0 - self.damp)
        return max(0.0, self.level + self.trend * damped)


@dataclass(slots=True)
class _Ahead:
    """The forecasts for one time ahead.

    Attributes:
        errors: mean squared errors of the slow one, the fast one and their average. The fast one
            begins with the larger one: it counts once it was seen to be right.
        open: square roots of the forecasts that are not compared yet, oldest first.
    """

    ahead_s: float
    errors: list[float] = field(default_factory=lambda: [1.0, 1.5, 1.0])
    open: deque[list[float]] = field(default_factory=deque)

    def compare(self, root: float) -> None:
        """Learn the errors of the forecasts for the middle of the minute that ends now.

        Args:
            root: square root of the minute's count.
        """
        if len(self.open) < round(self.ahead_s / STEP_S) + _STEPS // 2:
            return
        for at, said in enumerate(self.open.popleft()):
            self.errors[at] += _LEARN * ((said - root) ** 2 - self.errors[at])

    def average(self, slow: float, fast: float) -> float:
        weights = [1.0 / max(error, _LEAST) ** _SHARP for error in self.errors[:2]]
        return (weights[0] * slow + weights[1] * fast) / sum(weights)


@dataclass(slots=True)
class RateForecaster:
    """Forecaster that learns the counts of steps in order, and forecasts from the last one on."""

    _steps: int = 0
    _slow: _Trend = field(default_factory=lambda: _Trend(_DAMP))
    _fast: _Trend = field(default_factory=lambda: _Trend(_FAST_DAMP))
    _minute: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _ahead: list[_Ahead] = field(default_factory=lambda: [_Ahead(each) for each in AHEAD_S])

    @property
    def known_s(self) -> float:
        """Seconds of observed traffic."""
        return self._steps * STEP_S

    def observe(self, count: float) -> None:
        """Learn the number of requests in the next step.

        Raises:
            ValueError: the count is below 0 or no number.
        """
        if not 0.0 <= count < math.inf:
            raise ValueError(f"a step's count must be 0 or more, not {count}")
        a_minute = count * _STEPS
        if self._steps == 0:
            self._slow.level = self._fast.level = a_minute
        self._steps += 1
        self._minute.append(count)
        gain = min(_MAX_LEVEL, max(_MIN_LEVEL, _DRIFT * math.sqrt(self._slow.level)))
        self._slow.learn(a_minute, gain, _TREND * gain)
        self._fast.learn(a_minute, _FAST, _FAST_TREND)
        root = math.sqrt(sum(self._minute))
        for each in self._ahead:
            each.compare(root)
            slow, fast = self._slow.at(each.ahead_s), self._fast.at(each.ahead_s)
            each.open.append([math.sqrt(x) for x in (slow, fast, each.average(slow, fast))])

    def at_horizon(self, ahead_s: float) -> RateForecast:
        """Return the forecast for `ahead_s` seconds after the last step's end."""
        if self._steps == 0:
            return RateForecast(0.0, 0.5)
        nearest = min(self._ahead, key=lambda each: abs(each.ahead_s - ahead_s))
        count = nearest.average(self._slow.at(ahead_s), self._fast.at(ahead_s))
        return RateForecast(count / BIN_S, math.sqrt(nearest.errors[2]))
