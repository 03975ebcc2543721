"""Placement policies: the engines that a request goes to.

The policy `cost` takes the smallest price (`pricing`); `place` computes it. The others are found by
name: the ones in `POLICIES`, and the ones that packages add by entry points of the group
`headrace.placement_policies`. An entry point names a callable without arguments that returns a
`PlacementPolicy`, such as a class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.placement_policies import COST, LOAD, PREFIX_AFFINITY, ROUND_ROBIN
from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.pricing import hash_pair
from headrace.router.placement.request import NoDecodeReplicaError, PlacementRequest

GROUP = "headrace.placement_policies"
BOUND = 1.25
"""Maximum load of an engine that `PrefixAffinity` chooses, as a multiple of the mean load, as in
consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018)."""

Rows = NDArray[np.int64]


class Placement(NamedTuple):
    """Rows of the chosen engines in `ClusterView.engines`, and the reason."""

    prefill: int | None
    """The engine that computes the prompt; None for `decode`."""
    decode: int
    reason: str


class PlacementPolicy(Protocol):
    """Chooses the engines of a request. One object serves one caller of `place`."""

    def choose(self, view: ClusterView, request: PlacementRequest) -> Placement:
        """Return the engines of a request.

        `candidates` lists the engines that may be chosen.

        Raises:
            NoDecodeReplicaError: no decode engine may be asked.
        """
        ...


def candidates(view: ClusterView, request: PlacementRequest) -> tuple[Rows, Rows]:
    """Return the rows of the prefill and decode engines that may be asked.

    There are no prefill engines if the decode engine must prefill.

    Raises:
        NoDecodeReplicaError: no decode engine may be asked.
    """
    prefills = np.flatnonzero(view.engines["prefill"])
    decodes = np.flatnonzero(view.engines["decode"])
    if not len(decodes):
        raise NoDecodeReplicaError("no decode replica may be asked")
    if request.local_only is not None or view.settings.policy == "local":
        prefills = prefills[:0]
    return prefills, decodes


def requests_at(view: ClusterView, rows: Rows) -> Rows:
    """Return the number of prompts and answers under way on each engine."""
    engines = view.engines[rows]
    return np.asarray(engines["prompts"] + engines["running"], np.int64)


class RoundRobin:
    """Takes the engines of each role in turn."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(self, view: ClusterView, request: PlacementRequest) -> Placement:
        turn = next(self._turn)
        prefills, decodes = candidates(view, request)
        prefill = int(prefills[turn % len(prefills)]) if len(prefills) else None
        return Placement(prefill, int(decodes[turn % len(decodes)]), "round robin")


class LeastLoaded:
    """Takes the engines with the fewest requests."""

    def choose(self, view: ClusterView, request: PlacementRequest) -> Placement:
        prefills, decodes = candidates(view, request)
        prefill = _least_loaded(view, prefills) if len(prefills) else None
        return Placement(prefill, _least_loaded(view, decodes), "fewest requests")


def _least_loaded(view: ClusterView, rows: Rows) -> int:
    return int(rows[requests_at(view, rows).argmin()])


class PrefixAffinity:
    """Takes the engine with the longest cached prefix, unless it is overloaded.

    Of several, the one with the highest rendezvous weight for the prompt's first block, so that
    prompts with the same beginning meet. The policy chooses the engine that computes the prompt so;
    with disaggregation, the decode engine is the one with the fewest requests.
    """

    def choose(self, view: ClusterView, request: PlacementRequest) -> Placement:
        prefills, decodes = candidates(view, request)
        if not len(prefills):
            return Placement(None, self._nearest(view, request, decodes), "longest cached prefix")
        prefill = self._nearest(view, request, prefills)
        return Placement(prefill, _least_loaded(view, decodes), "longest cached prefix")

    def _nearest(self, view: ClusterView, request: PlacementRequest, rows: Rows) -> int:
        load = requests_at(view, rows)
        rows = rows[load <= BOUND * load.mean() + 1.0]
        return max(rows.tolist(), key=lambda row: self._score(view, request, row))

    def _score(self, view: ClusterView, request: PlacementRequest, row: int) -> tuple[int, int]:
        engine = view.engines[row]
        holder = int(engine["hbm"])
        blocks = int(request.held[holder]) if 0 <= holder < len(request.held) else 0
        return blocks, int(hash_pair(engine["key"], np.uint64(request.affinity)))


POLICIES: Mapping[str, Callable[[], PlacementPolicy]] = {
    ROUND_ROBIN: RoundRobin,
    LOAD: LeastLoaded,
    PREFIX_AFFINITY: PrefixAffinity,
}


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies."""
    return COST, *POLICIES, *_added()


def make_policy(name: str) -> PlacementPolicy | None:
    """Return a new policy; None for `cost`, which `place` computes.

    Raises:
        ValueError: there is no policy of this name.
    """
    if name == COST:
        return None
    make = POLICIES.get(name)
    if make is None and (point := _added().get(name)) is not None:
        make = point.load()
    if make is None:
        raise ValueError(
            f"router.placement must be one of {', '.join(policy_names())}, not {name!r}"
        )
    return make()


def _added() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
