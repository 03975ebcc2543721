"""Seconds of one engine step, given how many tokens it computes: the price list of drafting.

Learned from the steps themselves, from the first one on, for ever. The curve is a straight line
bent at knots, since no machine's is straight: a CPU computes in tiles, a GPU pads to the sizes for
which it captured graphs.
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
_DOUBT = 3.0  # a knot's correction counts half after this many samples
_BEND_MAX = 1.0  # relative


class StepTime:
    """``T(n, c) = (a + b n) (1 + r(n)) + g c``, non-decreasing in ``n``.

    ``n``: tokens computed in the step, drafts included; ``c``: tokens of context of all rows.

    - ``a, b, g``: recursive least squares with directional forgetting, relative errors, residuals
      clipped (`headrace_kvstore.fitting`), held at 0 or above.
    - ``r``: relative correction at each knot, linear in between: an exponentially weighted mean of
      the residuals that the line leaves there, shrunk by ``w / (w + 3)`` for weight ``w`` of
      samples, so that what was never measured follows the line.
    - The curve is then made non-decreasing (running maximum over the knots): more work is never
      predicted to take less time.

    The prior, 21.8 ms + 0.75 ms a token, is weak: a few steps overrule it.
    """

    def __init__(self, padded_sizes: Sequence[int] = ()) -> None:
        """`padded_sizes`: the engine pads a step's tokens up to the next of these, if there is one
        (vLLM's CUDA graph sizes)."""
        self._sizes = np.unique(np.asarray(padded_sizes, dtype=np.int64))
        self._line = RecursiveLeastSquares(
            mean=(0.0218, 0.075, 0.0), std=(0.05, 0.3, 0.05), error=0.2, forgetting=0.99
        )
        self._bend = np.zeros(len(KNOTS))
        self._weight = np.zeros(len(KNOTS))
        self._curve: NDArray[np.float64] | None = None
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

    def seconds(self, tokens: ArrayLike, context_tokens: float = 0.0) -> NDArray[np.float64]:
        """Predicted seconds of steps of `tokens` (any shape) over `context_tokens`; above 0."""
        if self._curve is None:
            self._curve = self._bent()
        n = self.padded(tokens)
        beyond = np.maximum(n - KNOTS[-1], 0.0) * self._slope
        shared = self._line.nonnegative()[2] * context_tokens / _CONTEXT
        return np.interp(n, KNOTS, self._curve) + beyond + shared

    def observe(self, tokens: int, context_tokens: float, seconds: float) -> bool:
        """Learn one step; False if the sample is unusable."""
        if not (math.isfinite(seconds) and seconds > 0.0 and tokens > 0 and context_tokens >= 0):
            return False
        n, c = float(self.padded(tokens)), context_tokens / _CONTEXT
        weight = 1.0 / max(float(self.seconds(tokens, context_tokens)), seconds)
        if not self._line.update((weight, weight * n / _TOKENS, weight * c), weight * seconds):
            return False
        a, b, g = self._line.nonnegative()
        line = a + b * n / _TOKENS
        if line > 0.0:
            self._bend_towards(n, (seconds - g * c) / line - 1.0)
        self._curve = None
        return True

    def _bend_towards(self, n: float, relative: float) -> None:
        upper = min(max(int(np.searchsorted(KNOTS, n)), 1), len(KNOTS) - 1)
        share = min(max((n - KNOTS[upper - 1]) / (KNOTS[upper] - KNOTS[upper - 1]), 0.0), 1.0)
        shares = ((upper - 1, 1.0 - share), (upper, share))
        bend = sum(part * self._bend[knot] for knot, part in shares)
        error = min(max(relative, -_BEND_MAX), _BEND_MAX) - bend
        limit = 4.0 * self.relative_error
        error = min(max(error, -limit), limit)
        for knot, part in shares:
            if part > 0.0:
                self._weight[knot] = _MEMORY * self._weight[knot] + part
                self._bend[knot] += part / self._weight[knot] * error

    def _bent(self) -> NDArray[np.float64]:
        a, b, _ = self._line.nonnegative()
        self._slope = b / _TOKENS
        bend = self._bend * self._weight / (self._weight + _DOUBT)
        curve = (a + self._slope * KNOTS) * (1.0 + bend)
        return np.maximum(np.maximum.accumulate(curve), 1e-9)

    def to_dict(self) -> dict[str, float]:
        a, b, g = self._line.nonnegative()
        return {
            "base_s": a,
            "per_token_s": b / _TOKENS,
            "per_context_token_s": g / _CONTEXT,
            "relative_rms_error": self.relative_error,
            "samples": self.samples,
        }
