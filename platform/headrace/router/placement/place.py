"""Decides which decode engine answers a request, which prefill engine computes its prompt, if any,
and where the KV of each run of the prompt comes from.

The price of a pair (prefill engine or none, decode engine) is the number of predicted seconds that
it adds over all requests (`pricing` has the formula, `pair_search` the search). `place` takes the
cheapest pair that has room for the KV and keeps the ITL and TTFT targets. If no pair keeps the TTFT
target, it takes the cheapest one that keeps the other constraints; if there is none either, the
cheapest of all. The plan then names the broken constraints. Pure: no clocks, no I/O; the view is
only read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.router.placement.arrays import LATE, NO_ROOM, REQUEST, SLOW_STEP, NodeStores
from headrace.router.placement.cluster_view import ClusterView
from headrace.router.placement.pair_search import (
    CACHED,
    CACHED_DECODE,
    ELSEWHERE,
    LOADED_RUNS,
    LOADED_RUNS_DECODE,
    LOCAL_PARTS,
    REMOTE_PARTS,
    TOTAL,
    WITHIN,
    find_choices,
)
from headrace.router.placement.policies import Placement, PlacementPolicy
from headrace.router.placement.prefill_choice import (
    ModelErrors,
    PrefillChoice,
    choose_prefill,
    cost_formula,
    exploration_limit_s,
    remote_timeout_s,
)
from headrace.router.placement.request import NoDecodeReplicaError, PlacementRequest
from headrace.router.plan import Kind, Plan, Run
from headrace_kvstore.lookup.availability import MEDIA

_BROKEN = {
    NO_ROOM: "has no room for the KV",
    SLOW_STEP: "breaks the ITL target",
    LATE: "breaks the TTFT target",
}


class _Found(NamedTuple):
    """One choice with the fields of `pair_search.CHOICE`."""

    seconds: float
    prefill: int
    decode: int
    broken: int


class _Best(NamedTuple):
    """The best choice of each kind, and the choice between the two kinds."""

    local: _Found
    pair: _Found
    details: list[list[float]]
    """The choice of each kind by part, from `find_choices`."""
    stores: NodeStores
    choice: PrefillChoice

    @property
    def chosen(self) -> _Found:
        return self.local if self.choice.kind == "local" else self.pair

    @property
    def computes(self) -> int:
        """The engine that computes the prompt."""
        return self.chosen.decode if self.chosen.prefill < 0 else self.chosen.prefill


def place(
    view: ClusterView, request: PlacementRequest, policy: PlacementPolicy | None = None
) -> Plan:
    """Return the plan for one request, without reserving anything.

    Args:
        policy: chooses the engines; None for the policy `cost`.

    Raises:
        NoDecodeReplicaError: no decode engine may be asked.
    """
    if policy is not None:
        return _plan(view, request, _chosen(view, request, policy.choose(view, request)))
    best = _best(view, request, view.engines)
    exploration = _explore(view, request, best) if request.may_explore else None
    return _plan(view, request, exploration or best)


def place_engines(
    view: ClusterView, request: PlacementRequest, policy: PlacementPolicy | None = None
) -> tuple[int, int]:
    """Return only the engines that `place` would choose, without exploration.

    Returns:
        (row of the engine that prefills for the other, or -1; row of the engine that answers)

    Raises:
        NoDecodeReplicaError: no decode engine may be asked.
    """
    if policy is not None:
        placement = policy.choose(view, request)
        return -1 if placement.prefill is None else placement.prefill, placement.decode
    chosen = _best(view, request, view.engines).chosen
    return chosen.prefill, chosen.decode


def _best(view: ClusterView, request: PlacementRequest, engines: NDArray[np.void]) -> _Best:
    if request.adapter_s is not None:
        engines = engines.copy()
        engines["adapter_s"], engines["reload_s"] = request.adapter_s
    held = np.ascontiguousarray(request.held, np.int32)
    stores = _stores(view, request)
    kinds, details = find_choices(
        *(_ask(view, request), engines, view.curves, view.padded, held, stores),
        *(view.fits, request.local_only is None),
    )
    local, pair = (_Found(*found) for found in kinds.tolist())
    if local.decode < 0:
        raise NoDecodeReplicaError("no decode replica may be asked")
    choice = _choice(view, request, local, pair)
    return _Best(local, pair, details.tolist(), stores, choice)


def _chosen(view: ClusterView, request: PlacementRequest, placement: Placement) -> _Best:
    """Return the choice of a policy, priced like the others."""
    rows = np.arange(len(view.engines))
    engines = view.engines.copy()
    engines["decode"] &= rows == placement.decode
    engines["prefill"] &= rows == (-1 if placement.prefill is None else placement.prefill)
    best = _best(view, request, engines)
    kind: Kind = "local" if placement.prefill is None else "remote"
    return best._replace(choice=PrefillChoice(kind, placement.reason))


def _explore(view: ClusterView, request: PlacementRequest, best: _Best) -> _Best | None:
    """Return the best choice that measures the engine with the oldest measurement again, among
    those that need not load an adapter for it.

    None if this costs more than a measurement may cost, or if it breaks more than `best` does.
    """
    engines, settings = view.engines, view.settings
    may = engines["decode"] & (settings.policy != "remote")
    may |= engines["prefill"] & (settings.policy != "local" and request.local_only is None)
    may[best.computes] = False
    if request.adapter_s is not None:
        may &= request.adapter_s[0] == 0.0  # a measurement is not worth a load
    ages_s = np.where(may, request.now_s - engines["measured_s"], -np.inf)
    row = int(ages_s.argmax())
    age_s, best_s = float(ages_s[row]), best.chosen.seconds
    limit_s = exploration_limit_s(best_s, age_s, settings.remeasure_s)
    if limit_s == 0.0:
        return None
    kind: Kind = "remote" if engines["prefill"][row] else "local"
    only = np.arange(len(engines)) == row
    engines = engines.copy()
    engines["prefill"] &= only
    engines["decode"] &= only | (kind == "remote")
    found = _best(view, request, engines)
    chosen = found.local if kind == "local" else found.pair
    if (
        chosen.decode < 0
        or chosen.seconds >= limit_s
        or _rank(chosen.broken) > _rank(best.chosen.broken)
    ):
        return None
    why = (
        f"measuring {kind} prefill on {view.name(row)} again after {age_s:.0f} s: predicted "
        f"{chosen.seconds:.3f} s, below {limit_s / best_s:.1f} times the best one's {best_s:.3f} s"
    )
    return found._replace(choice=PrefillChoice(kind, why, explores=True))


def _plan(view: ClusterView, request: PlacementRequest, best: _Best) -> Plan:
    _, pair, details, stores, choice = best
    predicted = _named(request, "local", LOCAL_PARTS, details[0])
    if pair.decode >= 0:
        predicted |= _named(request, "remote", REMOTE_PARTS, details[1])
    chosen, detail = best.chosen, details[choice.kind == "remote"]
    nodes, prompt = view.engines["node"], (request.prompt_tokens, view.block_tokens, stores)
    own = _runs(
        *prompt, nodes[chosen.decode], int(detail[CACHED_DECODE]), int(detail[LOADED_RUNS_DECODE])
    )
    runs, fallback = own, tuple[Run, ...]()
    if chosen.prefill >= 0:
        fallback = own
        runs = _runs(*prompt, nodes[chosen.prefill], int(detail[CACHED]), int(detail[LOADED_RUNS]))
    return Plan(
        request_id=request.request_id,
        prefill=None if chosen.prefill < 0 else view.prefill_name,
        prompt_tokens=request.prompt_tokens,
        cached_decode_tokens=int(detail[CACHED_DECODE]),
        cached_prefill_tokens=int(details[1][CACHED]),
        reachable_tokens=_reachable(view, request, stores),
        decode=view.name(chosen.decode),
        replica="" if chosen.prefill < 0 else view.name(chosen.prefill),
        runs=runs,
        fallback=fallback,
        predicted=predicted,
        timeout_s=_timeout_s(view, chosen, predicted),
        reasons=(choice.why, cost_formula(predicted)),
        broken=tuple(text for flag, text in _BROKEN.items() if chosen.broken & flag),
        explores=choice.explores,
    )


def _ask(view: ClusterView, request: PlacementRequest) -> NDArray[np.void]:
    settings = view.settings
    return np.array(
        [
            (
                *(request.prompt_tokens, view.block_tokens, view.token_bytes),
                request.itl_target_s or settings.itl_target_s or math.inf,
                request.ttft_target_s or settings.ttft_target_s or math.inf,
                *(request.now_s, request.affinity),
            )
        ],
        REQUEST,
    )


def _stores(view: ClusterView, request: PlacementRequest) -> NodeStores:
    """Return the runs that each node's store can supply."""
    available_runs = request.available_runs
    nodes, longest = len(view.loads), max(map(len, available_runs), default=0)
    lengths, waits = np.zeros((nodes, longest), np.int64), np.zeros((nodes, longest))
    media = np.zeros((nodes, longest), np.int64)
    for node, runs in enumerate(available_runs):
        for at, run in enumerate(runs):
            lengths[node, at], waits[node, at] = run.length, run.wait_s
            media[node, at] = MEDIA.index(run.medium)
    return NodeStores(lengths, waits, media, view.loads)


def _named(
    request: PlacementRequest, kind: str, parts: Sequence[str], detail: Sequence[float]
) -> dict[str, float]:
    named = {f"{kind}.{part}": seconds for part, seconds in zip(parts, detail, strict=False)}
    named[f"{kind}.total"] = detail[TOTAL]
    return named


def _choice(
    view: ClusterView, request: PlacementRequest, local: _Found, pair: _Found
) -> PrefillChoice:
    """Choose between local and remote: by exclusions and the policy, by constraints, by price."""
    if request.local_only is not None:
        return PrefillChoice("local", f"local only: {request.local_only}")
    if view.settings.policy == "local":
        return PrefillChoice("local", "policy is local")
    if pair.decode < 0:
        return PrefillChoice("local", view.no_prefill)
    if view.settings.policy == "remote":
        return PrefillChoice("remote", "policy is remote")
    if _rank(local.broken) < _rank(pair.broken):
        return PrefillChoice("local", f"remote prefill {_broken(pair)}, local prefill does not")
    if _rank(pair.broken) < _rank(local.broken):
        return PrefillChoice("remote", f"local prefill {_broken(local)}, remote prefill does not")
    return choose_prefill(local.seconds, pair.seconds)


def rank(plan: Plan) -> int:
    """Return what a plan breaks: 0 nothing, 1 its own request's target, 2 what others need."""
    return _rank(sum(flag for flag, text in _BROKEN.items() if text in plan.broken))


def _rank(broken: int) -> int:
    """Return 0 if a choice breaks no constraint, 1 if only its own TTFT target, 2 otherwise."""
    return 2 if broken & (NO_ROOM | SLOW_STEP) else int(broken > 0)


def _broken(found: _Found) -> str:
    return " and ".join(text for flag, text in _BROKEN.items() if found.broken & flag)


def _runs(
    prompt_tokens: int,
    block_tokens: int,
    stores: NodeStores,
    node: int,
    cached: int,
    loaded: int,
) -> tuple[Run, ...]:
    """Return the prompt's runs in order: cached, loaded from the node's store, and computed."""
    useful = max(0, prompt_tokens - 1) // block_tokens * block_tokens
    runs = [Run("hbm", cached)] if cached else []
    end, at = 0, cached
    for run in range(loaded):
        end = min(end + int(stores.lengths[node, run]), useful)
        if end > at:
            runs.append(Run(MEDIA[stores.media[node, run]], end - at))
            at = end
    if at < prompt_tokens:
        runs.append(Run("compute", prompt_tokens - at))
    return tuple(runs)


def _reachable(view: ClusterView, request: PlacementRequest, stores: NodeStores) -> int:
    """Return the maximum of leading tokens that one holder, or one node's store, could save."""
    blocks = max(0, request.prompt_tokens - 1) // view.block_tokens
    held = int(request.held.max(initial=0)) * view.block_tokens
    stored = int(stores.lengths.sum(axis=1).max(initial=0))
    return min(blocks * view.block_tokens, max(held, stored))


def _timeout_s(view: ClusterView, chosen: _Found, predicted: dict[str, float]) -> float:
    if chosen.prefill < 0:
        return 0.0
    p, d = view.engines[chosen.prefill], view.engines[chosen.decode]
    errors = ModelErrors(
        call_s=float(p["call_error_s"]),
        handoff_s=float(d["handoff_error_s"]),
        steps=float(p["step_error"]),
        transfer=float(view.fits[WITHIN if p["node"] == d["node"] else ELSEWHERE, 2]),
    )
    return remote_timeout_s(predicted, errors, view.settings, cold=bool(p["cold"]))
