"""The choice of blocks to evict for a namespace, by the policy's ranking of blocks. Pure.

A slot freed in one of the namespace's own segments is room at once. A slot freed in another
namespace's segment is room only when that segment is empty and changes hands. So the policy is
asked for more and more victims until they make room in either way. The shortest leading part of its
ranking that makes room is evicted. Memory thus moves from a namespace whose blocks rank low to one
that stores, and stays where it is while all namespaces are used alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace_kvstore.arena.geometry import NONE
from headrace_kvstore.blocks.slot_record import FREE
from headrace_kvstore.policy.base import evictable

BATCHES = 64

Choose = Callable[..., np.ndarray]
"""`Policy.choose`; slots that may not be evicted are removed from its answer."""


def victims(
    table: np.ndarray,
    segments: np.ndarray,
    namespace_id: int,
    slot_bytes: int,
    need: int,
    now_s: float,
    choose: Choose,
) -> np.ndarray:
    """Return slots to evict so that namespace `namespace_id` gets room for `need` blocks, if
    possible.

    table: SLOT [slots]; segments: SEGMENT [segments]; slot_bytes: size of a slot of the namespace.
        If the
    namespace's own blocks are evicted, 1/64 of its slots are evicted at once, so that one choice
    serves many blocks.
    """
    per_segment = len(table) // len(segments)
    holders = segments["namespace"].copy()
    capacity = np.minimum(per_segment, segments["bytes"].astype(np.int64) // slot_bytes)
    batch = max(need, int(capacity[holders == namespace_id].sum()) // BATCHES)
    foreign = np.flatnonzero((holders != NONE) & (holders != namespace_id) & (capacity > 0))
    ask = batch * max(1, len(np.unique(holders[holders != NONE])))
    while True:
        ranking = np.asarray(choose(table, now_s, ask), np.int64)[:ask]
        complete = len(ranking) < ask
        ranking = ranking[evictable(table[ranking], now_s)]
        own = table["namespace"][ranking] == namespace_id
        last = _last_ranks(table, ranking, foreign, per_segment)
        emptied, last = foreign[last < len(ranking)], last[last < len(ranking)]
        room = own.astype(np.int64)
        np.add.at(room, last[last >= 0], capacity[emptied[last >= 0]])
        enough = int(np.searchsorted(np.cumsum(room), need))
        if enough < len(ranking) or complete:
            break
        ask *= 2
    emptied = emptied[last <= enough]
    if not len(emptied):
        return ranking[own][:batch]
    short = max(0, need - int(capacity[emptied].sum()))
    inside = np.isin(ranking // per_segment, emptied)
    gone: np.ndarray = np.concatenate([ranking[inside], ranking[own][:short]])
    return gone


def _last_ranks(
    table: np.ndarray, ranking: np.ndarray, segments: np.ndarray, per_segment: int
) -> np.ndarray:
    """Return the rank whose eviction makes each segment empty; len(table) if none does, -1 if the
    segment is empty already."""
    rank = np.full(len(table), len(table))
    rank[ranking] = np.arange(len(ranking))
    rank[table["state"] == FREE] = -1
    last: np.ndarray = rank.reshape(-1, per_segment)[segments].max(axis=1)
    return last


def own_victims(
    table: np.ndarray, tenant: int, excess_bytes: float, now_s: float, choose: Choose
) -> np.ndarray:
    """Return the tenant's own slots to evict, worst first, so that it holds `excess_bytes` less."""
    mine = table["tenant"] == tenant
    may_go = evictable(table, now_s) & mine
    if excess_bytes <= 0.0 or not may_go.any():
        return np.zeros(0, np.int64)
    need = min(int(may_go.sum()), int(excess_bytes / table["bytes"][may_go].min()) + 1)
    ranking = np.asarray(choose(table, now_s, need, mine), np.int64)
    ranking = ranking[may_go[ranking]]
    freed_bytes = np.cumsum(table["bytes"][ranking])
    return ranking[: int(np.searchsorted(freed_bytes, excess_bytes)) + 1]
