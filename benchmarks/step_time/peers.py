"""This project's earlier models of a step, unchanged: one for each user.

`Line` priced prompts in the router, `Curve` drafts in the planner, `Pairs` loads in the KV
connector, and `GateLine` gave the compute gate the number of prompt tokens that cost as much as a
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace_engine.step_time import KNOTS
from headrace_kvstore.least_squares import RecursiveLeastSquares


class Shape(NamedTuple):
    """A step, as `StepTime.observe` takes it."""

    prompt: float
    rows: float
    draft: float
    context: float
    pairs: float


class Model(Protocol):
    """Predicts a step, then learns what it took."""

    def seconds(self, shape: Shape) -> float: ...
    def observe(self, shape: Shape, seconds: float) -> None: ...


class Line:
    """a + b prompt + c rows + d prompt^2."""

    def __init__(self) -> None:
        self._fit = RecursiveLeastSquares(
            (0.0218, 0.75, 0.0075, 0.0), (0.05, 2.0, 0.05, 0.5), error=0.2, forgetting=0.98
        )

    def seconds(self, shape: Shape) -> float:
        return float(np.dot(self._fit.nonnegative(), self._features(shape)))

    def observe(self, shape: Shape, seconds: float) -> None:
        weight = 1.0 / max(self.seconds(shape), seconds)
        self._fit.update((weight * self._features(shape)).tolist(), weight * seconds)

    @staticmethod
    def _features(shape: Shape) -> NDArray[np.float64]:
        n = shape.prompt / 1000.0
        return np.array([1.0, n, shape.rows / 10.0, n * n])


class Curve:
    """exp(x(n)) + g context: a Gaussian process over sizes, of steps without and with drafts."""

    def __init__(self) -> None:
        knots = np.array(KNOTS)
        distance = np.subtract.outer(np.log(knots), np.log(knots))
        near = np.exp(-0.5 * (distance / 0.35) ** 2)
        both = 1.5**2 + 0.5**2 * np.exp(-0.5 * (distance / 1.5) ** 2) + 0.15**2 * near
        self._p = np.block([[both, both], [both, both + 0.1**2 + 0.1**2 * near]])
        self._x = np.tile(np.log(0.0218 + 0.00075 * knots), 2)
        self._line = RecursiveLeastSquares(
            (0.0218, 0.075, 0.0), (0.05, 0.3, 0.05), error=0.2, forgetting=0.99
        )

    def seconds(self, shape: Shape) -> float:
        n, first = sum(shape[:3]), len(KNOTS) * (shape.draft > 0)
        curve = np.maximum.accumulate(np.exp(self._x[first : first + len(KNOTS)]))
        shared = self._line.nonnegative()[2] * shape.context / 10_000.0
        return float(np.interp(n, KNOTS, curve)) + shared

    def observe(self, shape: Shape, seconds: float) -> None:
        n, c = sum(shape[:3]), shape.context / 10_000.0
        weight = 1.0 / max(self.seconds(shape), seconds)
        self._line.update((weight, weight * n / 100.0, weight * c), weight * seconds)
        own = seconds - self._line.nonnegative()[2] * c
        if own <= 0.0:
            return
        upper = min(max(int(np.searchsorted(KNOTS, n)), 1), len(KNOTS) - 1)
        share = (n - KNOTS[upper - 1]) / (KNOTS[upper] - KNOTS[upper - 1])
        at = len(KNOTS) * (shape.draft > 0) + np.array([upper - 1, upper])
        parts = np.array([1.0 - share, share]) * np.exp(self._x[at])
        level = parts.sum()
        parts /= level
        self._p += 0.02**2
        self._p[at, at] += parts * 0.005**2
        towards = self._p[:, at] @ parts
        variance = float(parts @ towards[at]) + 0.05**2
        limit = 4.0 * math.sqrt(variance)
        self._x += towards / variance * min(max(math.log(own / level), -limit), limit)
        self._p -= np.outer(towards, towards) / variance


class Pairs:
    """a + c tokens + d pairs, of steps with prompts: non-negative least squares that forget."""

    def __init__(self) -> None:
        self._normal, self._moment = np.zeros((3, 3)), np.zeros(3)

    def seconds(self, shape: Shape) -> float:
        best, found = math.inf, np.zeros(3)
        for size in (1, 2, 3):
            for chosen in combinations(range(3), size):
                theta = self._solve(list(chosen))
                left = float(theta @ self._normal @ theta - 2.0 * theta @ self._moment)
                if (theta >= 0).all() and left < best - 1e-9:
                    best, found = left, theta
        return float(found @ self._features(shape))

    def observe(self, shape: Shape, seconds: float) -> None:
        row = self._features(shape) / seconds
        self._normal = 0.9 * self._normal + np.outer(row, row)
        self._moment = 0.9 * self._moment + row

    def _solve(self, chosen: Sequence[int]) -> NDArray[np.float64]:
        theta = np.zeros(3)
        normal = self._normal[np.ix_(chosen, chosen)]
        if (normal.diagonal() > 0).all():
            scale = np.sqrt(normal.diagonal())
            theta[chosen] = (
                np.linalg.lstsq(
                    normal / np.outer(scale, scale), self._moment[chosen] / scale, rcond=1e-10
                )[0]
                / scale
            )
        return theta

    @staticmethod
    def _features(shape: Shape) -> NDArray[np.float64]:
        return np.array([sum(shape[:3]), shape.context + shape.pairs, 1.0])


class GateLine:
    """a + b prompt, of steps with prompts; only a / b was used."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)

    def observe(self, shape: Shape, seconds: float) -> None:
        n = shape.prompt
        self._sums = 0.99 * self._sums + np.array([1.0, n, seconds, n * n, n * seconds])

    def free_tokens(self) -> float:
        weight, n, t, nn, nt = self._sums
        b = (weight * nt - n * t) / (weight * nn - n * n)
        return float(max(0.0, (t - b * n) / weight) / b)
