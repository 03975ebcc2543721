"""Predicts the probability that a draft token is accepted if all tokens before it are accepted.

The model is an online Bayesian logistic regression. A token has the log-odds

    z = w[source, match, agreement] + w[source, agreement, refusals] + w[agreement, position]
        + effect(request)                                  each w and the effect a Gaussian

- source: the text that weighed most in the vote on this token (`DraftSource`)
- match: how many of the last tokens also stood before that text, in buckets
- agreement: the number of candidates, and this token's share of their weight
- refusals: earlier refusals and acceptances at this place (`failure_table`)
- position: position in the draft, in buckets
- effect: the request's difference from others. It begins as the population's mean and variance,
  which are learned from the requests that end.

Before the first learning step, the odds of a token are n to 1 after a match of n tokens, as they
are after n successes and no failure under Haldane's prior.

A request that samples at temperature t has ``a t + (1 + c t) z`` instead, with ``a`` and ``c``
learned like the weights: a nearly certain token is less certain if tokens are sampled.

Each tested token is one step of an extended Kalman filter with a diagonal covariance (as in
Graepel et al., Web-Scale Bayesian Click-Through Rate Prediction, ICML 2010): with gradient ``g`` of
z, variances ``v``, outcome y, ``p = sigmoid(z)``, ``r = p (1 - p)`` and ``S = sum g^2 v``,

    w += v g (y - p) / (1 + r S)         v -= (v g)^2 r / (1 + r S)

Variances grow back slowly, so that the model follows a workload that changes.
"""

from __future__ import annotations

from math import exp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_decode.speculative.draft_batch import DraftSource
from headrace_decode.speculative.jit import jit
from headrace_decode.speculative.retrieval.layout import CONTEXT

SOURCES = len(DraftSource)
MATCH_FROM = (1, 2, 3, 4, 6, 9, 13, 20, 32)
"""Smallest match length, in tokens, of each bucket."""
POSITION_FROM = (0, 1, 2, 3, 5, 8, 12, 20)
SHARE_FROM = (0.745, 0.495, 0.345, 0.195, 0.0)
"""Minimum share of the weight of each bucket. They are slightly below round shares: of two
candidates that differ only in age, each has half."""
AGREEMENTS = 3 + len(SHARE_FROM)
"""Number of agreement buckets: one candidate alone; 2 or 3 agree; more agree; only some agree, with
at least a share of `SHARE_FROM` of the weight."""
FAILURE_BUCKETS = 5
"""Number of buckets of the refusals feature: 0 no counts; 1 accepted more often than refused; 2
accepted before, but no more often than refused; 3 refused once, never accepted; 4 refused more than
once, never accepted."""
MATCHES, POSITIONS = len(MATCH_FROM), len(POSITION_FROM)

WEIGHT_VARIANCE = 0.3
VARIANCE_GROWTH = 1e-3
"""Share by which a variance grows with each token that it is used for, up to its prior."""
EFFECT_VARIANCE, EFFECT_VARIANCE_GROWTH = 0.4, 0.01
"""Initial variance of the population, and the growth of a request's variance for each token, which
is faster than that of a weight."""
POPULATION_RATE = 0.05
"""Share by which the population moves towards each request that ends."""
SAMPLING_STD = 0.5, 0.3
"""Prior standard deviations of `a` and `c`; both have mean 0."""
MIN_TEMPERATURE_FACTOR = 0.1
"""Minimum of ``1 + c t``."""

# First rows of the second and third group of weights.
_BY_REFUSALS = SOURCES * MATCHES * AGREEMENTS
_BY_PLACE = _BY_REFUSALS + SOURCES * AGREEMENTS * FAILURE_BUCKETS
WEIGHTS = _BY_PLACE + AGREEMENTS * POSITIONS
EFFECT = 4
"""Number of columns of a request's effect: mean, variance, temperature, and the initial variance,
which is the maximum."""
MEAN, VARIANCE = 0, 1


class AcceptanceParameters(NamedTuple):
    """The parameters that one memory has learned, for the compiled functions below.

    Attributes:
        weights: float64 [WEIGHTS, 2]: mean and variance of each weight.
        sampling: float64 [2, 2]: mean and variance of `a` and `c`.
        votes: float32 [SOURCES, MATCHES]: odds that a candidate's next token is accepted, which are
            its weight in the vote on the next token.
    """

    weights: NDArray[np.float64]
    sampling: NDArray[np.float64]
    votes: NDArray[np.float32]


def _buckets(starts: tuple[int, ...], size: int) -> NDArray[np.int32]:
    return (np.searchsorted(starts, np.arange(size), side="right") - 1).clip(0).astype(np.int32)


MATCH_BUCKET = _buckets(MATCH_FROM, CONTEXT + 1)
POSITION_BUCKET = _buckets(POSITION_FROM, POSITION_FROM[-1] + 1)


class Acceptance:
    """The acceptance model of one memory.

    Attributes:
        parameters: the learned parameters.
        population: float64 [2], mean and variance of the requests' effects.
    """

    def __init__(self) -> None:
        self.parameters = AcceptanceParameters(
            np.tile([0.0, WEIGHT_VARIANCE], (WEIGHTS, 1)),
            np.array([[0.0, std**2] for std in SAMPLING_STD]),
            np.empty((SOURCES, MATCHES), np.float32),
        )
        means = self.parameters.weights[:_BY_REFUSALS, MEAN]
        by_match = means.reshape(SOURCES, MATCHES, AGREEMENTS)
        by_match[:] = np.log(MATCH_FROM)[:, None]
        self.population = np.array([0.0, EFFECT_VARIANCE])
        self.update_votes()

    def initial_effect(self, temperature: float = 0.0) -> NDArray[np.float64]:
        """Return the initial effect of a request, float64 [EFFECT]."""
        mean, variance = self.population
        return np.array([mean, variance, temperature, variance])

    def on_request_end(self, effect: NDArray[np.float64]) -> None:
        """Learn from the effect of a request that ended."""
        deviation = effect[MEAN] - self.population[MEAN]
        self.population[MEAN] += POPULATION_RATE * deviation
        variance = deviation**2 + effect[VARIANCE]
        self.population[VARIANCE] += POPULATION_RATE * (variance - self.population[VARIANCE])

    def update_votes(self) -> None:
        """Compute the votes again after the weights changed: odds of a lone candidate."""
        means = self.parameters.weights[:, MEAN]
        alone = means[:_BY_REFUSALS].reshape(SOURCES, MATCHES, AGREEMENTS)[..., 0]
        by_source = means[_BY_REFUSALS:_BY_PLACE].reshape(SOURCES, -1)[:, :1]
        self.parameters.votes[:] = np.exp(alone + by_source)


@jit
def encode_features(source: int, match: int, agreement: int, failures: int, position: int) -> int:
    """Return the cell of a token's features, which encodes all of them in one number.

    All features are numbers of buckets, except for `source`.
    """
    cell = ((source * MATCHES + match) * AGREEMENTS + agreement) * FAILURE_BUCKETS + failures
    return cell * POSITIONS + position


@jit
def weight_rows(cell: int) -> tuple[int, int, int]:
    """Return the rows of the three weights of a cell."""
    position, rest = cell % POSITIONS, cell // POSITIONS
    failures, rest = rest % FAILURE_BUCKETS, rest // FAILURE_BUCKETS
    agreement = rest % AGREEMENTS
    source = rest // (MATCHES * AGREEMENTS)
    by_refusals = (source * AGREEMENTS + agreement) * FAILURE_BUCKETS + failures
    return rest, _BY_REFUSALS + by_refusals, _BY_PLACE + agreement * POSITIONS + position


@jit
def _score(parameters: Any, effect: Any, cell: int) -> tuple[float, float]:
    """Return the mean of z, and the sum of the variances in it."""
    a, b, c = weight_rows(cell)
    weights = parameters.weights
    return (
        weights[a, 0] + weights[b, 0] + weights[c, 0] + effect[0],
        weights[a, 1] + weights[b, 1] + weights[c, 1] + effect[1],
    )


@jit
def _temperature_factor(parameters: Any, temperature: float) -> float:
    """Return ``1 + c t``, the factor of z for a request that samples at a temperature."""
    return max(1.0 + temperature * parameters.sampling[1, 0], MIN_TEMPERATURE_FACTOR)


@jit
def acceptance_probability(parameters: Any, effect: Any, cell: int) -> float:
    """Return the probability that a token is accepted if all before it were accepted."""
    z, _ = _score(parameters, effect, cell)
    temperature = effect[2]
    factor = _temperature_factor(parameters, temperature)
    return 1.0 / (1.0 + exp(-temperature * parameters.sampling[0, 0] - factor * z))


@jit
def learn(parameters: Any, effect: Any, cell: int, accepted: bool) -> None:
    """Learn from the test of one token; all draft tokens before it were accepted."""
    score, variance = _score(parameters, effect, cell)
    weights, sampling, temperature = parameters.weights, parameters.sampling, effect[2]
    slope = _temperature_factor(parameters, temperature)
    variance = slope**2 * variance + temperature**2 * (sampling[0, 1] + score**2 * sampling[1, 1])
    p = acceptance_probability(parameters, effect, cell)
    shrink = 1.0 / (1.0 + p * (1.0 - p) * variance)
    shift, shrinkage = ((1.0 if accepted else 0.0) - p) * shrink, p * (1.0 - p) * shrink
    for row in weight_rows(cell):
        _update_gaussian(weights[row], slope, shift, shrinkage, VARIANCE_GROWTH, WEIGHT_VARIANCE)
    _update_gaussian(effect, slope, shift, shrinkage, EFFECT_VARIANCE_GROWTH, effect[3])
    if temperature > 0.0:
        for which in range(2):
            gradient = temperature * (score if which else 1.0)
            prior = SAMPLING_STD[which] ** 2
            _update_gaussian(sampling[which], gradient, shift, shrinkage, VARIANCE_GROWTH, prior)


@jit
def _update_gaussian(
    gaussian: Any,
    gradient: float,
    shift: float,
    shrinkage: float,
    growth: float,
    max_variance: float,
) -> None:
    """Move a mean and its variance, which grows back up to `max_variance`."""
    variance = gaussian[1]
    gaussian[0] += gradient * variance * shift
    variance -= (gradient * variance) ** 2 * shrinkage
    gaussian[1] = min(variance * (1.0 + growth), max_variance)


@jit
def agreement_bucket(candidates: int, share: float) -> int:
    """Return the bucket of a token's agreeing candidates and their share of the weight."""
    if share >= 0.999:
        return 0 if candidates == 1 else (1 if candidates <= 3 else 2)
    for bucket in range(len(SHARE_FROM) - 1):
        if share >= SHARE_FROM[bucket]:
            return 3 + bucket
    return AGREEMENTS - 1


@jit
def failure_bucket(refused: int, accepted: int) -> int:
    """Return the bucket of a token's counts in the failure table."""
    if accepted > refused:
        return 1
    if accepted > 0:
        return 2
    return 0 if refused == 0 else (3 if refused == 1 else 4)
