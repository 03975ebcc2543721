"""Predicts the seconds of one engine step. Everything that plans for an engine uses this model.

A step computes `prompt` prompt tokens, one token for each of `rows` decoding requests, and verifies
`draft` draft tokens. Its rows attend to `context` tokens together, and its prompt tokens to `pairs`
tokens: the sum over them of the tokens that each attends to. With

    n = rows + draft + weight prompt

    T = exp(level) (exp(x(n)) + per_context context + per_pair (pairs + draft context / rows))

- `x`: the machine's curve over step sizes. No machine's is straight: a CPU computes in tiles, a GPU
  pads to the sizes for which it captured graphs. It is a Gaussian process over log n, held at 29
  knots, exp(x) linear in between. A measured size keeps its value, however old the measurement is.
  Sizes that were never measured follow from those that were.
- Steps with drafts have a curve of their own, because rejection sampling and ragged attention add
  time. The difference of the two curves is what a first draft token costs beyond its own work.
- `weight`: a prompt's token costs less than a row's, since only rows and drafts compute logits.
- `per_context`, `per_pair`: attention. A row reads its KV for one token; a prompt's tokens read it
  together and compute with it. On a CPU a token of context takes seven times as long as a pair.
- `level`: a factor of all steps, for a busy neighbour or a slower clock.

An extended Kalman filter on log seconds learns all of them from each step together (Rasmussen and
Williams, Gaussian Processes for Machine Learning, 2006, section 2.2; Hartikainen and Sarkka, MLSP
2010). One odd step counts as at most four standard deviations. Several steps in a row with errors
of the same sign mean that the machine has changed: the level becomes uncertain, and the next steps
set it. The noise of a step is learned, too.

Two processes fit the model, and neither has all data of an engine's steps.

- The replica's process (`meter`) sees each step through vLLM's statistics, but has only an estimate
  of the context. Its fit prices prompts: for the router's costs, prefill admission, and, as
  numbers (`to_dict`), the routers of other replicas.
- The engine's process sees the exact context. The drafting planner fits decode steps there, from
  the begin of one step to the begin of the next. The KV connector fits steps with prompts, without
  the waits for KV that it loads, because it decides about these waits.

Pure: NumPy only, no clocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

KNOTS = [1.0, 2.0, 3.0] + [float(step << shift) for shift in range(1, 14) for step in (2, 3)]
"""Step sizes at which the curve may bend: 1, 2, 3, 4, 6, 8, 12, ... 24576."""
_KNOTS = np.array(KNOTS)
_SIZES = len(KNOTS)
_LEVEL = 2 * _SIZES
_WEIGHT, _CONTEXT, _PAIR = _LEVEL + 1, _LEVEL + 2, _LEVEL + 3
"""Places in the state, after the curves without and with drafts. The whole state is logarithms, so
that no quantity can fall below 0."""
_PRIOR_S, _PRIOR_TOKEN_S = 0.0218, 0.00075
_PRIOR_CONTEXT_S, _PRIOR_PAIR_S = 2e-6, 4e-7
"""Prior seconds of a step, a token in it, a token of context and a pair: of a 135M model on one CPU
thread. A few steps overrule the prior."""
_DRIFT = 0.002
"""Standard deviation of the change since the step before: of the level, and of the curve and the
rates as far as the step depends on them."""
_NOISE, _MIN_NOISE, _MAX_NOISE, _NOISE_GAIN = 0.05, 0.01, 0.3, 0.04
_ODD = 4.0
_SAME_SIDE, _SAME_SIDE_LIMIT = 0.25, 1.5
"""Weight of a step in the mean of normalised errors, and the mean (four standard deviations) that
indicates a change."""
_ERROR_STEPS = 50.0
_MIN_S, _MOST, _MAX_STATE = 1e-6, 1e12, 40.0
"""Minimum seconds of a step; upper bound of an observed quantity; bound of the state."""
_LINE_TOKENS = 512


class Prices(NamedTuple):
    """The fit in the form that predictions use: seconds at each of `KNOTS`, of a token of context
    and of a pair, and the weight of a prompt's token."""

    plain: list[float]
    drafted: list[float]
    context_s: float
    pair_s: float
    weight: float


def _prior_covariance() -> NDArray[np.float64]:
    """Return the prior covariance of the state, [62, 62].

    The level may be off by a factor of e^1.5, the cost of a token against that of a step by as
    much, and so may attention; the weight of a prompt's token by a factor of e. Beyond that the
    curve's shape may be off by a third, smoothly, and by a tenth between neighbours. A step with
    drafts differs by a tenth, and by a tenth at its own size.
    """
    distance = np.subtract.outer(np.log(_KNOTS), np.log(_KNOTS))
    per_token = _PRIOR_TOKEN_S * _KNOTS / (_PRIOR_S + _PRIOR_TOKEN_S * _KNOTS)
    near = np.exp(-0.5 * (distance / 0.35) ** 2)
    both = 1.5**2 * np.outer(per_token, per_token)
    both += 0.3**2 * np.exp(-0.5 * (distance / 1.5) ** 2) + 0.1**2 * near
    drafted = 0.1**2 + 0.1**2 * near
    covariance = np.diag([*[0.0] * _LEVEL, 1.5**2, 1.0, 1.5**2, 1.5**2])
    covariance[:_LEVEL, :_LEVEL] = np.block([[both, both], [both, both + drafted]])
    return covariance


_PRIOR = _prior_covariance()


class StepTime:
    """One engine's step times. They never fall with more work, and follow the prior before the
    first step. Used from one thread."""

    def __init__(self, padded_sizes: Sequence[int] = ()) -> None:
        """
        Args:
            padded_sizes: the engine pads a step's tokens up to the next of these, if there is one
                (vLLM's CUDA graph sizes).
        """
        self._sizes = sorted({int(size) for size in padded_sizes})
        self._state = np.zeros(_PAIR + 1)
        self._state[:_LEVEL] = np.tile(np.log(_PRIOR_S + _PRIOR_TOKEN_S * _KNOTS), 2)
        self._state[_CONTEXT:] = np.log([_PRIOR_CONTEXT_S, _PRIOR_PAIR_S])
        self._covariance = _PRIOR.copy()
        self._noise = _NOISE**2
        self._square = 0.2**2
        self._same_side = 0.0
        self._prices: Prices | None = None
        self.samples = 0

    @property
    def padded_sizes(self) -> Sequence[int]:
        """Step sizes that the engine pads to, ascending."""
        return self._sizes

    @property
    def relative_error(self) -> float:
        """Root mean square of recent one-step-ahead errors (0.1 is 10 %)."""
        return math.sqrt(self._square)

    def seconds(
        self,
        prompt: float = 0,
        rows: float = 0,
        draft: float = 0,
        context: float = 0,
        pairs: float = 0,
    ) -> float:
        """Predict the seconds of a step, above 0.

        Args:
            prompt: prompt tokens computed. rows: requests that decode. draft: draft tokens.
            context: tokens of all rows. pairs: of prompt tokens and tokens that they attend to.
        """
        prices = self.prices()
        seconds = _at(prices.plain, self._size(prompt, rows, prices.weight))
        if draft > 0:
            drafted = _at(prices.drafted, self._size(prompt, rows + draft, prices.weight))
            drafted += prices.pair_s * _draft_pairs(rows, draft, context)
            seconds = max(seconds, drafted)
        return seconds + prices.context_s * context + prices.pair_s * pairs

    def seconds_each(
        self,
        draft: NDArray[np.integer],
        prompt: float = 0,
        rows: float = 0,
        context: float = 0,
        pairs: float = 0,
    ) -> NDArray[np.float64]:
        """Predict `seconds` for each of many numbers of draft tokens."""
        prices = self.prices()
        computed = rows + np.asarray(draft, np.float64)
        sizes = prices.weight * prompt + computed
        if self._sizes:
            at = np.searchsorted(self._sizes, sizes)
            padded = np.asarray(self._sizes)[np.minimum(at, len(self._sizes) - 1)]
            sizes = np.where(at < len(self._sizes), padded, sizes)
        drafted = np.interp(sizes, _KNOTS, prices.drafted) * np.maximum(sizes / KNOTS[-1], 1.0)
        drafted += prices.pair_s * _draft_pairs(rows, 1.0, context) * (computed - rows)
        drafted += prices.context_s * context + prices.pair_s * pairs
        plain = self.seconds(prompt, rows, 0, context, pairs)
        return np.where(computed > rows, np.maximum(drafted, plain), plain)

    def prefill_s(
        self,
        tokens: int,
        pairs: float = 0,
        *,
        step_tokens: int,
        rows: int = 0,
        context: float = 0,
    ) -> float:
        """Predict the seconds of the steps that compute prompts; 0 for no tokens. A single token
        reads its KV as a row does.

        Args:
            tokens, pairs: of all the prompts.
            step_tokens: the engine's token budget: more tokens take several steps.
            rows, context: of the requests that decode in each of the steps.
        """
        if tokens == 1:
            return self.seconds(0, rows + 1, 0, context + pairs)
        full, rest = divmod(tokens, step_tokens)
        total_s = 0.0
        for steps, size in ((full, step_tokens), (1, rest)):
            if steps and size:
                total_s += steps * self.seconds(size, rows, 0, context, pairs * size / tokens)
        return total_s

    def added_s(self, prompt: float, pairs: float) -> float:
        """Predict the seconds by which prompt tokens make a step longer."""
        return self.seconds(prompt, pairs=pairs) - self.seconds()

    def free_tokens(self) -> float:
        """Return how many prompt tokens double the time of a nearly empty step: a / b where T is
        a + b n."""
        prices = self.prices()
        curve, most_s = prices.plain, 2.0 * prices.plain[0]
        upper = bisect_left(curve, most_s)
        if upper == _SIZES:
            size = KNOTS[-1] * most_s / curve[-1]
        else:
            share = (most_s - curve[upper - 1]) / (curve[upper] - curve[upper - 1])
            size = KNOTS[upper - 1] + share * (KNOTS[upper] - KNOTS[upper - 1])
        return max(0.0, size - 2.0) / prices.weight

    def rows_within(self, seconds: float) -> int:
        """Return the maximum number of decoding rows whose step takes at most `seconds`."""
        curve = self.prices().plain
        upper = bisect_right(curve, seconds)
        if upper == 0:
            return 0
        if upper == _SIZES:
            return int(KNOTS[-1] * seconds / curve[-1])
        share = (seconds - curve[upper - 1]) / (curve[upper] - curve[upper - 1])
        rows = int(KNOTS[upper - 1] + share * (KNOTS[upper] - KNOTS[upper - 1]))
        padded = bisect_right(self._sizes, rows)
        if padded == len(self._sizes):
            return rows
        return self._sizes[padded - 1] if padded else 0

    def observe(
        self,
        prompt: float,
        rows: float,
        draft: float,
        context: float,
        pairs: float,
        seconds: float,
    ) -> bool:
        """Learn one step. Return False if it is unusable (not finite, nothing computed)."""
        shape = prompt, rows, draft, context, pairs
        usable = all(0 <= part < _MOST for part in shape) and prompt + rows + draft > 0
        if not (usable and _MIN_S < seconds < _MOST):
            return False
        predicted, places, slope = self._linearised(*shape)
        self._covariance[places, places] += np.abs(slope) * _DRIFT**2
        error = math.log(seconds) - predicted
        towards, variance, odd = self._weighed(places, slope, error)
        self._same_side += _SAME_SIDE * (odd / math.sqrt(variance) - self._same_side)
        if abs(self._same_side) > _SAME_SIDE_LIMIT:
            self._same_side = 0.0
            self._covariance[_LEVEL, _LEVEL] += odd * odd
            towards, variance, odd = self._weighed(places, slope, error)
        self._state += towards * (odd / variance)
        self._covariance -= np.outer(towards, towards) / variance
        self._square += (odd * odd - self._square) / _ERROR_STEPS
        surprise = (odd * odd / variance - 1.0) * self._noise / variance
        noise = self._noise * (1.0 + _NOISE_GAIN * min(surprise, 4.0))
        self._noise = min(max(noise, _MIN_NOISE**2), _MAX_NOISE**2)
        self._keep_sound()
        self._prices = None
        self.samples += 1
        return True

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers that another process needs to price with this fit (`from_dict`)."""
        return {
            "state": self._state.tolist(),
            "square": self._square,
            "samples": self.samples,
            "padded_sizes": list(self._sizes),
        }

    @staticmethod
    def from_dict(told: Mapping[str, Any]) -> StepTime:
        """Return the fit in another process's `to_dict`, to price with. It has no covariance.

        Raises:
            ValueError: `told` is no such state.
        """
        try:
            fit = StepTime(told["padded_sizes"])
            state, square = np.asarray(told["state"], np.float64), float(told["square"])
            fit.samples = int(told["samples"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not the state of a step-time model: {error!r}") from error
        right = state.shape == fit._state.shape and bool((np.abs(state) <= _MAX_STATE).all())
        if not (right and fit.samples >= 0 and 0 <= square < 1e6):
            raise ValueError("not the state of a step-time model: a number is out of bounds")
        fit._state, fit._square = state, square
        return fit

    def summary(self) -> dict[str, float]:
        """Return a straight line through the curve, and the quality of the fit, for people."""
        prices = self.prices()
        first_s = prices.plain[0]
        token_s = (self.seconds(_LINE_TOKENS) - first_s) / _LINE_TOKENS
        return {
            "base_s": first_s,
            "per_token_s": token_s,
            "per_context_token_s": prices.context_s,
            "per_pair_s": prices.pair_s,
            "relative_rms_error": self.relative_error,
            "samples": self.samples,
        }

    def prices(self) -> Prices:
        """Return the curve, for code that prices many engines at once: the same object until the
        next `observe`."""
        if self._prices is None:
            scale = math.exp(self._state[_LEVEL])
            curves = scale * np.exp(self._state[:_LEVEL].reshape(2, -1))
            plain, drafted = np.maximum.accumulate(curves, axis=1).tolist()
            weight, context, pair = np.exp(self._state[_WEIGHT:]).tolist()
            self._prices = Prices(plain, drafted, scale * context, scale * pair, weight)
        return self._prices

    def _size(self, prompt: float, computed: float, weight: float) -> float:
        """Return the place of a step on the curve."""
        size = weight * prompt + computed
        at = bisect_left(self._sizes, size)
        return self._sizes[at] if at < len(self._sizes) else size

    def _linearised(
        self, prompt: float, rows: float, draft: float, context: float, pairs: float
    ) -> tuple[float, NDArray[np.int64], NDArray[np.float64]]:
        """Return log T, the places [6] of the state at which d log T / d state is not 0, and the
        derivative there [6]."""
        weight, per_context, per_pair = np.exp(self._state[_WEIGHT:]).tolist()
        n = self._size(prompt, rows + draft, weight)
        beyond = max(n / KNOTS[-1], 1.0)
        n = max(n / beyond, 1.0)
        upper = min(max(bisect_left(KNOTS, n), 1), _SIZES - 1)
        knot, width = KNOTS[upper - 1], KNOTS[upper] - KNOTS[upper - 1]
        share = (n - knot) / width
        first = (_SIZES if draft > 0 else 0) + upper
        places = np.array([first - 1, first, _LEVEL, _WEIGHT, _CONTEXT, _PAIR])
        low, high = (beyond * np.exp(self._state[first - 1 : first + 1])).tolist()
        low_part, high_part = low * (1.0 - share), high * share
        in_context = per_context * context
        in_pairs = per_pair * (pairs + _draft_pairs(rows, draft, context))
        total = low_part + high_part + in_context + in_pairs
        in_weight = weight * prompt / beyond * (high - low) / width
        slope = np.array([low_part, high_part, total, in_weight, in_context, in_pairs]) / total
        return float(self._state[_LEVEL]) + math.log(total), places, slope

    def _weighed(
        self, places: NDArray[np.int64], slope: NDArray[np.float64], error: float
    ) -> tuple[NDArray[np.float64], float, float]:
        """Return (covariance of state and step [62], variance of the step, the error, clipped)."""
        towards = self._covariance[:, places] @ slope
        variance = max(float(slope @ towards[places]), 0.0) + self._noise
        limit = _ODD * math.sqrt(variance)
        return towards, variance, min(max(error, -limit), limit)

    def _keep_sound(self) -> None:
        """Keep every number within bounds, and go back to the prior covariance if rounding has
        ruined the present one."""
        np.clip(self._state, -_MAX_STATE, _MAX_STATE, out=self._state)
        diagonal = self._covariance.diagonal()
        if not (diagonal.min() > 0.0 and diagonal.max() < 1e3):
            self._covariance = _PRIOR.copy()


def _at(curve: list[float], n: float) -> float:
    """Return a curve's value at a size; straight between knots, in proportion beyond the last."""
    if n <= 1.0:
        return curve[0]
    if n >= KNOTS[-1]:
        return curve[-1] * n / KNOTS[-1]
    upper = bisect_left(KNOTS, n)
    low, high = KNOTS[upper - 1], KNOTS[upper]
    return curve[upper - 1] + (curve[upper] - curve[upper - 1]) * (n - low) / (high - low)


def _draft_pairs(rows: float, draft: float, context: float) -> float:
    """Return `pairs` of draft tokens. Rows are assumed to be equally long."""
    return draft * context / max(rows, 1.0)


def pairs_of(first_token: int, last_token: int) -> int:
    """Return `pairs` of a prompt's tokens from `first_token` to `last_token`, which is not
    included: each token attends to all before it and to itself."""
    return (last_token * (last_token + 1) - first_token * (first_token + 1)) // 2
