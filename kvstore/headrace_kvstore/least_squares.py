"""A linear model fitted online, by which every price in seconds is learned from measurements.

It predicts from the first sample on, follows a machine that changes, and resists outliers. No I/O,
no clocks, no locks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Vector = NDArray[np.float64]
_HUGE = 1e100
CLIP = 4.0
"""Limit of a residual, in running errors."""
ERROR_MEMORY = 0.97
"""Weight of the past in the running error."""


class RecursiveLeastSquares:
    """Linear model ``y ~ theta . x`` whose coefficients follow the data.

    With ``e = y - theta.x`` the error before the update, ``P`` the inverse of the information
    gathered so far, ``g = P x`` and ``q = x.g``:

    - coefficients: ``theta += g / (1 + q) * clip(e, -k*s, k*s)``
    - information:  ``P -= (lam*q - (1 - lam)) / (lam*q*(1 + q)) * g g^T``
    - running error: ``s^2 <- mu*s^2 + (1 - mu)*clip(e)^2``, the rms error that is reported

    The prior is ridge: ``theta`` starts at ``mean`` and ``P`` at ``diag(std^2) / error^2``, that
    is, a coefficient's strength is ``(error / std)^2`` samples of unit feature.

    ``lam`` is the forgetting factor (memory of about ``1 / (1 - lam)`` samples). Plain exponential
    forgetting (Haykin, Adaptive Filter Theory, ch. "RLS") divides all of ``P`` by ``lam``, so a
    direction that is not excited (no prefill for a thousand decode steps) grows without bound
    and the next sample moves it arbitrarily far. Here only the direction of ``x`` is forgotten
    (Kulhavy, Restricted exponential forgetting in real-time identification, Automatica 23, 1987);
    ``P`` stays positive definite since ``1 + eps*q = lam*(1 + q) > 0``.

    Residuals are clipped at `CLIP` times the running error, so one outlier moves the fit by no
    more than a bad sample would. The first samples, one a coefficient, are never clipped: there is
    nothing yet that they could be outliers of. Two in a row that are clipped to the same side mean
    a lasting change: ``P`` starts again at the prior, and the next samples set the coefficients.
    Samples that are not finite, or beyond 1e100, are ignored.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        error: float,
        forgetting: float = 0.995,
    ) -> None:
        if len(mean) != len(std) or not mean:
            raise ValueError("mean and std must have the same length, at least 1")
        if not (0 < forgetting <= 1 and error > 0):
            raise ValueError("forgetting in (0,1], error > 0")
        self._theta: _Vector = np.asarray(mean, dtype=np.float64).copy()
        self._prior: NDArray[np.float64] = np.diag((np.asarray(std, dtype=np.float64) / error) ** 2)
        self._p = self._prior.copy()
        self._trace_limit = 10.0 * float(np.trace(self._prior))
        self._floor_diagonal = 1e-9 * self._prior.diagonal()
        self._forgetting = forgetting
        self._floor = 1e-6 * error
        self._mean_square = error * error
        self._nonnegative: tuple[float, ...] | None = None
        self._clipped = 0
        self.samples = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(self._theta.tolist())

    @property
    def rms_error(self) -> float:
        """Running rms of the clipped one-step-ahead error, in units of ``y``."""
        return math.sqrt(self._mean_square)

    def update(self, x: Sequence[float], y: float) -> bool:
        """Learn one sample; return False if it was ignored (not finite, or no feature set)."""
        phi = np.asarray(x, dtype=np.float64)
        if not (abs(y) < _HUGE and bool((np.abs(phi) < _HUGE).all())):  # nan compares false
            return False
        gain = self._p @ phi
        q = float(phi @ gain)
        if not (math.isfinite(q) and q > 1e-300):
            return False
        error = y - float(self._theta @ phi)
        limit = CLIP * math.sqrt(self._mean_square)
        if self.samples < len(self._theta):
            limit = _HUGE
        residual = min(max(error, -limit), limit)
        side = 0 if residual == error else int(math.copysign(1, error))
        if side and side == self._clipped:
            self._p, self._mean_square = self._prior.copy(), min(error * error, _HUGE)
            gain, residual, side = self._p @ phi, error, 0
            q = float(phi @ gain)
        self._clipped = side
        lam = self._forgetting
        self._theta = self._theta + gain * (residual / (1.0 + q))
        p = self._p - ((lam * q - (1.0 - lam)) / (lam * q * (1.0 + q))) * np.outer(gain, gain)
        self._p = self._sound(0.5 * (p + p.T))
        self._mean_square = max(
            ERROR_MEMORY * self._mean_square + (1.0 - ERROR_MEMORY) * residual * residual,
            self._floor * self._floor,
        )
        self._nonnegative = None
        self.samples += 1
        return True

    def _sound(self, p: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``p`` within bounds: its trace limited from above, its diagonal from below.

        Without the floor one absurdly large sample would end all learning. Raising a diagonal
        keeps a matrix positive definite. A matrix that rounding has ruined is replaced by the
        prior.
        """
        diagonal = p.diagonal()
        if not np.isfinite(p).all() or float(diagonal.min()) < 0.0:
            return self._prior.copy()
        np.fill_diagonal(p, np.maximum(diagonal, self._floor_diagonal))
        trace = float(p.trace())
        return p * (self._trace_limit / trace) if trace > self._trace_limit else p

    def nonnegative(self) -> tuple[float, ...]:
        """Return the fit under the constraint that no coefficient is below 0.

        Clipping a negative coefficient alone would leave the others tuned to its help. Fixing
        ``theta_j = 0`` in the least-squares problem moves the rest by ``-P[:, j]/P[j, j]*theta_j``
        (active set, most negative first), which keeps the fit where the data are.
        """
        if self._nonnegative is None:
            theta, p = self._theta.copy(), self._p.copy()
            for _ in range(len(theta)):
                j = int(theta.argmin())
                if theta[j] >= 0.0:
                    break
                if p[j, j] > 1e-9 * self._p[j, j]:  # else the others determine it, nothing to move
                    column = p[:, j] / p[j, j]
                    theta -= column * theta[j]
                    p -= np.outer(column, p[j, :])
                theta[j] = 0.0
            self._nonnegative = tuple(max(0.0, v) for v in theta.tolist())
        return self._nonnegative


class LinearTime:
    """Model ``seconds = fixed_s + each_s * amount``, neither below 0, of a transfer, a pull or a
    load.

    Samples are weighed by ``1 / max(predicted, measured)``, so errors are relative: a second more
    counts for much in a load of a millisecond, and for little in one of a minute.

    Args:
        fixed_s, each_s: assumed before the first sample.
        fixed_std_s, each_std_s: how far these may be off; the wider one explains the first sample.
        unit: of ``amount``, about as large as amounts are.
        forgetting: weight of a sample after one more.
    """

    def __init__(
        self,
        fixed_s: float,
        each_s: float,
        fixed_std_s: float,
        each_std_s: float,
        *,
        unit: float = 1.0,
        forgetting: float = 0.9,
    ) -> None:
        self._unit = unit
        self._fit = RecursiveLeastSquares(
            mean=(fixed_s, each_s * unit),
            std=(fixed_std_s, each_std_s * unit),
            error=0.2,
            forgetting=forgetting,
        )

    @property
    def fixed_s(self) -> float:
        return self._fit.nonnegative()[0]

    @property
    def each_s(self) -> float:
        return self._fit.nonnegative()[1] / self._unit

    @property
    def samples(self) -> int:
        return self._fit.samples

    @property
    def rms_error(self) -> float:
        """Running rms of the one-step-ahead error, relative (0.1 is 10 %)."""
        return self._fit.rms_error

    def seconds(self, amount: float) -> float:
        """Return the predicted seconds; 0 for no amount."""
        return self.fixed_s + amount * self.each_s if amount > 0 else 0.0

    def observe(self, amount: float, seconds: float) -> bool:
        """Learn from one measurement; return False if it is unusable."""
        if not (math.isfinite(seconds) and seconds > 0.0 and amount > 0):
            return False
        weight = 1.0 / max(self.seconds(amount), seconds)
        return self._fit.update((weight, weight * amount / self._unit), weight * seconds)

    def to_dict(self) -> dict[str, float]:
        return {
            "fixed_s": self.fixed_s,
            "each_s": self.each_s,
            "relative_rms_error": self.rms_error,
            "samples": self.samples,
        }
