"""Placement rules that use only queues, each a function of the router's view.

Rules of other routers, from installed packages, have the same form (entry points
`headrace.simulate.policies`). Ties go to the lowest number unless the rule says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_lab.simulate.cluster_state import ClusterState, EnginePair, PromptRequest

Policy = Callable[[ClusterState, PromptRequest, Random], EnginePair]
Indices = NDArray[np.int64]


def alive_engines(cluster: ClusterState) -> tuple[Indices, Indices]:
    """Return the numbers of the prefill and decode engines that are alive.

    If no decode engine is alive, all decode engines are returned.
    """
    alive, split = cluster.alive, cluster.prefills
    p, d = np.flatnonzero(alive[:split]), np.flatnonzero(alive[split:]) + split
    if not len(d):
        d = np.arange(split, len(alive))
    return p, d


def two_choices(cluster: ClusterState, request: PromptRequest, rng: Random) -> EnginePair:
    """Power of two choices: of two random engines, the one with fewer requests in flight.

    Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 1996; Ray Serve's default
    (`PowerOfTwoChoicesRequestRouter`).
    """
    p, d = alive_engines(cluster)
    return engine_pair(better_of_two(cluster, p, rng), better_of_two(cluster, d, rng))


def engine_pair(prefill: int | None, decode: int | None) -> EnginePair:
    """Return an `EnginePair` with plain integers.

    Raises:
        ValueError: there is no decode engine.
    """
    if decode is None:
        raise ValueError("there is no decode engine")
    return EnginePair(None if prefill is None else int(prefill), int(decode))


def better_of_two(cluster: ClusterState, side: Indices, rng: Random) -> int | None:
    """Return the one of two random engines with fewer requests in flight; None without engines."""
    if not len(side):
        return None
    one, other = (int(side[rng.randrange(len(side))]) for _ in range(2))
    return one if cluster.sent_requests[one] <= cluster.sent_requests[other] else other


def least_loaded(
    side: Indices,
    load: NDArray[Any],
    among: NDArray[np.bool_] | None,
    rng: Random,
) -> int:
    """Return the engine with the smallest load, at random among equals."""
    weighed = load if among is None else np.where(among, load, np.inf)
    return int(side[rng.choice(np.flatnonzero(weighed == weighed.min()).tolist())])


BUILTIN_POLICIES: Mapping[str, Policy] = {
    "two-choices": two_choices,
}
"""Policies by the name that `--policy` takes."""
