"""Fit of the speed that the decode engine loses while the prefill engine computes.

Engines of one machine share cores, caches and memory bandwidth; engines of two machines share
nothing. No setting tells the two cases apart. The lost share is fitted to the decode engine's
steps::

    step seconds = T / (1 - share * overlap)

`T` is the step model's prediction for the decode engine alone. `overlap` is the part of the step
during which the prefill engine had work. A share of 0 means that the engines do not disturb each
other, a share of 0.5 that they take turns on one core.
"""

from __future__ import annotations

import math

from headrace_kvstore.least_squares import RecursiveLeastSquares


class SharedCores:
    """The fitted share. It starts at 0 and is learned within 20 steps."""

    _MOST = 0.95  # a share of 1 would stop the engine for ever

    def __init__(self) -> None:
        self._fit = RecursiveLeastSquares(mean=(0.0,), std=(0.3,), error=0.2, forgetting=0.98)

    @property
    def share(self) -> float:
        """Part of the decode engine's speed that is lost while the prefill engine computes."""
        return min(self._MOST, self._fit.nonnegative()[0])

    def observe(self, overlap: float, alone_s: float, seconds: float) -> None:
        """Learn from a step that took `seconds` and is predicted to take `alone_s` alone."""
        if overlap > 0.0 and math.isfinite(seconds) and seconds > 0.0:
            self._fit.update((overlap,), 1.0 - alone_s / seconds)

    def alone_s(self, seconds: float, overlap: float) -> float:
        """Return the seconds that a step of `seconds` would have taken alone."""
        return seconds * (1.0 - self.share * overlap)

    def to_dict(self) -> dict[str, float]:
        return {
            "lost_share": self.share,
            "rms_error": self._fit.rms_error,
            "samples": self._fit.samples,
        }
