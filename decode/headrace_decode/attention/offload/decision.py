"""Decides whether a request's KV stays in the cache or is offloaded: the way that adds the fewest
seconds to all requests.

A request takes blocks, and makes each step of its answer longer. Served in a way w, it adds

    wait(w)                 seconds until that many blocks are free, predicted from running requests
    steps step_s(w) rows    all rows of a step wait for its longest part
    displaced(w) held(w)    queued requests that w leaves no blocks for wait until it ends

Steps are shorter with KV in the cache. More requests run at once with KV offloaded. There is no
threshold: if no request waits, a request stays in the cache; if many wait, it is offloaded; in
between, the measured seconds of this engine's steps decide (`StepCosts`).

Requests that run in the cache may also be offloaded, to admit others. That saves and costs

    wait(first of the queue) admitted    all admitted requests would have waited at least as long
    sum of steps step_s rows             steps of the offloaded requests are longer by this

Pure: no clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from headrace_kvstore.least_squares import RecursiveLeastSquares


class AttentionMode(IntEnum):
    """Way in which a row of an answer attends."""

    DENSE = 0
    SPARSE = 1
    OFFLOADED = 2
    """Sparse, over a working set."""
    STAGED = 3
    """Dense, over KV that is offloaded."""


PRIOR_S = 0.02, 1e-3, 2e-6, 4e-7, 6e-7, 4e-6
"""Initial seconds of a step, of a row in it, and of a token of a row's context in each mode. They
are those of a small model on one CPU thread. A few measured steps outweigh them."""


class StepCosts:
    """Seconds of steps that compute answers alone, fitted to measured steps."""

    def __init__(self) -> None:
        self._fit = RecursiveLeastSquares(PRIOR_S, PRIOR_S, error=0.2)

    def observe(self, rows: int, context: Sequence[float], seconds: float) -> bool:
        """Learn from a step; return whether it was used.

        Args:
            rows: number of its rows. context: tokens of its rows' contexts, by `AttentionMode`.
            seconds: its duration.
        """
        if not (rows > 0 and seconds > 0):
            return False
        weight = 1.0 / max(self.seconds(rows, context), seconds)
        features = [weight * part for part in (1.0, rows, *context)]
        return self._fit.update(features, weight * seconds)

    def seconds(self, rows: int, context: Sequence[float]) -> float:
        """Predict the seconds of a step."""
        costs = self._fit.nonnegative()
        return sum(a * b for a, b in zip(costs, (1.0, rows, *context), strict=True))

    def added_s(self, mode: AttentionMode, context: float) -> float:
        """Predict the seconds by which a row makes a step longer.

        An offloaded row never costs less than the same row in the cache. Steps whose times vary
        could show the opposite, and requests would then leave a cache that has room for them.
        """
        costs = self._fit.nonnegative()
        each = costs[2 + mode]
        if mode is AttentionMode.OFFLOADED:
            each = max(each, costs[2 + AttentionMode.SPARSE])
        return costs[1] + each * context


@dataclass(frozen=True)
class ServingOption:
    """One way to serve a request.

    Attributes:
        blocks: blocks of the cache that it takes.
        step_s: seconds by which it makes a step longer.
    """

    blocks: int
    step_s: float


@dataclass(frozen=True)
class RunningRequest:
    """A running request.

    Attributes:
        blocks: blocks that become free when it ends. left_s: seconds until then.
    """

    blocks: int
    left_s: float


def cheapest_option(
    ways: Sequence[ServingOption],
    steps: int,
    step_s: float,
    free: int,
    running: Sequence[RunningRequest],
    queue: Sequence[int],
) -> int:
    """Return the index of the way that adds the fewest seconds; the first of equals.

    Args:
        ways: at least one.
        steps: number of steps of the request's answer.
        step_s: seconds of a step without it.
        free: number of free blocks.
        running: requests that run.
        queue: minimum blocks of each request that waits after it.
    """

    def added_s(way: ServingOption) -> float:
        wait = wait_s(way.blocks, free, running)
        if wait == math.inf:
            return math.inf
        displaced = admitted_count(queue, free) - admitted_count(queue, free - way.blocks)
        held = steps * (step_s + way.step_s)
        return wait + steps * way.step_s * (len(running) + 1) + displaced * held

    costs = [added_s(way) for way in ways]
    return costs.index(min(costs))


@dataclass(frozen=True)
class OffloadCandidate:
    """A request that runs in the cache and may be offloaded.

    Attributes:
        freed: blocks that this frees, more than 0.
        longer_s: seconds by which the remaining steps of its answer would be longer, in total.
    """

    freed: int
    longer_s: float


def choose_offloads(
    leavers: Sequence[OffloadCandidate],
    free: int,
    running: Sequence[RunningRequest],
    queue: Sequence[int],
) -> list[int]:
    """Return which requests to offload: none, or as few as admit the first of the queue. Requests
    with the lowest cost for a block come first.

    Args:
        free, running, queue: as for `cheapest_option`.
    """
    if not queue or queue[0] <= free:
        return []
    saved_s, longer_s, found = wait_s(queue[0], free, running), 0.0, []
    cheap = sorted(range(len(leavers)), key=lambda n: leavers[n].longer_s / leavers[n].freed)
    for number in cheap:
        found.append(number)
        free += leavers[number].freed
        longer_s += leavers[number].longer_s
        admitted = admitted_count(queue, free)
        if admitted:
            worth = saved_s * admitted > longer_s * (len(running) + admitted)
            return found if worth else []
    return []


def wait_s(blocks: int, free: int, running: Sequence[RunningRequest]) -> float:
    """Predict the seconds until so many blocks are free; infinite if they never are."""
    if blocks <= free:
        return 0.0
    for one in sorted(running, key=lambda each: each.left_s):
        free += one.blocks
        if blocks <= free:
            return one.left_s
    return math.inf


def admitted_count(queue: Sequence[int], free: int) -> int:
    """Return how many of the queue's first requests the free blocks hold."""
    for number, blocks in enumerate(queue):
        free -= blocks
        if free < 0:
            return number
    return len(queue)
