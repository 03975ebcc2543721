"""Seconds of one engine step, given how many tokens it computes: the price list of drafting.

Learned from the steps themselves, from the first one on, for ever. No machine's curve is straight:
a CPU computes in tiles, a GPU pads to the sizes for which it captured graphs. So each size is
remembered as it was measured, however long it has not been met since, and only where nothing was
measured a straight line stands in. What changes for all sizes at once, a busy neighbour or a slower
clock, is one number. Steps with drafts have a curve of their own: whatever is verified, rejection
sampling and ragged attention cost something, and whether a first draft token pays is the difference
of the two.
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
_MEMORY = 0.95  # of a knot: about 20 samples
_DOUBT, _DOUBT_OF_KIND = 1.0, 1.0  # samples
_SPEED_GAIN = 0.25  # of a sample at a knot that is well known
_ERROR_MAX = 1.0  # relative


class StepTime:
    """``T_k(n, c) = s C_k(n) + g c``, non-decreasing in ``n``.

    ``n``: tokens computed in the step, drafts included; ``c``: tokens of context of all rows;
    ``k``: whether drafts are among the tokens.

    - ``s``: how slow the machine is at present, 1 at the start. ``g`` and a line ``a + b n``:
      recursive least squares with directional forgetting, relative errors, residuals clipped
      (`headrace_kvstore.fitting`), held at 0 or above.
    - ``C_k``: seconds at each knot, linear in between. With ``m_k`` an exponentially weighted mean
      of ``(t - g c) / s`` in steps of the kind, ``w_k`` the weight of its samples, and ``m`` and
      ``w`` those of both kinds together,

          C_k = (w m + (a + b n) / s) / (w + 1) + w_k / (w_k + 1) (m_k - m)

      so that what was measured of one kind only holds for both.
    - A step that took longer than predicted by a share ``e`` raises ``m_k`` by ``e / w_k`` and
      ``s`` by ``(1 - 1 / w_k) e / 4``: where little is known the size is to blame, else the hour.
    - Each curve is then made non-decreasing (running maximum over the knots): more work is never
      predicted to take less time.

    The prior of the line, 21.8 ms + 0.75 ms a token, is weak: a few steps overrule it.
    """

    def __init__(self, padded_sizes: Sequence[int] = ()) -> None:
        """`padded_sizes`: the engine pads a step's tokens up to the next of these, if there is one
        (vLLM's CUDA graph sizes)."""
        self._sizes = np.unique(np.asarray(padded_sizes, dtype=np.int64))
        self._line = RecursiveLeastSquares(
            mean=(0.0218, 0.075, 0.0), std=(0.05, 0.3, 0.05), error=0.2, forgetting=0.99
        )
        self._level = np.zeros((2, len(KNOTS)))
        self._weight = np.zeros((2, len(KNOTS)))
        self._speed = 1.0
        self._curves: NDArray[np.float64] | None = None
        self._slope = 0.0

    @property
    def samples(self) -> int:
        return self._line.samples

    @property
    def relative_error(self) -> float:
        """Running root mean square of one-step-ahead errors (0.1 is 10 %)."""
        return self._line.rms_error

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
        beyond = np.maximum(n - KNOTS[-1], 0.0) * self._slope
        shared = self._line.nonnegative()[2] * context_tokens / _CONTEXT
        curve = self._curves_now()[int(drafted)]
        return self._speed * np.interp(n, KNOTS, curve) + beyond + shared

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
            self._learn(int(drafted), min(n, KNOTS[-1]), own)
        self._curves = None
        return True

    def _learn(self, kind: int, n: float, seconds: float) -> None:
        upper = min(max(int(np.searchsorted(KNOTS, n)), 1), len(KNOTS) - 1)
        share = (n - KNOTS[upper - 1]) / (KNOTS[upper] - KNOTS[upper - 1])
        curve, levels, weights = self._curves_now()[kind], self._level[kind], self._weight[kind]
        shares = [(k, part) for k, part in ((upper - 1, 1.0 - share), (upper, share)) if part > 0.0]
        for knot, _ in shares:
            if weights[knot] == 0.0:
                levels[knot] = curve[knot]
        predicted = self._speed * sum(part * levels[knot] for knot, part in shares)
        limit = min(4.0 * self.relative_error, _ERROR_MAX)
        error = min(max(seconds / predicted - 1.0, -limit), limit)
        for knot, part in shares:
            weights[knot] = _MEMORY * weights[knot] + part
            levels[knot] *= 1.0 + part / weights[knot] * error
        known = sum(part * weights[knot] for knot, part in shares)
        self._speed *= 1.0 + _SPEED_GAIN * max(1.0 - 1.0 / known, 0.0) * error

    def _curves_now(self) -> NDArray[np.float64]:
        """``C_k`` at the knots, without and with drafts, [2, knots]."""
        if self._curves is None:
            a, b, _ = self._line.nonnegative()
            self._slope = b / _TOKENS
            line = (a + self._slope * KNOTS) / self._speed
            weight, weights = self._weight.sum(0), self._weight
            mean = (weights * self._level).sum(0) / np.maximum(weight, 1e-9)
            of_both = (weight * mean + _DOUBT * line) / (weight + _DOUBT)
            of_kind = weights / (weights + _DOUBT_OF_KIND) * (self._level - mean)
            curves = np.maximum.accumulate(of_both + of_kind, axis=1)
            self._curves = np.maximum(curves, 1e-9)
        return self._curves

    def to_dict(self) -> dict[str, float]:
        a, b, g = self._line.nonnegative()
        return {
            "base_s": a,
            "per_token_s": b / _TOKENS,
            "per_context_token_s": g / _CONTEXT,
            "relative_rms_error": self.relative_error,
            "samples": self.samples,
        }
