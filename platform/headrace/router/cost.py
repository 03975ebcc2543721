"""Online models of what things cost, in seconds, fitted from what this cluster measured.

Every model is a recursive least-squares fit with a weak prior: it answers from the first request
on, and after a few dozen samples the prior no longer matters. No I/O, no clocks, no locks.
"""

from __future__ import annotations

import math

from headrace_kvstore.fitting import RecursiveLeastSquares


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

    Weighed like the step model, so ``rms_error`` is relative. Prior: 5 ms and 1 GB/s, with a
    standard deviation of ``std`` (seconds, seconds a MB).
    """

    _MB = 1e6

    def __init__(self, std: tuple[float, float] = (0.05, 0.005)) -> None:
        self._fit = RecursiveLeastSquares(mean=(0.005, 0.001), std=std, error=0.2, forgetting=0.98)

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
