"""Seconds of one engine step, given how many tokens it computes: the price list of drafting.

Learned from the steps themselves, from the first one on, for ever. No machine's curve is straight:
a CPU computes in tiles, a GPU pads to the sizes for which it captured graphs. So each size is
remembered as it was measured, however long it has not been met since, and sizes that were never
measured are told from those that were. What changes for all sizes at once, a busy neighbour or a
slower clock, is told apart from what changes for one. Steps with drafts have a curve of their own:
whatever is verified, rejection sampling and ragged attention cost something, and whether a first
draft token pays is the difference of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace_kvstore.fitting import RecursiveLeastSquares

KNOTS = np.array([1, 2, 3] + [step << shift for shift in range(1, 14) for step in (2, 3)], float)
"""Tokens at which the curve may bend: 1, 2, 3, 4, 6, 8, 12, ... 24576."""
_TOKENS, _CONTEXT = 100.0, 10_000.0  # feature units that keep the fit well conditioned
_PRIOR_S = 0.0218, 0.00075  # of a step, and of a token in it
_NOISE = 0.05  # of a step, relative
_COMMON_DRIFT, _OWN_DRIFT = 0.02, 0.005  # a step, relative
_FIRST_ERROR, _ERROR_STEPS = 0.2, 50.0
_ODD = 4.0  # standard deviations: one hiccup of the machine counts as no more than this


def _prior_covariance() -> NDArray[np.float64]:
    """Of the logarithms of seconds at each knot without drafts, then with, [2 knots, 2 knots].

    All together may be off by a factor of e^1.5; their shape by half, smoothly; neighbours by a
    seventh; and a step with drafts differs from one without by a tenth, and a tenth at its size.
    """
    distance = np.subtract.outer(np.log(KNOTS), np.log(KNOTS))
    smooth = 0.5**2 * np.exp(-0.5 * (distance / 1.5) ** 2)
    near = np.exp(-0.5 * (distance / 0.35) ** 2)
    both = 1.5**2 + smooth + 0.15**2 * near
    drafted = 0.1**2 + 0.1**2 * near
    return np.block([[both, both], [both, both + drafted]])


class StepTime:
    """``T_k(n, c) = exp(x_k(n)) + g c``, non-decreasing in ``n``.

    ``n``: tokens computed in the step, drafts included; ``c``: tokens of context of all rows;
    ``k``: whether drafts are among the tokens.

    - ``x_k``: a Gaussian process over size and kind, held at the knots, exp(x) linear in between,
      and followed by a Kalman filter (Rasmussen and Williams, Gaussian Processes for Machine
      Learning, 2006, section 2.2; Hartikainen and Sarkka, MLSP 2010): each step all of ``x`` may
      have drifted together by 2 %, and where it is measured by 0.5 %; a measurement has 5 % noise,
      and none counts as more than four standard deviations off.
    - ``g``: recursive least squares over ``a + b n + g c`` with directional forgetting, relative
      errors and clipped residuals (`headrace_kvstore.fitting`), held at 0 or above.
    - Each curve is then made non-decreasing (running maximum over the knots): more work is never
      predicted to take less time.

    The prior, 21.8 ms + 0.75 ms a token, is weak: a few steps overrule it.
    """

    def __init__(self, padded_sizes: Sequence[int] = ()) -> None:
        """`padded_sizes`: the engine pads a step's tokens up to the next of these, if there is one
        (vLLM's CUDA graph sizes)."""
        self._sizes = np.unique(np.asarray(padded_sizes, dtype=np.int64))
        base_s, token_s = _PRIOR_S
        self._line = RecursiveLeastSquares(
            mean=(base_s, token_s * _TOKENS, 0.0),
            std=(0.05, 0.3, 0.05),
            error=_FIRST_ERROR,
            forgetting=0.99,
        )
        self._log_s = np.tile(np.log(base_s + token_s * KNOTS), 2)
        self._covariance = _prior_covariance()
        self._square = _FIRST_ERROR**2
        self._curves: NDArray[np.float64] | None = None

    @property
    def samples(self) -> int:
        return self._line.samples

    @property
    def relative_error(self) -> float:
        """Running root mean square of one-step-ahead errors (0.1 is 10 %)."""
        return math.sqrt(self._square)

    def padded(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """What the engine computes when `tokens` are asked for."""
        wanted = np.asarray(tokens, dtype=np.float64)
        if not len(self._sizes):
            return wanted
        at = np.searchsorted(self._sizes, wanted)
        return np.where(
            at < len(self._sizes), self._sizes[np.minimum(at, len(self._sizes) - 1)], wanted
        )

    def seconds(
        self, tokens: ArrayLike, context_tokens: float = 0.0, *, drafted: bool = False
    ) -> NDArray[np.float64]:
        """Predicted seconds of steps of `tokens` (any shape) over `context_tokens`, above 0.

        Args:
            drafted: whether draft tokens are among them.
        """
        n = self.padded(tokens)
        if self._curves is None:
            curves = np.maximum.accumulate(np.exp(self._log_s.reshape(2, -1)), axis=1)
            self._curves = np.maximum(curves, 1e-9)
        curve = self._curves[int(drafted)]
        beyond = np.maximum(n / KNOTS[-1], 1.0)
        shared = self._line.nonnegative()[2] * context_tokens / _CONTEXT
        return np.interp(n, KNOTS, curve) * beyond + shared

    def observe(
        self, tokens: int, context_tokens: float, seconds: float, *, drafted: bool = False
    ) -> bool:
        """Learn one step; False if the sample is unusable."""
        if not (math.isfinite(seconds) and seconds > 0.0 and tokens > 0 and context_tokens >= 0):
            return False
        n, c = float(self.padded(tokens)), context_tokens / _CONTEXT
        predicted = float(self.seconds(tokens, context_tokens, drafted=drafted))
        weight = 1.0 / max(predicted, seconds)
        if not self._line.update((weight, weight * n / _TOKENS, weight * c), weight * seconds):
            return False
        own = seconds - self._line.nonnegative()[2] * c
        if own > 0.0:
            beyond = max(n / KNOTS[-1], 1.0)
            self._learn(int(drafted), n / beyond, own / beyond)
        self._curves = None
        return True

    def _learn(self, kind: int, n: float, seconds: float) -> None:
        """One step of the filter; ``d x / d level`` of the two knots between which ``n`` lies."""
        upper = min(max(int(np.searchsorted(KNOTS, n)), 1), len(KNOTS) - 1)
        share = (n - KNOTS[upper - 1]) / (KNOTS[upper] - KNOTS[upper - 1])
        knots = kind * len(KNOTS) + np.array([upper - 1, upper])
        parts = np.array([1.0 - share, share]) * np.exp(self._log_s[knots])
        level_s = parts.sum()
        parts /= level_s
        self._covariance += _COMMON_DRIFT**2
        self._covariance[knots, knots] += parts * _OWN_DRIFT**2
        towards = self._covariance[:, knots] @ parts
        variance = float(parts @ towards[knots]) + _NOISE**2
        limit = _ODD * math.sqrt(variance)
        odd = min(max(math.log(seconds / level_s), -limit), limit)
        self._square += (odd**2 - self._square) / _ERROR_STEPS
        self._log_s += towards / variance * odd
        self._covariance -= np.outer(towards, towards) / variance

    def to_dict(self) -> dict[str, float]:
        a, b, g = self._line.nonnegative()
        return {
            "base_s": a,
            "per_token_s": b / _TOKENS,
            "per_context_token_s": g / _CONTEXT,
            "relative_rms_error": self.relative_error,
            "samples": self.samples,
        }
