"""How likely drafts for sampled requests are, given how likely a memory says that they are.

A memory learns mostly from answers in which the likeliest token was taken. Where tokens are drawn
at a temperature, a draft token is accepted with its probability and no more: what seemed nearly
certain is not, and what seemed hopeless sometimes comes. So promises to sampled requests are drawn
towards even, as far as what came says so (Platt, Probabilistic outputs for support vector machines,
1999). Those to greedy requests are left as they are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculation.draft import chances_of

_PRIOR_STD = 0.5, 0.3  # of a, b
_DRIFT = 5e-5  # variance of each, a tested token; some hundreds of tokens are remembered
_FLATTEST = 0.1
_NEVER = 1e-3


class PlattScaling:
    """``logit h' = a + b logit h`` for each token's chance ``h`` behind right ones; at first a = 0
    and b = 1. Followed by an extended Kalman filter: with the tested tokens of a step as rows
    ``x = (1, logit h)`` of ``X``, what came of them ``y`` and ``V = diag(h' (1 - h'))``,

        P   = ((P + drift)^-1 + X^T V X)^-1
        a,b += P X^T (y - h')
    """

    def __init__(self) -> None:
        self._line = np.array([0.0, 1.0])
        self._covariance = np.diag(np.square(_PRIOR_STD))

    @property
    def line(self) -> tuple[float, float]:
        """``a`` and ``b``."""
        return float(self._line[0]), max(float(self._line[1]), _FLATTEST)

    def scaled(
        self, survival: NDArray[np.float32], sampled: NDArray[np.bool_]
    ) -> NDArray[np.float32]:
        """Survivals [n, K] of drafts of which those of `sampled` requests, [n], are scaled."""
        if not sampled.any():
            return survival
        chances = chances_of(survival)
        scaled = np.where(chances > 0.0, self._chances(_logit(chances)), 0.0)
        scaled = np.where(sampled[:, None], np.cumprod(scaled, axis=1), survival)
        return scaled.astype(np.float32)

    def learn(
        self,
        survival: NDArray[np.float32],
        sampled: NDArray[np.bool_],
        tested: NDArray[np.int32],
        right: NDArray[np.int32],
    ) -> None:
        """Drafts were tested.

        Args:
            survival: [n, K], as promised. sampled: [n].
            tested, right: [n], tokens of each that were put to the test, and that were right.
        """
        place = np.arange(survival.shape[1])
        used = sampled[:, None] & (place < tested[:, None]) & (survival > 0.0)
        if not used.any():
            return
        logits = _logit(chances_of(survival)[used])
        came = (place < right[:, None])[used]
        chances = self._chances(logits)
        rows = np.stack([np.ones_like(logits), logits])
        drifted = self._covariance + _DRIFT * len(logits) * np.eye(2)
        known = np.linalg.inv(drifted) + (rows * chances * (1.0 - chances)) @ rows.T
        self._covariance = np.linalg.inv(known)
        self._line += self._covariance @ (rows @ (came - chances))

    def _chances(self, logits: NDArray[np.float64]) -> NDArray[np.float64]:
        a, b = self.line
        return np.asarray(1.0 / (1.0 + np.exp(-a - b * logits)))


def _logit(chances: NDArray[np.float32]) -> NDArray[np.float64]:
    inner = np.clip(chances.astype(np.float64), _NEVER, 1.0 - _NEVER)
    return np.asarray(np.log(inner / (1.0 - inner)))
