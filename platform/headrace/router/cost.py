"""Online models of what things cost, in seconds, fitted from what this cluster measured.

Every model is a recursive least-squares fit with a weak prior: it answers from the first request
on, and after a few dozen samples the prior no longer matters. No I/O, no clocks, no locks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Vector = NDArray[np.float64]
_HUGE = 1e100


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
    and the next sample throws it anywhere. Here only the direction of ``x`` is forgotten
    (Kulhavy, Restricted exponential forgetting in real-time identification, Automatica 23, 1987);
    ``P`` stays positive definite since ``1 + eps*q = lam*(1 + q) > 0``.

    Residuals are clipped at ``clip`` times the running error, so one outlier moves the fit by no
    more than a bad sample would, while a lasting change widens the running error and gets in.
    Samples that are not finite, or beyond 1e100, are ignored.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        error: float,
        forgetting: float = 0.995,
        clip: float = 4.0,
        error_memory: float = 0.97,
    ) -> None:
        if len(mean) != len(std) or not mean:
            raise ValueError("mean and std must have the same length, at least 1")
        if not (0 < forgetting <= 1 and 0 < error_memory < 1 and clip > 0 and error > 0):
            raise ValueError("forgetting in (0,1], error_memory in (0,1), clip > 0, error > 0")
        self._theta: _Vector = np.asarray(mean, dtype=np.float64).copy()
        self._prior: NDArray[np.float64] = np.diag((np.asarray(std, dtype=np.float64) / error) ** 2)
        self._p = self._prior.copy()
        self._trace_limit = 10.0 * float(np.trace(self._prior))
        self._floor_diagonal = 1e-9 * self._prior.diagonal()
        self._forgetting = forgetting
        self._clip = clip
        self._mu = error_memory
        self._floor = 1e-6 * error
        self._mean_square = error * error
        self._nonnegative: tuple[float, ...] | None = None
        self.samples = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(self._theta.tolist())

    @property
    def rms_error(self) -> float:
        """Running rms of the clipped one-step-ahead error, in units of ``y``."""
        return math.sqrt(self._mean_square)

    def predict(self, x: Sequence[float]) -> float:
        """``max(0, theta . x)``; 0 for features that are not finite."""
        y = float(self._theta @ np.asarray(x, dtype=np.float64))
        return y if math.isfinite(y) and y > 0.0 else 0.0

    def update(self, x: Sequence[float], y: float) -> bool:
        """Learn one sample; False if it was ignored (not finite, or no feature set)."""
        phi = np.asarray(x, dtype=np.float64)
        if not (abs(y) < _HUGE and bool((np.abs(phi) < _HUGE).all())):  # nan compares false
            return False
        gain = self._p @ phi
        q = float(phi @ gain)
        if not (math.isfinite(q) and q > 1e-300):
            return False
        residual = y - float(self._theta @ phi)
        limit = self._clip * math.sqrt(self._mean_square)
        residual = min(max(residual, -limit), limit)
        lam = self._forgetting
        self._theta = self._theta + gain * (residual / (1.0 + q))
        p = self._p - ((lam * q - (1.0 - lam)) / (lam * q * (1.0 + q))) * np.outer(gain, gain)
        self._p = self._sound(0.5 * (p + p.T))
        self._mean_square = max(
            self._mu * self._mean_square + (1.0 - self._mu) * residual * residual,
            self._floor * self._floor,
        )
        self._nonnegative = None
        self.samples += 1
        return True

    def _sound(self, p: NDArray[np.float64]) -> NDArray[np.float64]:
        """``p`` within bounds: its trace limited from above, its diagonal from below.

        Without the floor one absurdly large sample would end all learning. Raising a diagonal
        keeps a matrix positive definite. What rounding has ruined starts again at the prior.
        """
        diagonal = p.diagonal()
        if not np.isfinite(p).all() or float(diagonal.min()) < 0.0:
            return self._prior.copy()
        np.fill_diagonal(p, np.maximum(diagonal, self._floor_diagonal))
        trace = float(p.trace())
        return p * (self._trace_limit / trace) if trace > self._trace_limit else p

    def nonnegative(self) -> tuple[float, ...]:
        """The fit under the constraint that no coefficient is below 0.

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


class StepTimeModel:
    """Seconds of one engine step: ``T(n, r) = a + b*n + c*r + d*n^2``.

    ``n``: prompt tokens computed in the step; ``r``: requests that decode one token in it; the
    square is attention within the prompt. All coefficients are held at 0 or above when used, so
    more work is never predicted to take less time. Samples are weighed by
    ``1 / max(predicted, measured)``: the fit minimises relative error, so a 2 s prefill does not
    drown the 20 ms steps, and ``rms_error`` is relative (0.1 is 10 %).

    The prior, 21.8 ms + 0.75 ms a token, is a 135M model on one CPU thread, and deliberately
    weak: any machine's own measurements overrule it within a few steps.
    """

    _TOKENS, _REQUESTS = 1000.0, 10.0  # feature units that keep the fit well conditioned
    #: 50 samples a direction: when a simulated machine's speed halves, decode steps are within
    #: 1 % again after 500 steps; with 0.995 they are 3 % off after 1,500.
    _FORGETTING = 0.98

    def __init__(self) -> None:
        self._fit = RecursiveLeastSquares(
            mean=(0.0218, 0.75, 0.0075, 0.0),
            std=(0.05, 2.0, 0.05, 0.5),
            error=0.2,
            forgetting=self._FORGETTING,
        )

    @property
    def samples(self) -> int:
        return self._fit.samples

    @property
    def rms_error(self) -> float:
        return self._fit.rms_error

    def seconds(self, tokens: float, running: float) -> float:
        """Predicted duration of a step of ``tokens`` prompt tokens and ``running`` decodes."""
        a, b, c, d = self._fit.nonnegative()
        n = tokens / self._TOKENS
        return a + b * n + c * running / self._REQUESTS + d * n * n

    def prefill_s(self, tokens: int, running: float, max_step_tokens: int) -> float:
        """Predicted duration of the steps that compute ``tokens``; 0 for none."""
        full, rest = divmod(tokens, max_step_tokens)
        total = full * self.seconds(max_step_tokens, running) if full else 0.0
        return total + self.seconds(rest, running) if rest else total

    def observe(self, tokens: float, running: float, seconds: float) -> bool:
        """Learn one step; False if the sample is unusable."""
        if not (math.isfinite(seconds) and seconds > 0.0 and tokens >= 0 and running >= 0):
            return False
        n = tokens / self._TOKENS
        weight = 1.0 / max(self.seconds(tokens, running), seconds)
        x = (weight, weight * n, weight * running / self._REQUESTS, weight * n * n)
        return self._fit.update(x, weight * seconds)

    def to_dict(self) -> dict[str, float]:
        a, b, c, d = self._fit.nonnegative()
        return {
            "base_s": a,
            "per_token_s": b / self._TOKENS,
            "per_running_s": c / self._REQUESTS,
            "per_token_squared_s": d / self._TOKENS**2,
            "relative_rms_error": self.rms_error,
            "samples": self.samples,
        }


class TransferModel:
    """Seconds to pull KV over NIXL: ``T(bytes) = alpha + beta * bytes``; 0 for no bytes.

    Weighed like the step model, so ``rms_error`` is relative. Prior: 5 ms and 1 GB/s.
    """

    _MB = 1e6

    def __init__(self) -> None:
        self._fit = RecursiveLeastSquares(
            mean=(0.005, 0.001), std=(0.05, 0.005), error=0.2, forgetting=0.98
        )

    @property
    def samples(self) -> int:
        return self._fit.samples

    @property
    def rms_error(self) -> float:
        return self._fit.rms_error

    def seconds(self, size_bytes: float) -> float:
        if size_bytes <= 0:
            return 0.0
        alpha, beta = self._fit.nonnegative()
        return alpha + beta * size_bytes / self._MB

    def observe(self, size_bytes: float, seconds: float) -> bool:
        if not (math.isfinite(seconds) and seconds > 0.0 and size_bytes > 0):
            return False
        weight = 1.0 / max(self.seconds(size_bytes), seconds)
        return self._fit.update((weight, weight * size_bytes / self._MB), weight * seconds)

    def to_dict(self) -> dict[str, float]:
        alpha, beta = self._fit.nonnegative()
        return {
            "alpha_s": alpha,
            "beta_s_per_byte": beta / self._MB,
            "bytes_per_s": self._MB / beta if beta > 0 else 0.0,
            "relative_rms_error": self.rms_error,
            "samples": self.samples,
        }


class CallModel:
    """A fixed overhead in seconds: the mean of its samples, with forgetting (about 20 samples).

    Used for what a remote prefill costs beside engine queue and compute: the call
    (``call_s - queue_s - compute_s``), the hand-over of the KV, and the queue that others make.
    Samples may be negative (they are differences); the mean is held at 0 or above when used.
    ``rms_error`` is in seconds.
    """

    def __init__(self, prior_s: float, prior_std_s: float) -> None:
        self._fit = RecursiveLeastSquares(
            mean=(prior_s,), std=(prior_std_s,), error=prior_std_s, forgetting=0.95
        )

    @property
    def samples(self) -> int:
        return self._fit.samples

    @property
    def rms_error(self) -> float:
        return self._fit.rms_error

    def seconds(self) -> float:
        return self._fit.nonnegative()[0]

    def observe(self, seconds: float) -> bool:
        return self._fit.update((1.0,), seconds)

    def to_dict(self) -> dict[str, float]:
        return {
            "seconds": self.seconds(),
            "rms_error_s": self.rms_error,
            "samples": self.samples,
        }
