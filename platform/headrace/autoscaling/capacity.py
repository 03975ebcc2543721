"""Share of the requests that a number of replicas would answer in time.

Prefill replicas compute a part `1 - x` of the prompts, and decode replicas compute the rest. `x` is
the part with which most requests are answered in time; the router's prices lead close to it. With
the symbols of `headrace.disaggregation`::

    in time = (1 - full) (1 - slow) [(1 - x) (1 - late(p, C_p)) + x (1 - late(d, C_d))]
    late(n, C) = ErlangC(n, a) exp(-slack / wait),   wait = E[C^2] / (2 E[C] (n - a))
    slack = target - E[C] - move - T(r)
    full = P(N > d places),   N of mean d r, variance d r T(r) / T(1)
    slow = P(T(r) + X / o > target),   X of mean busy S, variance lambda x / d S E[C_d^2]
    S = o token

`late` is the share of prompts that wait longer than their target allows: in the M/G/n queue, the
prompts that wait at all have an approximately exponential waiting time (Kingman 1961). `full` is
the share of requests that find no place in the decode engines' KV caches. With constant step times,
the number of running requests would be Poisson distributed (M/G/infinity). As more of them slow
each other down, its variance is larger by the factor T(r) / T(1). `slow` is the share of answers
whose mean time per token exceeds its target. `X` is the time that the engine spends on prompts
during an answer: a compound Poisson sum, approximated as normal. An overloaded split, as in
`advice`, answers no request in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.autoscaling.forecast import RateForecast
from headrace.disaggregation import TrafficLoad, pace, queue_of, step_s

DECODE_SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)
"""Values that are tried for the part of the prompts that decode engines compute."""
QUADRATURE = ((-1.732, 1 / 6), (0.0, 2 / 3), (1.732, 1 / 6))
"""Deviations of the rate and their weights: Gauss-Hermite quadrature of three points."""
MAX_SPLITS = 32
_STALLED = 1e-9


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets for requests, and the share of the requests that must keep them.

    Attributes:
        ttft_s, ttft_token_s: target for the time to first token, in seconds, and the seconds that
            are added to it for each token of the prompt.
        itl_s: target for the seconds of each later token.
        attainment: minimum part of the requests that keep both targets.
    """

    ttft_s: float = 2.0
    ttft_token_s: float = 0.0
    itl_s: float = 0.05
    attainment: float = 0.99

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0.0 and self.ttft_token_s >= 0.0 and self.itl_s > 0.0):
            raise ValueError("targets must be above 0 seconds")
        if not 0.0 < self.attainment < 1.0:
            raise ValueError(f"slo_attainment must be between 0 and 1, not {self.attainment}")


def in_time(load: TrafficLoad, slo: Slo, prefill: int, decode: int) -> float:
    """Return the share of the requests that these replicas answer in time."""
    if decode < 1:
        return 0.0
    if load.rate <= 0.0:
        return 1.0
    parts = DECODE_SHARES if prefill else (1.0,)
    return max(_in_time(load, slo, prefill, decode, x) for x in parts)


def _in_time(load: TrafficLoad, slo: Slo, prefill: int, decode: int, x: float) -> float:
    here, there = load.rate * x, load.rate * (1.0 - x)
    busy = here * load.local_s / decode
    if busy >= 1.0:
        return 0.0
    token_s, running = pace(load, load.rate / decode, 1.0 / (1.0 - busy))
    if token_s == math.inf:
        return 0.0
    target_s = slo.ttft_s + slo.ttft_token_s * load.prompt_tokens - step_s(load, running)
    good = 0.0
    if there > 0.0:
        slack_s = target_s - load.move_s
        good += (1.0 - x) * _prompt_in_time(
            *(there, prefill, load.remote_s, load.remote_square, slack_s)
        )
    if here > 0.0:
        good += x * _prompt_in_time(here, decode, load.local_s, load.local_square, target_s)
    steeper = step_s(load, running) / step_s(load, 1.0)
    full = _full(decode * running, decode * load.most_running, steeper)
    return good * (1.0 - full) * (1.0 - _slow(load, slo, token_s, here / decode))


def _prompt_in_time(
    rate: float, engines: int, mean_s: float, square: float, target_s: float
) -> float:
    slack_s = target_s - mean_s
    if rate * mean_s >= engines or slack_s <= 0.0:
        return 0.0
    if mean_s <= _STALLED:
        return 1.0
    waits, wait_s = queue_of(rate, engines, mean_s, square)
    return 1.0 - waits * math.exp(-slack_s / max(wait_s, _STALLED))


def _slow(load: TrafficLoad, slo: Slo, token_s: float, here: float) -> float:
    """Return the share of answers that are slower than the target.

    Args:
        here: prompts a second that the engine computes beside the answers.
    """
    answer_s = max(load.answer_tokens, 1.0) * token_s
    spread = math.sqrt(here * answer_s * load.local_square) / max(load.answer_tokens, 1.0)
    if spread <= 0.0:
        return float(token_s > slo.itl_s)
    return 0.5 * math.erfc((slo.itl_s - token_s) / (math.sqrt(2.0) * spread))


def _full(mean: float, places: float, steeper: float) -> float:
    """Return P(N > places) for a normal N with this mean and `steeper` times it as variance."""
    if mean <= 0.0:
        return 0.0
    return 0.5 * math.erfc((places + 0.5 - mean) / math.sqrt(2.0 * mean * steeper))


def expected_in_time(
    load: TrafficLoad, ahead: RateForecast, slo: Slo, prefill: int, decode: int
) -> float:
    """Return the expected `in_time` over the forecast's distribution of rates."""
    return sum(
        weight * in_time(replace(load, rate=ahead.at(chance)), slo, prefill, decode)
        for chance, weight in QUADRATURE
    )


@dataclass(frozen=True, slots=True)
class ReplicaBounds:
    """Minimum and maximum number of replicas of each role."""

    prefill: tuple[int, int]
    decode: tuple[int, int]

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            least, most = getattr(self, name)
            if not 0 <= least <= most:
                raise ValueError(f"{name}: bounds must be 0 <= {least} <= {most}")
        if self.decode[1] < 1:
            raise ValueError("decode: there must be room for one replica")

    def splits(self, total: int) -> Iterator[tuple[int, int]]:
        """Yield counts of both roles with this total, evenly spaced if there are many."""
        first = max(self.prefill[0], total - self.decode[1])
        last = min(self.prefill[1], total - max(self.decode[0], 1))
        each = max(1, -(-(last - first + 1) // MAX_SPLITS))
        for prefill in range(first, last + 1, each):
            yield prefill, total - prefill


@dataclass(frozen=True, slots=True)
class ReplicaNeed:
    """The smallest number of replicas that keeps the targets, and its share answered in time.

    If no counts within the bounds keep the targets, the counts with the highest share.
    """

    prefill: int
    decode: int
    in_time: float

    @property
    def total(self) -> int:
        return self.prefill + self.decode


def find_need(
    load: TrafficLoad,
    ahead: RateForecast,
    slo: Slo,
    bounds: ReplicaBounds,
    prefer: tuple[int, int] | None = None,
) -> ReplicaNeed:
    """Return the smallest number of replicas that keeps the targets under a forecast.

    The search is a bisection over the total, as more replicas answer more requests in time.

    Args:
        prefer: the current counts; of the splits that keep the targets, the closest one to them is
            chosen.
    """
    least = bounds.prefill[0] + max(1, bounds.decode[0])
    most = bounds.prefill[1] + bounds.decode[1]
    found = None
    while least < most:
        middle = (least + most) // 2
        best = _best(load, ahead, slo, bounds, middle, prefer)
        if best.in_time >= slo.attainment:
            most, found = middle, best
        else:
            least = middle + 1
    if found is not None and found.total == least:
        return found
    return _best(load, ahead, slo, bounds, least, prefer)


def _best(
    load: TrafficLoad,
    ahead: RateForecast,
    slo: Slo,
    bounds: ReplicaBounds,
    total: int,
    prefer: tuple[int, int] | None,
) -> ReplicaNeed:
    found = [
        ReplicaNeed(p, d, expected_in_time(load, ahead, slo, p, d)) for p, d in bounds.splits(total)
    ]
    best = max(found, key=lambda one: one.in_time)
    if prefer is None or best.in_time < slo.attainment:
        return best
    good = [one for one in found if one.in_time >= slo.attainment]
    # Of the splits that keep the targets, choose the fewest starts and stops, then the best share.
    return min(good, key=lambda one: (_moves(one, prefer), -one.in_time))


def _moves(one: ReplicaNeed, prefer: tuple[int, int]) -> int:
    return abs(one.prefill - prefer[0]) + abs(one.decode - prefer[1])
